"""The custom op flash_attn::_extended_backward: the gradients of a traced call that upstream's ops cannot express."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.attention import backends
from flash_attn.call.calls import AttentionCall, GradientCall, maybe_contiguous
from flash_attn.call.options import ARGUMENTS, SCHEMA, as_arguments, from_arguments

_SCHEMA = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? cu_seqlens_q, "
    f"Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool deterministic, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BIAS = ARGUMENTS.index("attn_bias")
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("flash_attn::_extended_backward", mutates_args=(), schema=_SCHEMA)
def _extended_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    *more: Any,
) -> _Gradients:
    """(dq, dk, dv, softmax_d, the gradient of attn_bias or (0,)), of checked arguments."""
    q, k, v = maybe_contiguous(q), maybe_contiguous(k), maybe_contiguous(v)
    *call_fields, deterministic = more[:5]
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = call_fields
    call = AttentionCall(
        q, k, v, from_arguments(more[5:]), deterministic, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    dq, dk, dv, dbias = _new(q, k, v, call.options.attn_bias)
    into = GradientCall(
        call, maybe_contiguous(dout), maybe_contiguous(out), softmax_lse.contiguous(), dq, dk, dv,
        None if call.options.attn_bias is None else dbias,
    )  # fmt: skip
    return dq, dk, dv, backends.select(q).backward(into), dbias


@_extended_backward.register_fake
def _fake(
    _dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    _out: torch.Tensor,
    softmax_lse: torch.Tensor,
    *more: Any,
) -> _Gradients:
    dq, dk, dv, dbias = _new(q, k, v, more[5 + _BIAS])
    return dq, dk, dv, torch.empty(softmax_lse.shape, dtype=softmax_lse.dtype, device=q.device), dbias


def _new(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_bias: torch.Tensor | None) -> list[torch.Tensor]:
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    of_bias = ((0,), q.dtype) if attn_bias is None else (attn_bias.shape, attn_bias.dtype)
    return [*gradients, torch.empty(of_bias[0], dtype=of_bias[1], device=q.device)]


def backward_by_op(gradients: GradientCall) -> torch.Tensor:
    """Writes the gradients of a call through the op, which a compiler sees; returns softmax_d."""
    call = gradients.forward
    dq, dk, dv, softmax_d, dbias = torch.ops.flash_attn._extended_backward(
        gradients.dout, call.q, call.k, call.v, gradients.out, gradients.softmax_lse,
        call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k, call.deterministic,
        *as_arguments(call.options),
    )  # fmt: skip
    pairs = [(gradients.dq, dq), (gradients.dk, dk), (gradients.dv, dv)]
    if gradients.dbias is not None:
        pairs.append((gradients.dbias, dbias))
    for into, computed in pairs:
        into.copy_(computed)
    result: torch.Tensor = softmax_d
    return result
