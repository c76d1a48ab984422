"""Kernel variants: which kernels exist ahead of time, and what they are called.

The compile stage builds every variant of `table()`, and a call at run time asks for one by name. Standard library
only: the compile stage has no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from flash_attn.kernels import targets
from flash_attn.kernels.operation import Operation
from flash_attn.kernels.operations import OPERATIONS


class Variant(NamedTuple):
    """One compiled kernel. Masks, windows, lengths and head counts are run-time arguments of every variant.

    block_d: attention: head dims up to this one are served. Layers: the elements of a row.
    kind: one of the operation's kinds.
    """

    op: str
    dtype: str
    block_d: int
    kind: str

    @property
    def operation(self) -> Operation:
        """The row of its operation."""
        return OPERATIONS[self.op]

    def takes(self, argument: str) -> bool:
        """Whether the kernel has an argument that not every kind has."""
        return self.kind in self.operation.kinds_of_argument.get(argument, ())

    @property
    def name(self) -> str:
        """Unique among variants: "fwd-bf16-d128", "bwd-dq-fp16-d64-softcap"."""
        shown = "" if self.kind == self.operation.kinds_of(self.dtype)[0] else f"-{self.kind}"
        return f"{self.op}-{self.dtype}-d{self.block_d}{shown}"


def table(target: str) -> tuple[Variant, ...]:
    """Every ahead-of-time variant of a target, in a fixed order. Raises ValueError for an unknown target."""
    gpu = targets.get(target)
    return tuple(
        Variant(row.name, dtype, size, kind)
        for row in OPERATIONS.values()
        for dtype in row.dtypes_for(gpu)
        for size in row.sizes
        for kind in row.kinds_of(dtype)
        if size in row.sizes_for(kind)
    )


def bucket(head_dim: int, op: str = "fwd") -> int:
    """The smallest head-dim size of an operation that holds head_dim. Raises ValueError where none does."""
    return OPERATIONS[op].bucket(head_dim)


def serving(op: str, dtype: str, kind: str, size: int) -> str:
    """The kind of kernel of an operation that serves a call of a kind and a size."""
    return OPERATIONS[op].serving(dtype, kind, size)
