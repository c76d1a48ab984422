"""A right call of every public function, to be made wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flash_attention_amd
import flash_attn
import flash_attn_interface as fa3
import torch
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def _ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _tail() -> dict[str, Any]:
    return {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
            "alibi_slopes": _floats(4).abs(), "deterministic": False, "return_attn_probs": False}  # fmt: skip


def _halves(*shape: int) -> torch.Tensor:
    return _floats(*shape).bfloat16()


def _bytes(*shape: int) -> torch.Tensor:
    return _floats(*shape).to(torch.float8_e4m3fn)


def _cache_tail() -> dict[str, Any]:
    return {"softmax_scale": 0.3, "causal": False, "rotary_interleaved": True, "return_softmax_lse": False}


def _fa3_tail() -> dict[str, Any]:
    return {"softmax_scale": 0.3, "causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0,
            "num_splits": 1, "pack_gqa": False, "deterministic": False, "sm_margin": 0,
            "return_attn_probs": False}  # fmt: skip


def _without(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}


LENGTHS = {"cu_seqlens_q": (0, 3, 6), "cu_seqlens_k": (0, 5, 9)}
# Function -> a right call. Every argument of it is made wrong in turn.
_CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "flash_attn_func": (
        flash_attn.flash_attn_func,
        lambda: {"q": _floats(2, 3, 4, 8), "k": _floats(2, 5, 2, 8), "v": _floats(2, 5, 2, 8), **_tail()},
    ),
    "flash_attn_qkvpacked_func": (
        flash_attn.flash_attn_qkvpacked_func,
        lambda: {"qkv": _floats(2, 3, 3, 4, 8), **_tail()},
    ),
    "flash_attn_kvpacked_func": (
        flash_attn.flash_attn_kvpacked_func,
        lambda: {"q": _floats(2, 3, 4, 8), "kv": _floats(2, 5, 2, 2, 8), **_tail()},
    ),
    "flash_attn_varlen_func": (
        flash_attn.flash_attn_varlen_func,
        lambda: {
            "q": _floats(6, 4, 8), "k": _floats(9, 2, 8), "v": _floats(9, 2, 8),
            **{name: _ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(),
        },
    ),
    "flash_attn_varlen_func, paged": (
        flash_attn.flash_attn_varlen_func,
        lambda: {
            "q": _floats(6, 4, 8), "k": _floats(4, 16, 2, 8), "v": _floats(4, 16, 2, 8),
            **{name: _ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(), "block_table": _ints(1, 3)[:, None],
        },
    ),
    "flash_attn_varlen_qkvpacked_func": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        lambda: {"qkv": _floats(6, 3, 4, 8), "cu_seqlens": _ints(0, 3, 6), "max_seqlen": 3, **_tail()},
    ),
    "flash_attn_varlen_kvpacked_func": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        lambda: {
            "q": _floats(6, 4, 8), "kv": _floats(9, 2, 2, 8),
            **{name: _ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(),
        },
    ),
    "flash_attn_with_kvcache": (
        flash_attn.flash_attn_with_kvcache,
        lambda: {
            "q": _floats(2, 1, 4, 8), "k_cache": _floats(3, 9, 2, 8), "v_cache": _floats(3, 9, 2, 8),
            "k": _floats(2, 1, 2, 8), "v": _floats(2, 1, 2, 8),
            "rotary_cos": _floats(9, 4), "rotary_sin": _floats(9, 4), "cache_seqlens": _ints(4, 5),
            "cache_batch_idx": _ints(2, 0), "cache_leftpad": _ints(1, 0), "window_size": (-1, -1), "softcap": 0.0,
            "alibi_slopes": _floats(4).abs(), "num_splits": 0, **_cache_tail(),
        },
    ),
    "flash_attn_with_kvcache, paged": (
        flash_attn.flash_attn_with_kvcache,
        lambda: {
            "q": _floats(2, 3, 4, 8), "k_cache": _floats(4, 16, 2, 8), "v_cache": _floats(4, 16, 2, 8),
            "cache_seqlens": _ints(4, 5), "block_table": _ints(1, 3)[:, None], **_cache_tail(),
        },
    ),
    "flash_attn_fp8_func": (
        flash_attn.flash_attn_fp8_func,
        lambda: {
            "q": _floats(2, 3, 4, 16), "k": _floats(2, 5, 2, 16), "v": _floats(2, 5, 2, 16), **_tail(),
            "descale_q": _floats(2, 4).abs(), "descale_k": _floats(2, 2).abs(), "descale_v": _floats(2, 2).abs(),
        },
    ),
    "flash_attn_qkvpacked_fp8_func": (
        flash_attn.flash_attn_qkvpacked_fp8_func,
        lambda: {"qkv": _floats(2, 3, 3, 4, 16), **_tail()},
    ),
    "flash_attn_varlen_fp8_func": (
        flash_attn.flash_attn_varlen_fp8_func,
        lambda: {
            "q": _floats(6, 4, 16), "k": _floats(9, 2, 16), "v": _floats(9, 2, 16),
            **{name: _ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(),
            "descale_q": _floats(2, 4).abs(), "descale_k": _floats(2, 2).abs(), "descale_v": _floats(2, 2).abs(),
        },
    ),
    "flash_attn_varlen_qkvpacked_fp8_func": (
        flash_attn.flash_attn_varlen_qkvpacked_fp8_func,
        lambda: {"qkv": _floats(6, 3, 4, 16), "cu_seqlens": _ints(0, 3, 6), "max_seqlen": 3, **_tail()},
    ),
    "fa3.flash_attn_func": (
        fa3.flash_attn_func,
        lambda: {"q": _halves(2, 3, 4, 8), "k": _halves(2, 5, 2, 8), "v": _halves(2, 5, 2, 8), **_fa3_tail()},
    ),
    "fa3.flash_attn_func, FP8": (
        fa3.flash_attn_func,
        lambda: {
            "q": _bytes(2, 3, 4, 16), "k": _bytes(2, 5, 2, 16), "v": _bytes(2, 5, 2, 16), "q_descale": _floats(2, 2),
            "k_descale": _floats(2, 2), "v_descale": _floats(2, 2), "softmax_scale": 0.3, "causal": False,
        },
    ),
    "fa3.flash_attn_qkvpacked_func": (
        fa3.flash_attn_qkvpacked_func,
        lambda: {"qkv": _halves(2, 3, 8, 8), "num_heads_q": 4, **_without(_fa3_tail(), "num_splits", "pack_gqa")},
    ),
    "fa3.flash_attn_varlen_func": (
        fa3.flash_attn_varlen_func,
        lambda: {
            "q": _halves(6, 4, 8), "k": _halves(9, 2, 8), "v": _halves(9, 2, 8),
            **{name: _ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, "seqused_q": _ints(2, 3), "seqused_k": _ints(4, 4), **_fa3_tail(),
        },
    ),
    "fa3.flash_attn_with_kvcache": (
        fa3.flash_attn_with_kvcache,
        lambda: {
            "q": _halves(5, 4, 8), "k_cache": _halves(4, 16, 2, 8), "v_cache": _halves(4, 16, 2, 8),
            "k": _halves(3, 2, 8), "v": _halves(3, 2, 8), "rotary_cos": _halves(16, 4), "rotary_sin": _halves(16, 4),
            "cache_seqlens": _ints(4, 5), "page_table": _ints(1, 3)[:, None], "cu_seqlens_q": _ints(0, 3, 5),
            "cu_seqlens_k_new": _ints(0, 1, 3), "max_seqlen_q": 3, "rotary_seqlens": _ints(4, 5),
            "rotary_interleaved": True, "return_softmax_lse": False, "scheduler_metadata": _ints(1),
            **_without(_fa3_tail(), "deterministic", "return_attn_probs"),
        },
    ),
    "fa3.flash_attn_combine": (
        fa3.flash_attn_combine,
        lambda: {"out_partial": _floats(3, 2, 5, 4, 8), "lse_partial": _floats(3, 2, 5, 4), "out": _floats(2, 5, 4, 8)},
    ),
    "fa3.get_scheduler_metadata": (
        fa3.get_scheduler_metadata,
        lambda: {
            "batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 64, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 8,
            "cache_seqlens": _ints(4, 5), "page_size": 16, "max_seqlen_k_new": 1, "causal": False,
            "window_size": (-1, -1), "attention_chunk": 0, "has_softcap": False, "num_splits": 0, "sm_margin": 0,
        },
    ),
    "apply_rotary_emb": (
        apply_rotary_emb,
        lambda: {"x": _floats(2, 3, 4, 8), "cos": _floats(7, 2), "sin": _floats(7, 2), "seqlen_offsets": 4},
    ),
    "apply_rotary_emb, varlen": (
        apply_rotary_emb,
        lambda: {
            "x": _floats(6, 4, 8), "cos": _floats(7, 2), "sin": _floats(7, 2), "seqlen_offsets": _ints(1, 4),
            "cu_seqlens": _ints(0, 3, 6), "max_seqlen": 3,
        },
    ),
    "apply_rotary_emb_qkv_": (
        apply_rotary_emb_qkv_,
        lambda: {
            "qkv": _floats(2, 3, 6, 8), "cos": _floats(7, 2), "sin": _floats(7, 2), "cos_k": _floats(7, 2),
            "sin_k": _floats(7, 2), "seqlen_offsets": 4, "num_heads_q": 2,
        },
    ),
    "apply_rotary_emb_kv_": (
        apply_rotary_emb_kv_,
        lambda: {"kv": _floats(2, 3, 2, 4, 8), "cos": _floats(7, 2), "sin": _floats(7, 2), "seqlen_offsets": 4},
    ),
    "cross_entropy_loss": (
        cross_entropy_loss,
        lambda: {
            "logits": _floats(3, 7), "labels": _ints(6, 0, 2, dtype=torch.int64), "precomputed_lse": _floats(3),
            "label_smoothing": 0.1, "logit_scale": 1.0, "lse_square_scale": 0.0, "ignore_index": -100,
        },
    ),
    "layer_norm_fn": (
        layer_norm_fn,
        lambda: {
            "x": _floats(3, 8), "weight": _floats(8), "bias": _floats(8), "residual": _floats(3, 8),
            "x1": _floats(3, 8), "weight1": _floats(8), "bias1": _floats(8), "eps": 1e-5, "dropout_p": 0.0,
            "rowscale": _floats(3), "out": _floats(3, 8),
        },
    ),
    "rms_norm_fn": (
        rms_norm_fn,
        lambda: {"x": _floats(3, 8), "weight": _floats(8), "bias": None, "residual": _floats(3, 8), "eps": 1e-5},
    ),
    "flash_attention_amd": (
        lambda q, k, v, mask, dropout: flash_attention_amd.FlashAttention(dropout)(q, k, v, mask),
        lambda: {
            "q": _floats(2, 3, 4, 8), "k": _floats(2, 5, 2, 8), "v": _floats(2, 5, 2, 8),
            "mask": torch.ones(2, 5, dtype=torch.bool, device=DEVICE), "dropout": 0.0,
        },
    ),
}  # fmt: skip


def _plainer(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    return lambda: _without(make(), *PLAIN_WITHOUT)


# Without these a call takes the short way through the checks.
PLAIN_WITHOUT = ("alibi_slopes", "rotary_cos", "rotary_sin", "cache_leftpad")
CALLS = _CALLS | {
    f"{name}, plain": (call, _plainer(make)) for name, (call, make) in _CALLS.items() if "alibi_slopes" in make()
}
