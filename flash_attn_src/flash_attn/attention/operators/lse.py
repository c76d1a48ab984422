"""softmax_lse with a gradient, which FlashAttention-4 and FlexAttention have and flash_attn_func does not."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flash_attn.attention.operators import dispatch
from flash_attn.attention.operators.autograd import differentiate
from flash_attn.attention.operators.sharding import replicated
from flash_attn.call.calls import AttentionCall, kept, replace, restore
from flash_attn.call.first_derivative import Gradients, first_only

_HEAD_DIM_STEP = 8


def _padded(x: torch.Tensor) -> torch.Tensor:
    """x with a head dim that backends take."""
    return pad(x, (0, -x.shape[-1] % _HEAD_DIM_STEP))


class _Lse(torch.autograd.Function):
    """softmax_lse as it is, with the gradients of q, k, s_aux and attn_bias. The gradient of v is zero."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s_aux: torch.Tensor | None,  # noqa: ARG004
        attn_bias: torch.Tensor | None,  # noqa: ARG004
        softmax_lse: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        tensors, ctx.rest = kept(call)
        ctx.save_for_backward(q, k, softmax_lse, *tensors)
        ctx.of_v = v.shape, v.dtype
        return softmax_lse.view_as(softmax_lse)

    @staticmethod
    def backward(ctx: Any, dlse: torch.Tensor) -> Gradients:
        return *first_only("flash_attn", _gradients, ctx, dlse), None, None


def _gradients(ctx: Any, saved: tuple[Any, ...], dlse: torch.Tensor) -> Gradients:
    """The gradients of q, k, v, s_aux and attn_bias."""
    q, k, softmax_lse, *tensors = saved
    wide_q, wide_k = _padded(q), _padded(k)
    # The gradient of softmax_lse does not depend on v.
    call = restore(wide_q, wide_k, wide_k, tuple(tensors), ctx.rest)
    dq, dk, _, dsinks, dbias = differentiate(call, torch.empty_like(wide_q), softmax_lse, None, dlse)
    assert dq is not None
    assert dk is not None
    shape, dtype = ctx.of_v
    dv = replicated(torch.zeros(shape, dtype=dtype, device=q.device), q) if ctx.needs_input_grad[2] else None
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv, dsinks, dbias


def with_gradient(call: AttentionCall, softmax_lse: torch.Tensor) -> torch.Tensor:
    """softmax_lse (+inf in rows without a key) of a checked call, differentiable by q, k, v, s_aux and attn_bias."""
    scale = call.q.shape[-1] ** -0.5 if call.options.softmax_scale is None else call.options.softmax_scale
    bare = replace(call, softmax_scale=scale)
    learned = call.options.s_aux, call.options.attn_bias
    return _Lse.apply(call.q, call.k, call.v, *learned, softmax_lse.detach(), bare)


def by_op(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) of a checked call that torch.compile traces: the custom op has the gradients of both."""
    padded = replace(call, q=_padded(call.q), k=_padded(call.k), v=_padded(call.v))
    out, softmax_lse, *_ = dispatch.forward(padded)
    return out[..., : call.v.shape[-1]], softmax_lse
