"""What only a GPU can show of the Triton kernels: races, huge tensors, graphs, the whole grid of options."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn import flash_attn_fp8_func, flash_attn_func
from flash_attn.core import device
from flash_attn.kernels.targets import fp8_format
from torch.autograd import forward_ad

if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
DIMS = [24, 32, 64, 80, 96, 128, 192, 256, 512]
LENGTHS = [(128, 128), (113, 203), (203, 113), (1, 239), (512, 700), (799, 3), (1023, 1024)]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "causal window": {"causal": True, "window_size": (64, 0)},
}
OPTIONS = {"plain": {}, "softcap": {"softcap": 8.0}, "alibi": {"alibi_slopes": True}}


def _draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def _results(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, **call: object
) -> list[torch.Tensor]:
    out = flash_attn_func(q, k, v, **call)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_grid(mask: str, option: str, dim: int, dtype: torch.dtype) -> None:
    """Every length of the list, forward and gradients, within twice the error of PyTorch in the same type."""
    torch.manual_seed(dim)
    call = {**MASKS[mask], **OPTIONS[option]}
    if option == "alibi":
        call["alibi_slopes"] = torch.rand(6, device="cuda")
    expected = {"window" if name == "window_size" else name: value for name, value in call.items()}
    for seqlen_q, seqlen_k in LENGTHS:
        _check(2, seqlen_q, seqlen_k, 6, 2, dim, dtype, call, expected)


def _check(
    batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_k: int, dim: int, dtype: torch.dtype,
    call: dict[str, object], expected: dict[str, object],
) -> None:  # fmt: skip
    """Forward and gradients of a call, against the reference with the arguments `expected`."""
    q, dout = (_draw(batch, seqlen_q, heads, dim, dtype=dtype) for _ in range(2))
    k, v = _draw(batch, seqlen_k, heads_k, dim, dtype=dtype), _draw(batch, seqlen_k, heads_k, dim, dtype=dtype)
    got = _results(q, k, v, dout.detach(), **call)

    def by_the_book(compute: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(compute).requires_grad_() for x in (q, k, v)]
        out, _ = reference.attention(*leaves, dtype=compute, **expected)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(compute))]

    names = (f"{name} {seqlen_q}x{seqlen_k}" for name in ("out", "dq", "dk", "dv"))
    for name, value, exact, rough in zip(names, got, by_the_book(torch.float64), by_the_book(dtype), strict=True):
        assert_close(name, value, exact, rough=rough, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [24, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_query_heads_shared_out(causal: bool, dim: int, dtype: torch.dtype) -> None:
    """So few key heads that programs of dk and dv share out the query heads of each."""
    torch.manual_seed(dim)
    for batch, seqlen_q, seqlen_k, heads, heads_k in ((1, 1100, 300, 8, 1), (2, 400, 700, 24, 2)):
        _check(batch, seqlen_q, seqlen_k, heads, heads_k, dim, dtype, {"causal": causal}, {"causal": causal})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [24, 64, 128, 256])
@pytest.mark.parametrize("option", OPTIONS)
def test_dropout(option: str, dim: int, dtype: torch.dtype) -> None:
    """out and the gradients equal PyTorch's with the mask in S_dmask, so all three kernels drew the same mask."""
    torch.manual_seed(dim)
    call = dict(OPTIONS[option])
    if option == "alibi":
        call["alibi_slopes"] = torch.rand(4, device="cuda")
    for seqlen_q, seqlen_k, causal in ((113, 203, True), (256, 256, False)):
        q, dout = _draw(2, seqlen_q, 4, dim, dtype=dtype), _draw(2, seqlen_q, 4, dim, dtype=dtype).detach()
        k, v = _draw(2, seqlen_k, 2, dim, dtype=dtype), _draw(2, seqlen_k, 2, dim, dtype=dtype)
        out, _, dmask = flash_attn_func(q, k, v, dropout_p=0.2, causal=causal, return_attn_probs=True, **call)
        got = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

        def by_the_book(compute: torch.dtype) -> list[torch.Tensor]:
            leaves = [x.detach().to(compute).requires_grad_() for x in (q, k, v)]  # noqa: B023
            out, _ = reference.attention(
                *leaves,
                causal=causal,  # noqa: B023
                dropout_p=0.2,
                kept=~dmask.signbit(),  # noqa: B023
                dtype=compute,
                **call,
            )
            return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(compute))]  # noqa: B023

        names = (f"{name} {seqlen_q}x{seqlen_k}" for name in ("out", "dq", "dk", "dv"))
        for name, value, exact, rough in zip(names, got, by_the_book(torch.float64), by_the_book(dtype), strict=True):
            assert_close(name, value, exact, rough=rough, dtype=dtype)


@pytest.mark.parametrize(("dim", "causal"), list(itertools.product([64, 128], [False, True])))
def test_a_hundred_repeats_are_equal(dim: int, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (_draw(2, 777, heads, dim, dtype=torch.bfloat16) for heads in (16, 2, 2))
    dout = torch.randn_like(q)
    first = _results(q, k, v, dout, causal=causal)
    for _ in range(100):
        assert all(map(torch.equal, first, _results(q, k, v, dout, causal=causal)))


def test_offsets_beyond_32_bits() -> None:
    """More than 2^31 elements in each tensor: the last rows and heads equal those of a small call."""
    seqlen, heads, dim = 70000, 256, 128
    q, k, v = (torch.randn(1, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert q.numel() > 2**31
    window = (128, 0)
    with torch.no_grad():
        out = flash_attn_func(q, k, v, window_size=window)[:, -64:, -2:]
        tail = [x[:, -256:, -2:].contiguous() for x in (q, k, v)]
        assert_close("out", out, flash_attn_func(*tail, window_size=window)[:, -64:], tiny=1e-2)


def test_huge_scores_make_no_nan() -> None:
    torch.manual_seed(1)
    q, k, v = (_draw(1, 300, 2, 64, dtype=torch.float32) for _ in range(3))
    scaled = [(q * 1e4).detach().requires_grad_(), (k * 1e4).detach().requires_grad_(), v]
    dout = torch.randn_like(q)
    for value in _results(*scaled, dout, causal=True):
        assert value.isfinite().all()


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_fp8_func])
def test_compiled_in_one_graph(function: Callable[..., torch.Tensor]) -> None:
    if function is flash_attn_fp8_func and fp8_format(device.of(0).target) is None:
        pytest.skip("needs matrix units for FP8")
    leaves = [_draw(2, 200, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    result = []
    torch.compiler.reset()
    for each in (function, torch.compile(function, fullgraph=True)):
        out = each(*leaves, causal=True)
        result.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for expected, got in zip(*result, strict=True):
        assert_close("compiled", got, expected)


def test_forward_mode_differentiation_is_refused() -> None:
    q = torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.float16)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        for arguments in ((dual, q, q), (q, q, dual)):
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                flash_attn_func(*arguments)
        assert flash_attn_func(q, q, q).shape == q.shape


def test_dropout_in_a_graph_draws_new_numbers_at_each_replay() -> None:
    torch.manual_seed(2)
    q = torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        flash_attn_func(q, q, q, dropout_p=0.3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_attn_func(q, q, q, dropout_p=0.3)
        graph.replay()
        first = out.clone()
        graph.replay()
    assert not torch.equal(first, out)
