"""Attention with INT8 queries and keys, forward only. Weights, values and the result keep 16 bits.

The method is SageAttention's (Zhang et al., arXiv 2410.02367): a block of 128 queries and a block of 64 keys of a head
has one scale, and the mean key of a head is subtracted from its keys first. That changes no weight, because softmax
does not see a constant, and it makes keys with a large common part fit in 8 bits.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from flash_attn.attention.operators import int8 as ops
from flash_attn.call.arguments import check_dense, check_varlen
from flash_attn.call.arguments.diagnosis import as_int, check_strided, diagnose_switches
from flash_attn.call.calls import AttentionCall, Options
from flash_attn.call.tracing import refuse_transforms

MAX_HEAD_DIM = 128
_DTYPES = (torch.float16, torch.bfloat16)


def flash_attn_int8_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    smooth_k: bool = True,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (batch, seqlen_q, heads, head_dim) and k, v (batch, seqlen_k, heads_k, head_dim).

    fp16 or bf16, head dims up to 128, heads a multiple of heads_k. causal aligns the last query and the last key.
    smooth_k: subtract the mean key. Returns out like q; with return_lse also the logsumexp of the scaled scores,
    fp32 (batch, heads, seqlen_q), without the mean subtracted.

    On RDNA 3 and RDNA 4 GPUs (gfx11, gfx12); on a CPU with the same rounding in PyTorch. Other GPUs raise
    NotImplementedError. There is no gradient: RuntimeError under autograd and in forward mode, NotImplementedError
    under transforms of torch.func. torch.compile records a custom operator. ValueError for a head dim above 128 and for
    a scale that is not positive, TypeError for another dtype.
    """
    out, lse = attend(q, k, v, softmax_scale, causal, smooth_k, return_lse)
    return (out, lse) if return_lse else out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    smooth_k: bool,
    return_lse: bool,
    heads_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of flash_attn_int8_func. heads_first: in out's memory, heads come before queries."""
    call = AttentionCall(q, k, v, Options(softmax_scale, causal))
    check_dense(call)
    _check(call, smooth_k=smooth_k, return_lse=return_lse)
    return ops.forward(call, bool(smooth_k), heads_first)


def flash_attn_varlen_int8_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    smooth_k: bool = True,
) -> torch.Tensor:
    """flash_attn_int8_func for packed sequences: q (total_q, heads, head_dim), k and v (total_k, heads_k, head_dim).

    cu_seqlens_q, cu_seqlens_k: int32 or int64 (batch + 1,), where each sequence begins. The host reads them and runs a
    sequence after the other, so many short sequences are slow here, and a CUDA graph cannot be captured. Errors: see
    flash_attn_int8_func; ValueError for a sequence longer than max_seqlen_q or max_seqlen_k. Returns out like q.
    """
    starts = []
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_strided(name, x, "an int32 tensor")
        starts.append(x.to(torch.int32) if x.dtype is torch.int64 else x)
    call = AttentionCall(
        q, k, v, Options(softmax_scale, causal), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q), max_seqlen_k=as_int("max_seqlen_k", max_seqlen_k),
    )  # fmt: skip
    check_varlen(call)
    _check(call, smooth_k=smooth_k)
    return ops.varlen_forward(call, bool(smooth_k))


def _check(call: AttentionCall, **switches: bool) -> None:
    """Checks what INT8 attention wants of a checked call."""
    q, k, v = call.q, call.k, call.v
    diagnose_switches(None, **switches)
    call.options.causal = bool(call.options.causal)
    if q.dtype not in _DTYPES:
        raise TypeError(f"q: got {q.dtype}, wanted float16 or bfloat16")
    head_dim = q.shape[-1]
    if head_dim > MAX_HEAD_DIM or v.shape[-1] != head_dim:
        raise ValueError(
            f"head_dim: got {head_dim} and {v.shape[-1]} for v, wanted the same and at most {MAX_HEAD_DIM} with INT8 "
            "queries and keys: call flash_attn_func"
        )
    if call.options.scale <= 0.0:
        raise ValueError(
            f"softmax_scale: got {call.options.scale}, wanted a positive number with INT8 queries and keys"
        )
    refuse_transforms("attention with INT8 queries and keys")
    refuse_derivatives(q, k, v)


def refuse_derivatives(*tensors: torch.Tensor) -> None:
    """Raises RuntimeError where a derivative would be wanted, in reverse or forward mode."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError("attention with INT8 queries and keys has no gradient: call it under torch.no_grad()")
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            "attention with INT8 queries and keys has no forward-mode derivative: call flash_attn_func on a CPU"
        )
