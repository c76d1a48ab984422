"""The custom op flash_attn::_extended_forward: the forward of a traced call that upstream's ops cannot express.

The ops of flash_attn.custom_ops.attention have upstream's arguments, without sinks and a bias. They draw the seed of
dropout themselves. A compiler would take two such calls for one, and a checkpoint would compute another mask the second
time. So the seed is an argument here.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn import backends
from flash_attn.calls import AttentionCall, new_out
from flash_attn.custom_ops.autograd import keep, kept_gradients
from flash_attn.custom_ops.results import complete, fake_results
from flash_attn.tracing import refuse_tangents_of_an_op

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, float dropout_p, bool return_softmax, "
    "Tensor? rng_state, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? block_table, Tensor? s_aux, Tensor? attn_bias, bool deterministic=False) -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("flash_attn::_extended_forward", mutates_args=(), schema=_SCHEMA)
def _extended_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    return_softmax: bool,
    rng_state: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: torch.Tensor | None,
    s_aux: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    deterministic: bool = False,  # noqa: ARG001 - the backward's
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, softmax_lse, S_dmask), of checked arguments; S_dmask is (0,) unless asked for."""
    call = AttentionCall(
        q, k, v, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes, dropout_p,
        return_softmax=return_softmax, rng_state=rng_state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, block_table=block_table, s_aux=s_aux,
        attn_bias=attn_bias,
    )  # fmt: skip
    refuse_tangents_of_an_op(q, k, v, alibi_slopes, s_aux, attn_bias)
    call.out = new_out(q, v)  # of the fake's strides
    return complete(q, backends.select(q).forward(call))[:3]


@_extended_forward.register_fake
def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dropout_p, return_softmax, _rng_state, cu_seqlens_q, _cu_seqlens_k, max_seqlen_q, max_seqlen_k, *_ = more[6:]
    *outer, heads, _dim = q.shape
    lse_shape: tuple[int, ...]
    if cu_seqlens_q is None:
        batch, seqlen_q = outer
        lse_shape, dmask_shape = (batch, heads, seqlen_q), (batch, heads, seqlen_q, k.shape[1])
    else:
        lse_shape = (heads, *outer)
        dmask_shape = (cu_seqlens_q.shape[0] - 1, heads, max_seqlen_q, max_seqlen_k)
    return fake_results(q, v, lse_shape, dmask_shape if return_softmax and dropout_p > 0.0 else (0,))[:3]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    (
        q, k, v, softmax_scale, causal, left, right, softcap, alibi_slopes, dropout_p, _return_softmax,
        rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, s_aux, attn_bias,
        *deterministic,
    ) = inputs  # fmt: skip
    out, softmax_lse, s_dmask = output
    ctx.mark_non_differentiable(s_dmask)
    call = AttentionCall(
        q, k, v, softmax_scale, causal, (left, right), softcap, alibi_slopes, dropout_p, rng_state=rng_state,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        block_table=block_table, s_aux=s_aux, attn_bias=attn_bias,
    )  # fmt: skip
    call.deterministic = any(deterministic)
    ctx.others = len(deterministic)
    keep(ctx, call, out, softmax_lse)


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    dq, dk, dv, *others = kept_gradients(ctx, dout, dlse)
    return dq, dk, dv, *(None,) * 14, *others, *(None,) * ctx.others


_extended_forward.register_autograd(_backward, setup_context=_keep)
extended_forward = torch.ops.flash_attn._extended_forward
