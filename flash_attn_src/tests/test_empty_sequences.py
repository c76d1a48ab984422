"""Packed sequences without queries, without keys or without both: first, in the middle, last and alone.

Their gradients are zero, and so are those of keys that no query sees. What no kernel writes is NaN here. Triton's
kernels run in its interpreter, Composable Kernel's launches as in test_ck_backend.py. With --gfx the launches of
Composable Kernel run the code of that target. test_asm_backend.py has the same for AMD's assembly kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import flash_attn
import pytest
import torch
from assert_close import assert_close
from ck_recorded import BF16, running
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.attention.backends import triton
from triton_calls import DEVICE

_api: Any = flash_attn  # its results depend on arguments, which types cannot say

# (queries, keys) of each sequence. Two more rows follow the last one.
SEQUENCES = {
    "no queries first": [(0, 30), (20, 50)],
    "no queries last": [(20, 50), (0, 150)],
    "no queries between": [(9, 40), (0, 30), (0, 7), (20, 10)],
    "no keys first": [(20, 0), (9, 40)],
    "no keys last": [(9, 40), (20, 0)],
    "nothing between": [(9, 40), (0, 0), (20, 10)],
    "no queries at all": [(0, 30), (0, 20)],
    "no keys at all": [(30, 0), (20, 0)],
    "nothing at all": [(0, 0), (0, 0)],
}
ORDERS = pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)


@pytest.fixture(autouse=True)
def _unwritten_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(
    sequences: list[tuple[int, int]], dtype: torch.dtype, device: str, dim: int, served: Any, **options: Any
) -> None:
    """Compares a forward and a backward with PyTorch's in fp32, and with zero outside of the sequences."""
    torch.manual_seed(0)
    rows_q, rows_k = (sum(lengths) for lengths in zip(*sequences, strict=True))
    shapes = ((rows_q + 2, 2, dim), (rows_k + 2, 1, dim), (rows_k + 2, 1, dim), (rows_q + 2, 2, dim))
    q, k, v, dout = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    starts = [
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in zip(*sequences, strict=True)
    ]
    longest = [max(1, *lengths) for lengths in zip(*sequences, strict=True)]
    results = []
    for is_exact in (False, True):
        leaves = [(x.float() if is_exact else x).detach().requires_grad_() for x in (q, k, v)]
        with backends.using(torch_backend) if is_exact else served():
            out = _api.flash_attn_varlen_func(*leaves, *starts, *longest, **options)
            results.append([out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))])
    for name, result, expected in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        rows = rows_k if name in ("dk", "dv") else rows_q
        assert not result[rows:].any(), name
        assert_close(name, result[:rows], expected[:rows], tiny=0.03 if dtype is BF16 else 5e-3)


@pytest.mark.usefixtures("_tiles", "interpreter_multiplies_bf16")
@ORDERS
def test_triton(sequences: list[tuple[int, int]]) -> None:
    for dtype, causal in ((torch.float16, False), (BF16, True)):
        check(sequences, dtype, DEVICE, 32, lambda: backends.using(triton), causal=causal)


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize(("dtype", "is_deterministic"), [(BF16, False), (torch.float16, True)])
@ORDERS
def test_composable_kernel(
    request: pytest.FixtureRequest, sequences: list[tuple[int, int]], dtype: torch.dtype, is_deterministic: bool
) -> None:
    """dK and dV were NaN upstream, where a kernel without a mask took one step over no queries: pull request 5790 of
    ROCm/rocm-libraries. The kernels here are all masked and leave before that step."""
    with running(request) as launches:
        check(sequences, dtype, "cpu", 64, nullcontext, deterministic=is_deterministic)
    assert {launch.kernel.split("-")[0] for launch in launches} >= {"fwd", "dot", "dqdkdv", "convert"}


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize("window", [(3, 0), (3, 2)])
def test_composable_kernel_with_keys_that_no_query_sees(
    request: pytest.FixtureRequest, window: tuple[int, int]
) -> None:
    """Whole blocks of 128 keys lie outside of every window."""
    torch.manual_seed(0)
    shapes = ((1, 10, 2, 64), (1, 400, 2, 64), (1, 400, 2, 64))
    leaves = [torch.randn(shape).to(BF16).requires_grad_() for shape in shapes]
    results = []
    for is_exact in (False, True):
        given = [(x.float() if is_exact else x).detach().requires_grad_() for x in leaves]
        with backends.using(torch_backend) if is_exact else running(request):
            out = _api.flash_attn_func(*given, window_size=window)
            results.append(torch.autograd.grad(out, given, torch.ones_like(out)))
    for name, result, expected in zip(("dq", "dk", "dv"), *results, strict=True):
        assert_close(name, result, expected, tiny=0.03)
    assert not results[0][1][:, :256].any()
    assert not results[0][2][:, :256].any()
