"""Queries in fp16 and bf16 over a cache in FP8, by PyTorch and by the Triton kernels, against fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flash_attn
import flash_attn_interface as fa3
import pytest
import torch
from assert_close import assert_close
from fa3_tensors import DEVICE, draw, index
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton

FP8 = torch.float8_e4m3fn
TYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@pytest.fixture(autouse=True, params=[oracle, triton], ids=["torch", "triton"])
def _backend(request: pytest.FixtureRequest, fp8_rounding: None) -> Iterator[None]:  # noqa: ARG001
    if DEVICE == "cuda" and request.param is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    with backends.using(request.param):
        yield


def _cache(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache in FP8 and its numbers in fp32."""
    small = (draw(*shape, seed=seed) * 4).to(FP8)
    return small, small.float()


def _descales(batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(batch, heads, seed=8).sigmoid() / 4, draw(batch, heads, seed=9).sigmoid()


def _wide(cache: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
    return cache * descale[:, None, :, None]


def _check(out: torch.Tensor, wide: tuple[torch.Tensor, ...], dtype: torch.dtype, **options: Any) -> None:
    """The error against fp32 is at most twice the error of the same call with a cache in dtype.

    wide: q, k_cache and v_cache, or q and a cache whose first 512 columns are the values.
    """
    assert out.dtype is dtype
    results = []
    with backends.using(oracle) if DEVICE == "cpu" else backends.using(triton):
        for of in (torch.float32, dtype):
            q, k, *rest = (x.to(of) for x in wide)
            results.append(flash_attn.flash_attn_with_kvcache(q, k, rest[0] if rest else k[..., :512], **options))
    exact, rough = results
    assert_close("out", out, exact, rough=rough, tiny=1e-3)


@TYPES
@pytest.mark.parametrize("dim", [40, 128])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_decode(dtype: torch.dtype, dim: int, seqlen_q: int) -> None:
    q = draw(2, seqlen_q, 4, dim).to(dtype)
    (k, wide_k), (v, wide_v) = (_cache(2, 37, 2, dim, seed=seed) for seed in (1, 2))
    k_descale, v_descale = _descales(2, 2)
    given: dict[str, Any] = {"cache_seqlens": index(37, 20), "causal": True}
    wide = q.float(), _wide(wide_k, k_descale), _wide(wide_v, v_descale)
    for num_splits in (1, 3):
        out = flash_attn.flash_attn_with_kvcache(
            q, k, v, k_descale=k_descale, v_descale=v_descale, num_splits=num_splits, **given
        )
        _check(out, wide, dtype, **given)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k, v, k_descale=k_descale, v_descale=v_descale, return_softmax_lse=True, **given
    )
    _check(out, wide, dtype, **given)
    torch.testing.assert_close(lse, fa3.flash_attn_with_kvcache(*wide, return_softmax_lse=True, **given)[1], rtol=1e-3,
                               atol=2e-3)  # fmt: skip


@TYPES
def test_pages_sinks_softcap_and_a_window(dtype: torch.dtype) -> None:
    q, table = draw(2, 2, 4, 32).to(dtype), index(4, 0, 2, 1, 5, 3).view(2, 3)
    (k, wide_k), (v, wide_v) = (_cache(6, 16, 2, 32, seed=seed) for seed in (1, 2))
    descale = torch.full((2, 2), 0.25, device=DEVICE)
    given: dict[str, Any] = {
        "cache_seqlens": index(41, 18), "block_table": table, "causal": True, "window_size": (15, 0), "softcap": 8.0,
        "s_aux": draw(4).to(dtype),
    }  # fmt: skip
    out = flash_attn.flash_attn_with_kvcache(q, k, v, k_descale=descale, v_descale=descale, **given)
    _check(out, (q.float(), wide_k * 0.25, wide_v * 0.25), dtype, **given)


@TYPES
@pytest.mark.parametrize("paged", [False, True])
def test_latent_attention(dtype: torch.dtype, paged: bool) -> None:
    q = draw(2, 1, 4, 576).to(dtype)
    cache, wide = _cache(2 if not paged else 6, 16, 1, 576, seed=1)
    descale = torch.full((2, 1), 0.125, device=DEVICE)
    given: dict[str, Any] = {"cache_seqlens": index(13, 7), "softmax_scale": 0.05}
    if paged:
        given["block_table"] = index(4, 5).view(2, 1)
    out = flash_attn.flash_attn_with_kvcache(q, cache, cache[..., :512], k_descale=descale, v_descale=descale, **given)
    wide = wide * 0.125
    _check(out, (q, wide), dtype, **given)


def test_a_second_query_has_the_descale_of_the_values() -> None:
    q, qv = draw(2, 2, 4, 64).bfloat16(), draw(2, 2, 4, 128, seed=5).bfloat16()
    (k, wide_k), (v, wide_v) = _cache(2, 21, 2, 64, seed=1), _cache(2, 21, 2, 128, seed=2)
    k_descale, v_descale = _descales(2, 2)
    out = fa3.flash_attn_with_kvcache(q, k, v, qv=qv, k_descale=k_descale, v_descale=v_descale, softmax_scale=0.05)
    wide = q.float(), _wide(wide_k, k_descale), _wide(wide_v, v_descale)
    expected = fa3.flash_attn_with_kvcache(*wide, qv=qv.float(), softmax_scale=0.05)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_bf16_queries_of_any_size(size: float) -> None:
    """fp16, in which the kernels multiply, has no such numbers."""
    q = (draw(1, 1, 2, 32) * size).bfloat16()
    (k, wide_k), (v, wide_v) = (_cache(1, 20, 1, 32, seed=seed) for seed in (1, 2))
    given: dict[str, Any] = {"softmax_scale": 0.1 / size}
    out = flash_attn.flash_attn_with_kvcache(q, k, v, k_descale=torch.ones(1, 1, device=DEVICE), **given)
    _check(out, (q.float(), wide_k, wide_v), torch.bfloat16, **given)


def test_packed_queries() -> None:
    q = draw(5, 4, 32).bfloat16()
    (k, wide_k), (v, wide_v) = (_cache(2, 20, 2, 32, seed=seed) for seed in (1, 2))
    k_descale, v_descale = _descales(2, 2)
    given: dict[str, Any] = {"cu_seqlens_q": index(0, 2, 5), "max_seqlen_q": 3, "causal": True}
    out = fa3.flash_attn_with_kvcache(q, k, v, k_descale=k_descale, v_descale=v_descale, **given)
    wide = q.float(), _wide(wide_k, k_descale), _wide(wide_v, v_descale)
    torch.testing.assert_close(out.float(), fa3.flash_attn_with_kvcache(*wide, **given), rtol=1e-2, atol=4e-3)


def test_wrong_calls() -> None:
    q, (k, _), ones = draw(1, 1, 2, 16).bfloat16(), _cache(1, 8, 1, 16, seed=1), torch.ones(1, 1, device=DEVICE)
    attend = flash_attn.flash_attn_with_kvcache
    with pytest.raises(TypeError, match=r"k_cache: got torch.float8_e4m3fn without k_descale"):
        attend(q, k, k)
    with pytest.raises(NotImplementedError, match=r"k, v: got keys to append to a cache of torch.float8_e4m3fn"):
        attend(q, k, k, q[:, :, :1], q[:, :, :1], cache_seqlens=3, k_descale=ones)
    with pytest.raises(TypeError, match=r"v_cache: got torch.bfloat16, wanted torch.float8_e4m3fn"):
        attend(q, k, k.bfloat16(), k_descale=ones)
    with pytest.raises(ValueError, match=r"k_descale: got torch.float32 \(1,\).*wanted torch.float32 \(1, 1\)"):
        attend(q, k, k, k_descale=ones[0])
    with pytest.raises(ValueError, match=r"k_descale: got a tensor, wanted None as k is torch.bfloat16, not FP8"):
        attend(q, k.bfloat16(), k.bfloat16(), k_descale=ones)
    with pytest.raises(ValueError, match=r"q_descale: got a tensor, wanted None as q is torch.bfloat16, not FP8"):
        fa3.flash_attn_with_kvcache(q, k, k, q_descale=ones, k_descale=ones)
    with pytest.raises(TypeError, match=r"q: got torch.float32, wanted float16 or bfloat16 over a cache of"):
        attend(q.float(), k, k, k_descale=ones)
