"""A launch is filled by name: a call maps names to values, and each kernel picks the arguments that it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from flash_attn.core.store import KernelError
from flash_attn.kernels import signatures
from flash_attn.kernels.variants import Variant

Value = torch.Tensor | float | None
Values = Mapping[str, Value]
_Pick = Callable[[Any], tuple[Any, ...]]


class Arguments:
    """The names of a kernel's run-time arguments in its order, pointers first.

    known: the names of the arguments of all kernels. A launch with another name is refused.
    """

    __slots__ = ("_numbers_of", "_tensors_of", "kernel", "known", "numbers", "pointers")

    def __init__(self, kernel: str, pointers: Sequence[str], numbers: Sequence[str], known: Collection[str]) -> None:
        self.kernel, self.pointers, self.numbers = kernel, tuple(pointers), tuple(numbers)
        self.known = frozenset(known)
        self._tensors_of, self._numbers_of = picker(self.pointers), picker(self.numbers)

    @classmethod
    def of(cls, variant: Variant, target: str) -> Arguments:
        """The arguments of a variant's kernel, from the kernel's source."""
        names = signatures.names(variant, target)
        is_pointer = {name: variant.operation.argument_type(name, variant.dtype).startswith("*") for name in names}
        pointers = [name for name in names if is_pointer[name]]
        numbers = [name for name in names if not is_pointer[name]]
        return cls(variant.name, pointers, numbers, signatures.vocabulary())

    def fill(self, values: Values) -> tuple[tuple[torch.Tensor | None, ...], tuple[int | float, ...]]:
        """The tensors and the numbers of a launch. values: name -> a tensor, None for an absent tensor, or a number.

        values may have names that other kernels take. Raises KernelError for a name that the kernel takes and values
        lacks, and for a name that no kernel takes.
        """
        try:
            filled = self._tensors_of(values), self._numbers_of(values)
        except KeyError as error:
            raise KernelError(f"{self.kernel}: the launch has no value for the argument {error.args[0]}") from None
        if not self.known.issuperset(values):
            raise KernelError(f"{self.kernel}: no kernel has an argument {min(set(values) - self.known)}")
        return filled


def picker(keys: Sequence[Any]) -> _Pick:
    """A function from a container to the tuple of the items with these keys."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda container: tuple([container[key] for key in keys])
