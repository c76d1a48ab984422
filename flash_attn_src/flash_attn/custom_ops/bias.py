"""The custom op flash_attn::_bias_backward: the gradients of a traced call with a bias, which upstream's op lacks."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn import backends
from flash_attn.calls import AttentionCall, GradientCall, maybe_contiguous

_SCHEMA = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor attn_bias, "
    "float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
    "Tensor? s_aux) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("flash_attn::_bias_backward", mutates_args=(), schema=_SCHEMA)
def _bias_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    attn_bias: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    *more: Any,
) -> _Gradients:
    """(dq, dk, dv, the gradient of attn_bias, softmax_d), of checked arguments."""
    q, k, v = maybe_contiguous(q), maybe_contiguous(k), maybe_contiguous(v)
    left, right, softcap, s_aux = more
    call = AttentionCall(q, k, v, softmax_scale, causal, (left, right), softcap, s_aux=s_aux, attn_bias=attn_bias)
    dq, dk, dv, dbias = _new(q, k, v, attn_bias)
    into = GradientCall(
        call, maybe_contiguous(dout), maybe_contiguous(out), softmax_lse.contiguous(), dq, dk, dv, dbias
    )
    return dq, dk, dv, dbias, backends.select(q).backward(into)


@_bias_backward.register_fake
def _fake(
    _dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    _out: torch.Tensor,
    softmax_lse: torch.Tensor,
    attn_bias: torch.Tensor,
    *_: object,
) -> _Gradients:
    dq, dk, dv, dbias = _new(q, k, v, attn_bias)
    return dq, dk, dv, dbias, torch.empty(softmax_lse.shape, dtype=softmax_lse.dtype, device=q.device)


def _new(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


def backward_by_op(gradients: GradientCall, attn_bias: torch.Tensor) -> torch.Tensor:
    """Writes the gradients of a call with a bias through the op, which a compiler sees; returns softmax_d."""
    call = gradients.forward
    dq, dk, dv, dbias, softmax_d = torch.ops.flash_attn._bias_backward(
        gradients.dout, call.q, call.k, call.v, gradients.out, gradients.softmax_lse, attn_bias, call.softmax_scale,
        call.causal, *call.window_size, call.softcap, call.s_aux,
    )  # fmt: skip
    pairs = [(gradients.dq, dq), (gradients.dk, dk), (gradients.dv, dv)]
    if gradients.dbias is not None:
        pairs.append((gradients.dbias, dbias))
    for into, found in pairs:
        into.copy_(found)
    computed: torch.Tensor = softmax_d
    return computed
