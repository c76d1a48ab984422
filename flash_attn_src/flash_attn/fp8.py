"""Attention in FP8: q, k and v are cast with one scale a batch entry and head, products run on 8-bit matrix units.

Options and errors: flash_attn.flash_attn_interface. Inputs are fp16, bf16 or fp32, the result has their
type; their scales come from the largest magnitude of each head, or from descale_q, descale_k, descale_v, fp32
(batch, heads of that tensor): what undoes the cast. Inputs may also be FP8 already: then descales are required, the
result is bf16, and there is no gradient. The format is the one of the GPU's matrix units, e4m3fnuz on gfx942, e4m3fn on
gfx950, gfx12 and sm_90; other GPUs raise NotImplementedError. On a CPU the same casts are done, products in fp32.

The backward runs in the type of the inputs, on q, k and v as they come out of FP8. So it has the attention weights of
the forward. It takes the gradient of the cast for 1. Gradients are not cast to FP8, because they spread over many
magnitudes and would lose most of their precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flash_attn.attention.autograd import Result
from flash_attn.attention.backends.torch.fp8 import is_fp8
from flash_attn.attention.operators import dispatch
from flash_attn.attention.operators import fp8 as fp8_op
from flash_attn.call.arguments import as_int, check_dense, check_packed, check_varlen
from flash_attn.call.arguments.diagnosis import refuse_gradients
from flash_attn.call.calls import (
    AttentionCall,
    Descales,
    GradientCall,
    Options,
    Window,
    kept,
    maybe_contiguous,
    restore,
)
from flash_attn.call.first_derivative import Gradients, first_only
from flash_attn.call.tracing import refuse_transforms

# The matrix units' rows: 16 bytes.
_HEAD_DIM_STEP = 16
_MAX_HEAD_DIM = 256


class _Attention(torch.autograd.Function):
    """(out, softmax_lse) of a checked call, head_dim a multiple of 16."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tensors: tuple[torch.Tensor | None, ...],  # in a tuple, as Dynamo takes no tensor twice
        rest: tuple[Any, ...],
        descales: Descales,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call = restore(q, k, v, tensors, rest)
        call.descales = descales
        out, softmax_lse, _, factors = fp8_op.forward(call)
        tensors, ctx.rest = kept(call)  # with the rng_state that was drawn
        ctx.save_for_backward(q, k, v, out, softmax_lse, *factors, *tensors)
        ctx.mark_non_differentiable(softmax_lse)
        return out, softmax_lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> Gradients:
        return *first_only("flash_attn in FP8", _gradients, ctx, dout), *(None,) * 3


def _gradients(ctx: Any, saved: tuple[torch.Tensor, ...], dout: torch.Tensor) -> Gradients:
    """The gradients of q, k and v."""
    q, k, v, out, softmax_lse, for_q, for_k, for_v, *tensors = saved
    call = restore(q, k, v, tuple(tensors), ctx.rest)
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    call.q = fp8_op.there_and_back(q, for_q, cu_seqlens_q)
    call.k = fp8_op.there_and_back(k, for_k, cu_seqlens_k)
    call.v = fp8_op.there_and_back(v, for_v, cu_seqlens_k)
    dq, dk, dv = torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v)
    dispatch.backward(GradientCall(call, maybe_contiguous(dout), out, softmax_lse, dq, dk, dv))
    return dq, dk, dv


def stand_in(x: torch.Tensor) -> torch.Tensor:
    """A tensor for the checks, with the shape and the device of x. For FP8 it has the type of the result, bf16."""
    if not is_fp8(x):
        return x
    return torch.empty((), dtype=torch.bfloat16, device=x.device).expand(x.shape)


def _check_fp8(tensors: tuple[torch.Tensor, ...], descales: Descales, batch: int) -> None:
    small = [is_fp8(x) for x in tensors]
    if any(small) and not all(small):
        raise TypeError(f"q, k, v: got {', '.join(str(x.dtype) for x in tensors)}, wanted FP8 for all or for none")
    for name, x, descale in zip("qkv", tensors, descales, strict=True):
        if descale is None:
            if is_fp8(x):
                raise ValueError(f"descale_{name}: got None, wanted fp32 ({batch}, {x.shape[-2]}), as {name} is FP8")
            continue
        if not isinstance(descale, torch.Tensor) or descale.dtype is not torch.float32:
            got = getattr(descale, "dtype", type(descale).__name__)
            raise TypeError(f"descale_{name}: got {got}, wanted a float32 tensor")
        if descale.shape != (batch, x.shape[-2]) or descale.device != x.device or descale.layout is not torch.strided:
            raise ValueError(
                f"descale_{name}: got {tuple(descale.shape)} on {descale.device}, {descale.layout}, wanted a dense "
                f"({batch}, {x.shape[-2]}) on {x.device}"
            )
        refuse_gradients(**{f"descale_{name}": descale})
    if any(small) and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError("FP8 inputs have no gradient: pass fp16, bf16 or fp32, or call under no_grad")


def _check_packed(qkv: torch.Tensor, ndim: int) -> None:
    check_packed("qkv", qkv, ndim, 3)
    if is_fp8(qkv):
        raise TypeError(f"qkv: got {qkv.dtype}, wanted float16, bfloat16 or float32, which is cast here")


def _attend(call: AttentionCall, descales: Descales) -> Result:
    """Runs attention for all functions of this module. The call is checked and has the caller's tensors."""
    refuse_transforms("attention in FP8")
    q, k, v = call.q, call.k, call.v
    _check_fp8((q, k, v), descales, call.batch)
    if call.return_softmax and call.options.dropout_p > 0.0:
        raise NotImplementedError("return_attn_probs with dropout: attention in FP8 has no S_dmask")
    head_dim = q.shape[-1]
    if v.shape[-1] != head_dim:
        raise ValueError(
            f"v: got head_dim {v.shape[-1]}, wanted {head_dim} as q has: FP8 has no value dims of their own"
        )
    if head_dim > _MAX_HEAD_DIM:
        raise NotImplementedError(
            f"q: got head_dim {head_dim}, wanted at most {_MAX_HEAD_DIM} in FP8; pass fp16 or bf16"
        )
    if head_dim % _HEAD_DIM_STEP:
        if is_fp8(q):
            raise ValueError(f"q: got head_dim {head_dim}, wanted a multiple of {_HEAD_DIM_STEP} for FP8 inputs")
        q, k, v = (pad(x, (0, -head_dim % _HEAD_DIM_STEP)) for x in (q, k, v))
    else:
        q, k, v = maybe_contiguous(q), maybe_contiguous(k), maybe_contiguous(v)
    out, softmax_lse = _Attention.apply(q, k, v, *kept(call), descales)
    out = out[..., :head_dim] if head_dim % _HEAD_DIM_STEP else out
    return (out, softmax_lse, out.new_empty((0,))) if call.return_softmax else out


def flash_attn_fp8_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    descale_v: torch.Tensor | None = None,
    descale_do: torch.Tensor | None = None,
) -> Result:
    """flash_attn_func in FP8: the module's docstring. descale_do raises: the backward is not in FP8."""
    if descale_do is not None:
        raise NotImplementedError("descale_do: the backward runs in the type of q, so its gradient is never cast")
    options = Options(softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes=alibi_slopes)
    call = AttentionCall(stand_in(q), stand_in(k), stand_in(v), options, deterministic, return_attn_probs)
    check_dense(call)
    call.q, call.k, call.v = q, k, v
    return _attend(call, (descale_q, descale_k, descale_v))


def flash_attn_qkvpacked_fp8_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_fp8_func with q, k, v in one tensor (batch, seqlen, 3, heads, head_dim)."""
    _check_packed(qkv, 5)
    q, k, v = qkv.unbind(-3)
    return flash_attn_fp8_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_fp8_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    descale_v: torch.Tensor | None = None,
) -> Result:
    """flash_attn_varlen_func in FP8, one scale a sequence and head. block_table raises NotImplementedError."""
    if block_table is not None:
        raise NotImplementedError("block_table: attention in FP8 casts whole sequences and does not support pages")
    max_seqlen_q, max_seqlen_k = as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k)
    options = Options(softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes=alibi_slopes)
    call = AttentionCall(
        stand_in(q), stand_in(k), stand_in(v), options, deterministic, return_attn_probs,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    check_varlen(call)
    call.q, call.k, call.v = q, k, v
    return _attend(call, (descale_q, descale_k, descale_v))


def flash_attn_varlen_qkvpacked_fp8_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_fp8_func with q, k, v in one tensor (total, 3, heads, head_dim)."""
    _check_packed(qkv, 4)
    q, k, v = qkv.unbind(-3)
    return flash_attn_varlen_fp8_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
