"""FlashAttention-3's functions on FP8 tensors, in PyTorch and in the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator

import flash_attn_interface as fa3
import pytest
import torch
from fa3_tensors import DEVICE, draw, index, qkv
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton
from flash_attn.layers import rotary_functions


@pytest.fixture(autouse=True, params=[oracle, triton], ids=["torch", "triton"])
def _backend(request: pytest.FixtureRequest, fp8_rounding: None) -> Iterator[None]:  # noqa: ARG001
    if DEVICE == "cuda" and request.param is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    with backends.using(request.param):
        yield


def _check(out: torch.Tensor, expected: torch.Tensor, spread: torch.Tensor) -> None:
    """out is near attention of the same numbers in fp32.

    The kernels round each weight to FP8, which changes it by a 16th at most, and the result to bf16. `spread` is
    attention with the magnitudes of the values. A thousandth is for what the matrix units drop of sums.
    """
    assert out.dtype is torch.bfloat16
    assert not out.requires_grad
    bar = spread / 16 + expected.abs() / 256 + 1e-3
    error = (out.float() - expected).abs()
    assert (error <= bar).all(), f"{float((error / bar).max()):.2f} of the bar"


def test_fp8_inputs_with_their_factors() -> None:
    q, k, v = qkv()
    small, factors, wide = [], [], []
    for x in (q, k, v):
        factor = x.abs().amax((1, 3)).amax(1, keepdim=True).expand(2, 2) / 448
        small.append((x / factor[:, None, :1, None]).to(torch.float8_e4m3fn))
        wide.append(small[-1].float() * factor[:, None, :1, None])
        factors.append(factor)
    out = fa3.flash_attn_func(*small, None, True, None, *factors)
    expected, spread = (fa3.flash_attn_func(*wide[:2], x, causal=True) for x in (wide[2], wide[2].abs()))
    _check(out, expected, spread)


def _small(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers in FP8, and the same in fp32."""
    small = draw(*shape, seed=seed).to(torch.float8_e4m3fn)
    return small.requires_grad_(), small.detach().float()


@pytest.mark.parametrize("varlen", [False, True])
def test_fp8_with_chunks_used_rows_and_sinks(varlen: bool) -> None:
    """As of the same numbers in fp32, whose scale the descales are."""
    drawn = [_small(2, n, h, 16, seed=i) for i, (n, h) in enumerate(((7, 4), (9, 2), (9, 2)))]
    (q, wide_q), (k, wide_k), (v, wide_v) = drawn
    descales = [draw(2, 2, seed=seed).sigmoid() + 0.5 for seed in (3, 4, 5)]
    factors = [descales[0].repeat_interleave(2, 1), *descales[1:]]
    wide = [x * factor[:, None, :, None] for x, factor in zip((wide_q, wide_k, wide_v), factors, strict=True)]
    given = {"causal": True, "attention_chunk": 4, "return_attn_probs": True}
    in_fp8 = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    if varlen:
        lengths = [index(0, n, 2 * n) for n in (7, 9)]
        used = {"seqused_q": index(7, 3), "seqused_k": index(5, 9)}
        out, lse = fa3.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), *lengths, 7, 9, **used, **given, **in_fp8
        )
        rows = [x.flatten(0, 1) for x in wide]
        (expected, wanted_lse), (spread, _) = (
            fa3.flash_attn_varlen_func(*rows[:2], x, *lengths, 7, 9, **used, **given) for x in (rows[2], rows[2].abs())
        )
    else:
        given |= {"s_aux": draw(4)}
        out, lse = fa3.flash_attn_func(q, k, v, **given, **in_fp8)
        (expected, wanted_lse), (spread, _) = (
            fa3.flash_attn_func(*wide[:2], x, **given) for x in (wide[2], wide[2].abs())
        )
    _check(out, expected, spread)
    torch.testing.assert_close(lse, wanted_lse, rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fp8_is_turned(packed: bool, interleaved: bool) -> None:
    """Queries and new keys turn in fp32 and are cast again; over pages, from lengths that the device knows."""
    (q, wide_q), (k, wide_k), (v, wide_v) = (_small(2, 3, h, 16, seed=i) for i, h in enumerate((4, 2, 2)))
    pages = [_small(6, 4, 2, 16, seed=seed)[0].detach() for seed in (3, 4)]
    table = index(4, 0, 2, 1, 5, 3).view(2, 3)
    angles = draw(12, 4, seed=5)
    cos, sin = angles.cos().to(torch.float8_e4m3fn), angles.sin().to(torch.float8_e4m3fn)
    given = {
        "cache_seqlens": index(2, 7), "page_table": table, "causal": True, "rotary_interleaved": interleaved,
        "return_softmax_lse": True,
    }  # fmt: skip
    wide_pages = [x.float() for x in pages]
    # The reference turns first, by the same angles, and rounds to FP8.
    starts = index(2, 7)
    turned = []
    for x in (wide_q, wide_k):
        rows = rotary_functions.apply_rotary_emb(x, cos.float(), sin.float(), interleaved, False, starts)
        turned.append(rows.to(torch.float8_e4m3fn).float())
    expected, lse, *_ = fa3.flash_attn_with_kvcache(turned[0], *wide_pages, turned[1], wide_v, **given)
    if packed:
        ends = index(0, 3, 6)
        given |= {"cu_seqlens_q": ends, "cu_seqlens_k_new": ends, "max_seqlen_q": 3}
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    with torch.no_grad():
        out, result, *_ = fa3.flash_attn_with_kvcache(q, *pages, k, v, rotary_cos=cos, rotary_sin=sin, **given)
    if packed:
        out, result = out.view(2, 3, 4, 16), result.view(4, 2, 3).transpose(0, 1)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(result, lse)
    assert all(torch.equal(one.float(), other) for one, other in zip(pages, wide_pages, strict=True))
