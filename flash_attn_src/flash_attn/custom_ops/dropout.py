"""The custom op flash_attn::_dropout_forward: the forward of a traced call with dropout, whose seed is an argument.

The ops of flash_attn.custom_ops have upstream's arguments and draw the seed themselves, so that to a compiler two calls
of them are one, and one that a checkpoint makes anew has another mask.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn import dmask
from flash_attn.backends import select
from flash_attn.custom_ops.attention import fake_results
from flash_attn.custom_ops.autograd import differentiate

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, float dropout_p, bool return_softmax, "
    "Tensor rng_state, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? block_table) -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("flash_attn::_dropout_forward", mutates_args=(), schema=_SCHEMA)
def _dropout_forward(
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
    rng_state: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, softmax_lse, S_dmask), of checked arguments; S_dmask is (0,) unless asked for."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # of the fake's strides
    out, softmax_lse, probabilities, _ = select(q).forward(
        q, k, v, out, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, dropout_p,
        return_softmax, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, None, block_table,
    )  # fmt: skip
    s_dmask = q.new_empty((0,)) if probabilities is None else dmask.scaled(probabilities, q.shape[-1])
    return out, softmax_lse, s_dmask


@_dropout_forward.register_fake
def _fake(q: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return_softmax, _, cu_seqlens_q, _, max_seqlen_q, max_seqlen_k, _ = more[-7:]
    *outer, heads, _dim = q.shape
    batch, *rows = outer if cu_seqlens_q is None else (cu_seqlens_q.shape[0] - 1, outer[0])
    lse_shape = (batch, heads, *rows) if cu_seqlens_q is None else (heads, *rows)
    dmask_shape = (batch, heads, max_seqlen_q, max_seqlen_k) if return_softmax else (0,)
    return fake_results(q, lse_shape, dmask_shape)[:3]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *options, alibi_slopes, dropout_p, _, rng_state, cu_seqlens_q, cu_seqlens_k, max_q, max_k, table = inputs
    out, softmax_lse, s_dmask = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(s_dmask)
    ctx.save_for_backward(q, k, v, out, softmax_lse, alibi_slopes, rng_state, cu_seqlens_q, cu_seqlens_k)
    ctx.options = (dropout_p, *options)
    ctx.lengths = (max_q, max_k)
    ctx.paged = table is not None


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    if ctx.paged:
        raise RuntimeError("block_table: attention over a paged cache has no backward")
    *tensors, alibi_slopes, rng_state, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    op, lengths = torch.ops.flash_attn._flash_attn_backward, ()
    if cu_seqlens_q is not None:
        op = torch.ops.flash_attn._flash_attn_varlen_backward
        lengths = (cu_seqlens_q, cu_seqlens_k, *ctx.lengths)
    gradients = differentiate(op, dout, dlse, tensors, lengths, ctx.options, alibi_slopes, rng_state)
    return *gradients, *(None,) * 14


_dropout_forward.register_autograd(_backward, setup_context=_keep)
dropout_forward = torch.ops.flash_attn._dropout_forward
