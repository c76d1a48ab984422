"""Gradients of the custom ops of attention: of out and of softmax_lse, which has none in the public functions.

`keep_*` is torch.library's setup_context of an op, `*_backward` its backward, which calls an op of
flash_attn.attention.operators.backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.functional import pad

from flash_attn.attention import second_derivative
from flash_attn.attention.operators.backward import backward_by_op
from flash_attn.attention.operators.sinks import sink_gradient
from flash_attn.call.calls import AttentionCall, GradientCall, Options, kept, replace, restore
from flash_attn.call.first_derivative import first_only

_Gradients = tuple[
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
]


def differentiate(
    call: AttentionCall,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    backward: Callable[[GradientCall], torch.Tensor] = backward_by_op,
) -> _Gradients:
    """dq, dk, dv and the gradients of s_aux and attn_bias from the gradients of out and softmax_lse; None where none
    reaches an input.

    The gradient of softmax_lse reaches the scores as p * dlse. The backward gives them
    p * (dout @ v - rowsum(dout * out)). Both are equal where the first column of dout holds dlse, the first column of v
    holds ones, and all else is zero. Dropout comes after softmax_lse.
    backward: writes the gradients of a call whose out got one; returns softmax_d.
    """
    dq = dk = dv = softmax_d = dsinks = dbias = None
    if dout is not None:
        dq, dk, dv, dbias = _new(call)
        softmax_d = backward(GradientCall(call, dout, out, softmax_lse, dq, dk, dv, dbias))
    if dlse is not None:
        columns = (0, call.v.shape[-1] - 1)
        column = pad(dlse.transpose(-1, -2)[..., None].to(call.q.dtype), columns)
        ones = pad(torch.ones_like(call.v[..., :1]), columns)
        more_q, more_k, unused, more_bias = _new(call)
        undropped = replace(call, v=ones, dropout_p=0.0, rng_state=None)
        zeros = torch.zeros_like(out)
        backward(GradientCall(undropped, column, zeros, softmax_lse, more_q, more_k, unused, more_bias))
        dq, dk = (more_q, more_k) if dq is None or dk is None else (dq + more_q, dk + more_k)
        dbias = more_bias if dbias is None or more_bias is None else dbias + more_bias
    if call.options.s_aux is not None and (dout is not None or dlse is not None):
        dsinks = sink_gradient(call.options.s_aux, softmax_lse, softmax_d, dlse)
    return dq, dk, dv, dsinks, dbias


def _new(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v))
    bias = call.options.attn_bias
    return dq, dk, dv, None if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)


def keep(ctx: Any, call: AttentionCall, out: torch.Tensor, softmax_lse: torch.Tensor) -> None:
    """Saves the tensors and options that `kept_gradients` needs."""
    ctx.set_materialize_grads(False)
    tensors, ctx.rest = kept(call)
    ctx.save_for_backward(call.q, call.k, call.v, out, softmax_lse, *tensors)
    ctx.inference = call.is_inference


def kept_gradients(
    ctx: Any,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    backward: Callable[[GradientCall], torch.Tensor] = backward_by_op,
) -> _Gradients:
    """dq, dk, dv and the gradients of s_aux and attn_bias of the call that `keep` kept. The derivative of these is
    PyTorch's, or an error. backward: see `differentiate`."""
    if ctx.inference:
        raise RuntimeError("block_table, leftpad_k, seqused_k: attention with any of them has no backward")
    saved = ctx.saved_tensors
    q, k, v, out, softmax_lse, *tensors = saved
    call = restore(q, k, v, tuple(tensors), ctx.rest)

    def first(_ctx: Any, _saved: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> _Gradients:
        dq, dk, dv, dsinks, dbias = differentiate(call, out, softmax_lse, dout, dlse, backward)
        if dv is None and dlse is not None:  # zeros instead of nothing, as upstream
            dv = torch.zeros_like(v, memory_format=torch.contiguous_format)
        return dq, dk, dv, dsinks, dbias

    if is_compiling() or not torch.is_grad_enabled():
        return first(ctx, saved, dout, dlse)
    what = second_derivative.refused(call)
    computed: tuple[torch.Tensor | None, ...]
    if what is None:
        with torch.no_grad():
            computed = first(ctx, saved, dout, dlse)
        computed = second_derivative.gradients(computed, call, (q, k, v), dout, dlse)
    else:
        computed = first_only(what, first, ctx, dout, dlse, saved=saved)
    dq, dk, dv, dsinks, dbias = computed
    return dq, dk, dv, dsinks, dbias


def keep_dense(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, _ = inputs
    out, softmax_lse, dmask, rng_state = output
    ctx.mark_non_differentiable(dmask, rng_state)
    options = Options(softmax_scale, causal, (left, right), softcap, dropout_p, alibi_slopes=alibi_slopes)
    options.rng_state = rng_state
    call = AttentionCall(q, k, v, options)
    keep(ctx, call, out, softmax_lse)


def dense_backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    return *kept_gradients(ctx, dout, dlse)[:3], *(None,) * 8


def keep_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    (
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        left, right, softcap, alibi_slopes, _return_softmax, block_table, leftpad_k, seqused_k, *_,
    ) = inputs  # fmt: skip
    ctx.others = len(inputs) - 3
    out, softmax_lse, dmask, rng_state = output
    ctx.mark_non_differentiable(dmask, rng_state)
    options = Options(softmax_scale, causal, (left, right), softcap, dropout_p, alibi_slopes=alibi_slopes)
    options.rng_state = rng_state
    call = AttentionCall(
        q, k, v, options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, leftpad_k=leftpad_k, block_table=block_table,
    )  # fmt: skip
    keep(ctx, call, out, softmax_lse)


def varlen_backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    return *kept_gradients(ctx, dout, dlse)[:3], *(None,) * ctx.others
