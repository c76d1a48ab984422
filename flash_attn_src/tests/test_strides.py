"""Strides of axes of size 1 never matter: every function, each argument, strides that no dense tensor has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton
from flash_attn.attention.backends.triton import inputs
from flash_attn.core import layer
from public_calls import Call, calls

ONE: dict[str, dict[str, int]] = {
    "everything": {"batch": 1, "seqlen_q": 1, "seqlen_k": 1, "heads": 1, "heads_k": 1, "page": 1},
    "head_dim": {"dim": 1},
    "batch": {"batch": 1},
    "queries": {"seqlen_q": 1},
    "keys": {"seqlen_k": 1, "page": 1},
    "heads": {"heads": 1},
}
STRIDES = (0, 3, 1 << 33)
FEWER = (1 << 33) + 3  # neither aligned nor held by int32


def _strange(x: torch.Tensor, stride: int) -> torch.Tensor | None:
    """x with unusual strides on its axes of size 1 and the same elements. None if it has no such axis."""
    if 1 not in x.shape:
        return None
    strides = [stride if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


def _changed(call: Call, strides: tuple[int, ...] = STRIDES) -> Iterator[tuple[str, int, Call]]:
    for argument in call.tensors:
        for stride in strides:
            fresh = call.fresh()
            strange = _strange(fresh.tensors[argument], stride)
            if strange is not None:
                yield (
                    argument,
                    stride,
                    Call(call.function, {**fresh.tensors, argument: strange}, call.options, call.written),
                )


def _check(name: str, call: Call, strides: tuple[int, ...] = STRIDES) -> None:
    expected = call.fresh().run()
    for argument, stride, changed in _changed(call, strides):
        for got, best in zip(changed.run(), expected, strict=True):
            assert_close(f"{name}, {argument} of stride {stride}", got, best)


@pytest.mark.parametrize("axis", ONE)
def test_by_pytorch(axis: str) -> None:
    with backends.using(oracle):
        for name, call in calls(**ONE[axis]).items():
            _check(name, call)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of a CPU are in the interpreter's reach alone")
@pytest.mark.parametrize("axis", ["everything", "head_dim"])
@pytest.mark.parametrize(
    "name",
    ["func, alibi and sinks", "func, bias", "varlen", "varlen, pages", "kvcache", "kvcache, new", "kvcache, pages",
     "FA3 kvcache, pages", "extension fwd", "extension bwd", "extension fwd_kvcache", "FA3 combine"],
)  # fmt: skip
def test_by_kernels(name: str, axis: str) -> None:
    sizes = {**ONE["everything"], **ONE[axis]} if axis == "head_dim" else ONE[axis]
    result = calls(**sizes)
    if name not in result:
        pytest.skip("the extension takes multiples of 8")
    with backends.using(triton):
        _check(name, result[name], (FEWER,))


@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
@pytest.mark.parametrize("axis", ["everything", "head_dim"])
def test_gradients(axis: str, backend: Any) -> None:
    if backend is triton and torch.cuda.is_available():
        pytest.skip("tensors of a CPU are in the interpreter's reach alone")
    sizes = {**ONE["everything"], **ONE[axis]}
    with backends.using(backend):
        for name in ("func, alibi and sinks", "func, bias", "varlen", "FA4 func"):
            call = calls(**sizes)[name]

            def gradients(given: Call) -> tuple[torch.Tensor, ...]:
                names = [n for n, x in given.tensors.items() if x.is_floating_point() and n != "alibi_slopes"]
                leaves = {n: given.tensors[n].detach().requires_grad_() for n in names}
                out = given.function(**{**given.tensors, **leaves}, **given.options)
                out = out[0] if isinstance(out, tuple) else out
                return torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

            expected = gradients(call.fresh())
            for argument, stride, changed in _changed(call, (FEWER,)):
                for got, best in zip(gradients(changed), expected, strict=True):
                    assert_close(f"{name}, {argument} of stride {stride}", got, best)


def test_strides_that_int32_does_not_hold() -> None:
    """A launcher refuses such an argument. The interpreter takes it."""
    x = torch.zeros(1, 1, 1, 16)
    far = x.as_strided(x.shape, (1 << 33, 1 << 34, 1 << 35, 1))
    assert inputs.strides_of(far, 4) == inputs.near(far) == (0, 0, 0)
    assert max(inputs.rows(far, 4)[1]) < 1 << 31
    assert inputs.alibi_stride_of(far[0, 0]) == 16
    assert inputs.table_stride_of(far[0, 0]) == 16
    assert layer.dense_rows(far[0, 0]).stride(0) < 1 << 31


@pytest.mark.parametrize(("row", "copied"), [(inputs.MAX_ROW_STRIDE * 4 - 4, False), (inputs.MAX_ROW_STRIDE * 4, True)])
def test_rows_as_far_from_each_other_as_kernels_assume(row: int, copied: bool) -> None:
    """kernels/common.py tells the compiler that they are nearer; others are copied."""
    x = torch.zeros(row + 16).as_strided((1, 2, 1, 16), (0, row, 16, 1))
    assert (inputs.rows(x, 4)[0] is not x) is copied
