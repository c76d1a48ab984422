"""A right call of every function that clients know, to be made wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flash_attn
import flash_attn_interface as fa3
import fuzz_layer_calls
import fuzz_private_calls
import torch
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
from fuzz_tensors import bytes8, floats, halves, ints


def _tail() -> dict[str, Any]:
    return {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
            "alibi_slopes": floats(4).abs(), "deterministic": False, "return_attn_probs": False,
            "s_aux": floats(4)}  # fmt: skip


def _without_alibi() -> dict[str, Any]:
    return _without(_tail(), "alibi_slopes")


def _fp8_tail() -> dict[str, Any]:
    return _without(_tail(), "s_aux")


def _cache_tail() -> dict[str, Any]:
    return {"softmax_scale": 0.3, "causal": False, "rotary_interleaved": True, "return_softmax_lse": False,
            "s_aux": floats(4)}  # fmt: skip


def _fa3_tail() -> dict[str, Any]:
    return {"softmax_scale": 0.3, "causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0,
            "num_splits": 1, "pack_gqa": False, "deterministic": False, "sm_margin": 0,
            "return_attn_probs": False, "s_aux": halves(4)}  # fmt: skip


def _descales() -> dict[str, torch.Tensor]:
    return {f"{name}_descale": floats(2, 2).abs() for name in "qkv"}


def _latent_cache(width: int, width_v: int) -> dict[str, torch.Tensor]:
    """A cache whose first columns are the values."""
    cache = floats(4, 16, 2, width)
    return {"k_cache": cache, "v_cache": cache[..., :width_v]}


def _without(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}


LENGTHS = {"cu_seqlens_q": (0, 3, 6), "cu_seqlens_k": (0, 5, 9)}
# Function -> a right call. Every argument of it is made wrong in turn.
_CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "flash_attn_func": (
        flash_attn.flash_attn_func,
        lambda: {"q": floats(2, 3, 4, 8), "k": floats(2, 5, 2, 8), "v": floats(2, 5, 2, 8), **_tail()},
    ),
    "flash_attn_qkvpacked_func": (
        flash_attn.flash_attn_qkvpacked_func,
        lambda: {"qkv": floats(2, 3, 3, 4, 8), **_tail()},
    ),
    "flash_attn_kvpacked_func": (
        flash_attn.flash_attn_kvpacked_func,
        lambda: {"q": floats(2, 3, 4, 8), "kv": floats(2, 5, 2, 2, 8), **_tail()},
    ),
    "flash_attn_func, values": (
        flash_attn.flash_attn_func,
        lambda: {"q": floats(2, 3, 4, 24), "k": floats(2, 5, 2, 24), "v": floats(2, 5, 2, 16), **_tail()},
    ),
    "flash_attn_func, 512": (
        flash_attn.flash_attn_func,
        lambda: {"q": floats(1, 3, 2, 512), "k": floats(1, 5, 1, 512), "v": floats(1, 5, 1, 512), "s_aux": floats(2)},
    ),
    "flash_attn_func, bias": (
        flash_attn.flash_attn_func,
        lambda: {
            "q": floats(2, 3, 4, 8), "k": floats(2, 5, 2, 8), "v": floats(2, 5, 2, 8), **_without_alibi(),
            "attn_bias": floats(1, 4, 3, 5),
        },
    ),
    "flash_attn_qkvpacked_func, bias": (
        flash_attn.flash_attn_qkvpacked_func,
        lambda: {"qkv": floats(2, 3, 3, 4, 8), **_without_alibi(), "attn_bias": floats(2, 1, 3, 3)},
    ),
    "flash_attn_kvpacked_func, bias": (
        flash_attn.flash_attn_kvpacked_func,
        lambda: {
            "q": floats(2, 3, 4, 8), "kv": floats(2, 5, 2, 2, 8), **_without_alibi(), "attn_bias": floats(1, 1, 3, 5),
        },
    ),
    "flash_attn_varlen_func": (
        flash_attn.flash_attn_varlen_func,
        lambda: {
            "q": floats(6, 4, 8), "k": floats(9, 2, 8), "v": floats(9, 2, 8),
            **{name: ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(),
        },
    ),
    "flash_attn_varlen_func, values": (
        flash_attn.flash_attn_varlen_func,
        lambda: {
            "q": floats(6, 4, 16), "k": floats(9, 2, 16), "v": floats(9, 2, 24),
            **{name: ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(),
        },
    ),
    "flash_attn_varlen_func, paged": (
        flash_attn.flash_attn_varlen_func,
        lambda: {
            "q": floats(6, 4, 8), "k": floats(4, 16, 2, 8), "v": floats(4, 16, 2, 8),
            **{name: ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(), "block_table": ints(1, 3)[:, None],
        },
    ),
    "flash_attn_varlen_qkvpacked_func": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        lambda: {"qkv": floats(6, 3, 4, 8), "cu_seqlens": ints(0, 3, 6), "max_seqlen": 3, **_tail()},
    ),
    "flash_attn_varlen_kvpacked_func": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        lambda: {
            "q": floats(6, 4, 8), "kv": floats(9, 2, 2, 8),
            **{name: ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(),
        },
    ),
    "flash_attn_with_kvcache": (
        flash_attn.flash_attn_with_kvcache,
        lambda: {
            "q": floats(2, 1, 4, 8), "k_cache": floats(3, 9, 2, 8), "v_cache": floats(3, 9, 2, 8),
            "k": floats(2, 1, 2, 8), "v": floats(2, 1, 2, 8),
            "rotary_cos": floats(9, 4), "rotary_sin": floats(9, 4), "cache_seqlens": ints(4, 5),
            "cache_batch_idx": ints(2, 0), "cache_leftpad": ints(1, 0), "window_size": (-1, -1), "softcap": 0.0,
            "alibi_slopes": floats(4).abs(), "num_splits": 0, **_cache_tail(),
        },
    ),
    "flash_attn_with_kvcache, paged": (
        flash_attn.flash_attn_with_kvcache,
        lambda: {
            "q": floats(2, 3, 4, 8), "k_cache": floats(4, 16, 2, 8), "v_cache": floats(4, 16, 2, 8),
            "cache_seqlens": ints(4, 5), "block_table": ints(1, 3)[:, None], **_cache_tail(),
        },
    ),
    "flash_attn_with_kvcache, latent": (
        flash_attn.flash_attn_with_kvcache,
        lambda: {
            "q": floats(2, 3, 4, 24), **_latent_cache(24, 16), "cache_seqlens": ints(4, 5),
            "block_table": ints(1, 3)[:, None], **_cache_tail(),
        },
    ),
    "flash_attn_with_kvcache, FP8": (
        flash_attn.flash_attn_with_kvcache,
        lambda: {
            "q": halves(2, 3, 4, 16), "k_cache": bytes8(3, 9, 2, 16), "v_cache": bytes8(3, 9, 2, 16),
            "cache_seqlens": ints(4, 5), "cache_batch_idx": ints(2, 0), "k_descale": floats(2, 2).abs(),
            "v_descale": floats(2, 2).abs(),
        },
    ),
    "flash_attn_fp8_func": (
        flash_attn.flash_attn_fp8_func,
        lambda: {
            "q": floats(2, 3, 4, 16), "k": floats(2, 5, 2, 16), "v": floats(2, 5, 2, 16), **_fp8_tail(),
            "descale_q": floats(2, 4).abs(), "descale_k": floats(2, 2).abs(), "descale_v": floats(2, 2).abs(),
        },
    ),
    "flash_attn_qkvpacked_fp8_func": (
        flash_attn.flash_attn_qkvpacked_fp8_func,
        lambda: {"qkv": floats(2, 3, 3, 4, 16), **_fp8_tail()},
    ),
    "flash_attn_varlen_fp8_func": (
        flash_attn.flash_attn_varlen_fp8_func,
        lambda: {
            "q": floats(6, 4, 16), "k": floats(9, 2, 16), "v": floats(9, 2, 16),
            **{name: ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_fp8_tail(),
            "descale_q": floats(2, 4).abs(), "descale_k": floats(2, 2).abs(), "descale_v": floats(2, 2).abs(),
        },
    ),
    "flash_attn_varlen_qkvpacked_fp8_func": (
        flash_attn.flash_attn_varlen_qkvpacked_fp8_func,
        lambda: {"qkv": floats(6, 3, 4, 16), "cu_seqlens": ints(0, 3, 6), "max_seqlen": 3, **_fp8_tail()},
    ),
    "fa3.flash_attn_func": (
        fa3.flash_attn_func,
        lambda: {"q": halves(2, 3, 4, 8), "k": halves(2, 5, 2, 8), "v": halves(2, 5, 2, 8), **_fa3_tail()},
    ),
    "fa3.flash_attn_func, qv": (
        fa3.flash_attn_func,
        lambda: {
            "q": halves(2, 3, 4, 8), "k": halves(2, 5, 2, 8), "v": halves(2, 5, 2, 24), "qv": halves(2, 3, 4, 24),
            "softmax_scale": 0.3, "causal": False, "s_aux": halves(4),
        },
    ),
    "fa3.flash_attn_varlen_func, qv": (
        fa3.flash_attn_varlen_func,
        lambda: {
            "q": halves(6, 4, 8), "k": halves(9, 2, 8), "v": halves(9, 2, 24), "qv": halves(6, 4, 24),
            **{name: ints(*ends) for name, ends in LENGTHS.items()}, "max_seqlen_q": 3, "max_seqlen_k": 5,
        },
    ),
    "fa3.flash_attn_with_kvcache, qv": (
        fa3.flash_attn_with_kvcache,
        lambda: {
            "q": halves(2, 3, 4, 8), "k_cache": halves(3, 9, 2, 8), "v_cache": halves(3, 9, 2, 24),
            "qv": halves(2, 3, 4, 24), "cache_seqlens": ints(4, 5), "cache_batch_idx": ints(2, 0),
        },
    ),
    "fa3.flash_attn_func, FP8": (
        fa3.flash_attn_func,
        lambda: {
            "q": bytes8(2, 3, 4, 16), "k": bytes8(2, 5, 2, 16), "v": bytes8(2, 5, 2, 16), **_descales(),
            "softmax_scale": 0.3, "causal": False,
        },
    ),
    "fa3.flash_attn_qkvpacked_func, FP8": (
        fa3.flash_attn_qkvpacked_func,
        lambda: {"qkv": bytes8(2, 3, 8, 16), **_descales(), "num_heads_q": 4},
    ),
    "fa3.flash_attn_varlen_func, FP8": (
        fa3.flash_attn_varlen_func,
        lambda: {
            "q": bytes8(6, 4, 16), "k": bytes8(9, 2, 16), "v": bytes8(9, 2, 16), **_descales(),
            **{name: ints(*ends) for name, ends in LENGTHS.items()}, "max_seqlen_q": 3, "max_seqlen_k": 5,
        },
    ),
    "fa3.flash_attn_with_kvcache, FP8": (
        fa3.flash_attn_with_kvcache,
        lambda: {
            "q": bytes8(2, 3, 4, 16), "k_cache": bytes8(3, 9, 2, 16), "v_cache": bytes8(3, 9, 2, 16), **_descales(),
            "cache_seqlens": ints(4, 5), "cache_batch_idx": ints(2, 0), "cache_leftpad": ints(1, 0),
        },
    ),
    "fa3.flash_attn_combine, new": (
        fa3.flash_attn_combine,
        lambda: {
            "out_partial": floats(3, 2, 5, 4, 8), "lse_partial": floats(3, 2, 5, 4), "out_dtype": torch.float16
        },
    ),
    "fa3.flash_attn_qkvpacked_func": (
        fa3.flash_attn_qkvpacked_func,
        lambda: {"qkv": halves(2, 3, 8, 8), "num_heads_q": 4, **_without(_fa3_tail(), "num_splits", "pack_gqa")},
    ),
    "fa3.flash_attn_varlen_func": (
        fa3.flash_attn_varlen_func,
        lambda: {
            "q": halves(6, 4, 8), "k": halves(9, 2, 8), "v": halves(9, 2, 8),
            **{name: ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, "seqused_q": ints(2, 3), "seqused_k": ints(4, 4), **_fa3_tail(),
        },
    ),
    "fa3.flash_attn_with_kvcache": (
        fa3.flash_attn_with_kvcache,
        lambda: {
            "q": halves(5, 4, 8), "k_cache": halves(4, 16, 2, 8), "v_cache": halves(4, 16, 2, 8),
            "k": halves(3, 2, 8), "v": halves(3, 2, 8), "rotary_cos": halves(16, 4), "rotary_sin": halves(16, 4),
            "cache_seqlens": ints(4, 5), "page_table": ints(1, 3)[:, None], "cu_seqlens_q": ints(0, 3, 5),
            "cu_seqlens_k_new": ints(0, 1, 3), "max_seqlen_q": 3, "rotary_seqlens": ints(4, 5),
            "rotary_interleaved": True, "return_softmax_lse": False, "scheduler_metadata": ints(1),
            **_without(_fa3_tail(), "deterministic", "return_attn_probs"),
        },
    ),
    "fa3.flash_attn_combine": (
        fa3.flash_attn_combine,
        lambda: {"out_partial": floats(3, 2, 5, 4, 8), "lse_partial": floats(3, 2, 5, 4), "out": floats(2, 5, 4, 8)},
    ),
    "fa3.get_scheduler_metadata": (
        fa3.get_scheduler_metadata,
        lambda: {
            "batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 64, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 8,
            "cache_seqlens": ints(4, 5), "qkv_dtype": torch.float16, "headdim_v": 8, "cu_seqlens_q": ints(0, 1, 2),
            "cu_seqlens_k_new": ints(0, 1, 2), "cache_leftpad": ints(1, 0), "page_size": 16, "max_seqlen_k_new": 1,
            "causal": False, "window_size": (-1, -1), "attention_chunk": 0, "has_softcap": False, "num_splits": 0,
            "pack_gqa": False, "sm_margin": 0,
        },
    ),
    "apply_rotary_emb": (
        apply_rotary_emb,
        lambda: {"x": floats(2, 3, 4, 8), "cos": floats(7, 2), "sin": floats(7, 2), "interleaved": False,
                 "inplace": False, "seqlen_offsets": 4},
    ),
    "apply_rotary_emb, varlen": (
        apply_rotary_emb,
        lambda: {
            "x": floats(6, 4, 8), "cos": floats(7, 2), "sin": floats(7, 2), "seqlen_offsets": ints(1, 4),
            "cu_seqlens": ints(0, 3, 6), "max_seqlen": 3,
        },
    ),
    "apply_rotary_emb_qkv_": (
        apply_rotary_emb_qkv_,
        lambda: {
            "qkv": floats(2, 3, 6, 8), "cos": floats(7, 2), "sin": floats(7, 2), "cos_k": floats(7, 2),
            "sin_k": floats(7, 2), "interleaved": False, "seqlen_offsets": 4, "num_heads_q": 2,
        },
    ),
    "apply_rotary_emb_kv_": (
        apply_rotary_emb_kv_,
        lambda: {
            "kv": floats(2, 3, 2, 4, 8), "cos": floats(7, 2), "sin": floats(7, 2), "interleaved": False,
            "seqlen_offsets": 4,
        },
    ),
    "cross_entropy_loss": (
        cross_entropy_loss,
        lambda: {
            "logits": floats(3, 7), "labels": ints(6, 0, 2, dtype=torch.int64), "precomputed_lse": floats(3),
            "label_smoothing": 0.1, "logit_scale": 1.0, "lse_square_scale": 0.0, "ignore_index": -100,
            "inplace_backward": False, "process_group": None,
        },
    ),
    "layer_norm_fn": (
        layer_norm_fn,
        lambda: {
            "x": floats(3, 8), "weight": floats(8), "bias": floats(8), "residual": floats(3, 8),
            "x1": floats(3, 8), "weight1": floats(8), "bias1": floats(8), "eps": 1e-5, "dropout_p": 0.0,
            "rowscale": floats(3), "prenorm": False, "residual_in_fp32": False, "zero_centered_weight": False,
            "is_rms_norm": False, "return_dropout_mask": False, "out_dtype": torch.float32, "out": floats(3, 8),
            "residual_out": floats(3, 8),
        },
    ),
    "rms_norm_fn": (
        rms_norm_fn,
        lambda: {
            "x": floats(3, 8), "weight": floats(8), "bias": floats(8), "residual": floats(3, 8), "x1": floats(3, 8),
            "weight1": floats(8), "bias1": floats(8), "eps": 1e-5, "dropout_p": 0.0, "rowscale": floats(3),
            "prenorm": False, "residual_in_fp32": False, "zero_centered_weight": False, "return_dropout_mask": False,
            "out_dtype": torch.float32, "out": floats(3, 8), "residual_out": floats(3, 8),
        },
    ),
}  # fmt: skip


def _plainer(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    return lambda: {name: None if name.rstrip("_") in PLAIN_WITHOUT else value for name, value in make().items()}


# Without these a call takes the short way through the checks.
PLAIN_WITHOUT = ("alibi_slopes", "s_aux", "rotary_cos", "rotary_sin", "cache_leftpad", "leftpad_k")
_CALLS |= fuzz_private_calls.CALLS
CALLS = (
    _CALLS
    | {f"{name}, plain": (call, _plainer(make)) for name, (call, make) in _CALLS.items()
       if any(make().get(argument) is not None for argument in ("alibi_slopes", "alibi_slopes_"))}
    | fuzz_layer_calls.CALLS
)  # fmt: skip
# Other names that errors may use for an argument.
NAMES = fuzz_private_calls.NAMES | fuzz_layer_calls.NAMES
