"""A launch is filled by name: signatures are those of the kernels, and a missing or unknown name is an error."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.attention import backends
from flash_attn.attention.backends import triton as triton_backend
from flash_attn.core import device
from flash_attn.core.arguments import Arguments
from flash_attn.core.protocol import launch
from flash_attn.core.store import KernelError
from flash_attn.core.stored import _arguments
from flash_attn.kernels import launches, signatures
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.variants import Variant, table

TARGETS = ("gfx90a", "gfx942", "gfx1100", "sm_90")


@pytest.mark.parametrize("target", TARGETS)
def test_signatures_are_the_parameters_that_triton_sees(target: str) -> None:
    for variant in table(target):
        spec = launches.specification(variant, target)
        function = getattr(importlib.import_module(f"flash_attn.kernels.{spec.module}"), spec.symbol)
        names = tuple(x for x in function.arg_names if x not in spec.constants and x not in spec.absent)
        assert signatures.names(variant, target) == names, variant.name
        arguments = Arguments.of(variant, target)
        assert (*arguments.pointers, *arguments.numbers) == names, "pointers come first"


def test_types_and_exceptions_name_arguments_that_kernels_have() -> None:
    """A misspelt name in a row would otherwise have a default type, or no effect."""
    for row in OPERATIONS.values():
        names = signatures.parameters(row.module, row.function)
        typed = {name for each in row.types.values() for name in each.split()}
        for name in (*typed, *row.aligned, *row.range_arguments):
            assert name in names, f"{row.name}: {name}"


def test_a_launch_takes_its_arguments_by_name() -> None:
    x, y = torch.zeros(1), torch.zeros(1)
    arguments = Arguments("k", ("out", "q"), ("group", "scale"), ("out", "q", "group", "scale", "other"))
    values = {"scale": 0.5, "other": 3, "q": x, "out": y, "group": 2}
    tensors, numbers = arguments.fill(values)
    assert tensors[0] is y
    assert tensors[1] is x
    assert numbers == (2, 0.5)
    for name in ("scale", "q"):
        with pytest.raises(KernelError, match=f"k: the launch has no value for the argument {name}"):
            arguments.fill({key: value for key, value in values.items() if key != name})
    with pytest.raises(KernelError, match="k: no kernel has an argument made_up"):
        arguments.fill({**values, "made_up": 1})


def test_kernels_with_few_arguments() -> None:
    assert Arguments("k", (), ("a",), ("a",)).fill({"a": 7}) == ((), (7,))


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_call_whose_names_do_not_fit_raises_before_it_launches(change: str) -> None:
    """Through a public function: a kernel with an argument that no call names, and a call with a name of no kernel."""
    launched: list[Any] = []

    class Kernel:
        block_m = block_n = 64
        num_xcds = 1

        def __init__(self, arguments: Arguments) -> None:
            self.arguments = arguments

        def launch(self, *given: Any) -> None:
            launched.append(given)

    class Gpu:
        target, compute_units = "gfx942", 304

        def kernel(self, variant: Variant) -> Kernel:
            real = Arguments.of(variant, self.target)
            if change == "missing":
                return Kernel(
                    Arguments(real.kernel, real.pointers, (*real.numbers, "made_up"), (*real.known, "made_up"))
                )
            return Kernel(Arguments(real.kernel, real.pointers, real.numbers, real.known - {"scale"}))

        def has_composable_kernel(self) -> bool:
            return False

    x = torch.zeros(1, 64, 2, 64, dtype=torch.float16)
    text = {"missing": "fwd-fp16-d64: the launch has no value for the argument made_up", "unknown": "argument scale"}
    with device.using(Gpu()), backends.using(triton_backend), pytest.raises(KernelError, match=text[change]):  # type: ignore[arg-type]
        flash_attn_func(x, x, x)
    assert not launched


def test_names_that_do_not_fit_a_stored_kernel() -> None:
    archive = mock.Mock(path="gfx942.zip", kernels={"k": {"params": "Pif00"}}, vocabulary={"q", "a", "b"})
    archive.signature.return_value = ["q", "a", "b"]
    arguments = _arguments(archive, "k")
    assert (arguments.pointers, arguments.numbers) == (("q",), ("a", "b"))
    archive.signature.return_value = ["q", "a"]
    with pytest.raises(KernelError, match=r"gfx942\.zip names 2 arguments of k, which takes 3: reinstall"):
        _arguments(archive, "k")


def test_launch_fills_and_launches() -> None:
    kernel = mock.Mock(arguments=Arguments("k", ("q",), ("group",), ("q", "group")))
    launch(kernel, (1, 2, 3), {"q": None, "group": 4})
    kernel.launch.assert_called_once_with((1, 2, 3), (None,), (4,))
