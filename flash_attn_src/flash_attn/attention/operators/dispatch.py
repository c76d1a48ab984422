"""`forward` and `backward` of a checked call: directly by a backend, or through a custom op if the call is traced.

In eager mode they call the backend itself, as dispatching through a custom op costs more than a small kernel. Under
torch.compile, torch.export, a dispatch mode or with a tensor subclass they go through the ops, which carry fakes.
With dropout the seed is drawn here, outside of an op: what compiles a graph may merge two calls of an op with the same
arguments, or run one a second time for the backward.
"""

from __future__ import annotations

import torch

from flash_attn.attention import backends, dmask
from flash_attn.attention.operators.attention import _wrapped_flash_attn_forward, _wrapped_flash_attn_varlen_forward
from flash_attn.attention.operators.backward import backward_by_op
from flash_attn.attention.operators.extended_forward import forward_by_op
from flash_attn.attention.operators.sharding import is_distributed
from flash_attn.call.calls import AttentionCall, GradientCall
from flash_attn.call.options import UPSTREAM_FORWARD, draw_rng_state, option_tensors
from flash_attn.call.tracing import is_traced

# out, softmax_lse, S_dmask (None or of shape (0,) unless asked for), rng_state (None without dropout)
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def forward(call: AttentionCall) -> Results:
    """Attention, eager or traced. With dropout it draws the call's rng_state."""
    if call.options.dropout_p > 0.0:
        call.options.rng_state = draw_rng_state(call.q.device)
    if is_traced(
        call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.block_table, *option_tensors(call.options)
    ):
        return _forward_by_op(call)
    out, softmax_lse, probabilities, rng_state = backends.select(call.q).forward(call)
    s_dmask = None if probabilities is None else dmask.scaled(probabilities, call.q.shape[-1])
    return out, softmax_lse, s_dmask, rng_state


def _forward_by_op(call: AttentionCall) -> Results:
    options = call.options
    is_sharded = is_distributed(call.q)
    if is_sharded and options.dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p: got {options.dropout_p} with DTensors, wanted 0: ranks would draw apart")
    if is_sharded or UPSTREAM_FORWARD.unserved(call) is not None:
        return *forward_by_op(call), options.rng_state
    more = (options.dropout_p, options.softmax_scale, options.causal, *options.window_size, options.softcap)
    if call.cu_seqlens_q is None:
        return _wrapped_flash_attn_forward(call.q, call.k, call.v, *more, options.alibi_slopes, call.return_softmax)
    return _wrapped_flash_attn_varlen_forward(
        call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k, *more,
        options.alibi_slopes, call.return_softmax, call.block_table,
    )  # fmt: skip


def backward(gradients: GradientCall) -> torch.Tensor:
    """Writes dq, dk and dv, eager or traced; returns softmax_d."""
    call = gradients.forward
    if is_traced(
        gradients.dout, call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, *option_tensors(call.options)
    ):
        return backward_by_op(gradients)
    return backends.select(call.q).backward(gradients)
