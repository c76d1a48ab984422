"""The custom ops of attention's forward, with upstream's names and arguments, their checks and fakes."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.attention import backends
from flash_attn.attention.operators import autograd
from flash_attn.attention.operators.results import call_of, complete, custom_op, fake_results, register_fake
from flash_attn.call.arguments import check_dense, check_num_splits, check_per_sequence, check_varlen
from flash_attn.call.calls import AttentionCall, maybe_contiguous, new_out
from flash_attn.call.tracing import refuse_tangents_of_an_op
from flash_attn.core.api import SINCE_2_8_4

_OPTIONS = "float dropout_p, float softmax_scale, bool causal"
_DENSE_SCHEMA = (
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)
_VARLEN_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, {_OPTIONS}, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None, "
    f"Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False{', SymInt num_splits=0' * SINCE_2_8_4}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_Named = dict[str, Any]
_Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@custom_op(_DENSE_SCHEMA)
def _flash_attn_forward(named: _Named) -> _Results:
    """(out, softmax_lse, S_dmask, rng_state); S_dmask is (0,) unless return_softmax is set and dropout_p > 0."""
    call = call_of(named)
    check_dense(call)
    return _run(call)


@custom_op(_VARLEN_SCHEMA)
def _flash_attn_varlen_forward(named: _Named) -> _Results:
    """The same for packed sequences; S_dmask is (batch, heads, max_seqlen_q, max_seqlen_k).

    leftpad_k, seqused_k: int32 (batch,), where each sequence's keys begin and how many there are. num_splits: speed
    only; RuntimeError above 1 with block_table, as upstream. zero_tensors changes nothing: rows outside of every
    sequence are always zero.
    """
    check_num_splits(named.pop("num_splits", 0), named["block_table"])
    call = call_of(named)
    check_varlen(call)
    check_per_sequence(call.q, call.batch, leftpad_k=call.leftpad_k, seqused_k=call.seqused_k)
    return _run(call)


@register_fake(_flash_attn_forward)
@register_fake(_flash_attn_varlen_forward)
def _forward_fake(named: _Named) -> _Results:
    q, v, cu_seqlens = named["q"], named["v"], named.get("cu_seqlens_q")
    *outer, heads, _ = q.shape
    lse_shape = (*outer[:-1], heads, outer[-1])
    if cu_seqlens is None:
        dmask_shape = (*lse_shape, named["k"].shape[1])
    else:
        dmask_shape = (cu_seqlens.shape[0] - 1, heads, named["max_seqlen_q"], named["max_seqlen_k"])
    has_dmask = named["return_softmax"] and named["dropout_p"] > 0.0
    return fake_results(q, v, lse_shape, dmask_shape if has_dmask else (0,))


def _run(call: AttentionCall) -> _Results:
    refuse_tangents_of_an_op(call.q, call.k, call.v, call.options.alibi_slopes)
    call.q, call.k, call.v = maybe_contiguous(call.q), maybe_contiguous(call.k), maybe_contiguous(call.v)
    call.out = new_out(call.q, call.v)  # of the fake's strides
    return complete(call.q, backends.select(call.q).forward(call))


_wrapped_flash_attn_forward = torch.ops.flash_attn._flash_attn_forward
_wrapped_flash_attn_varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward

_flash_attn_forward.register_autograd(autograd.dense_backward, setup_context=autograd.keep_dense)
_flash_attn_varlen_forward.register_autograd(autograd.varlen_backward, setup_context=autograd.keep_varlen)
