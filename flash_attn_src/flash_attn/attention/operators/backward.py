"""The custom ops of attention's backward, with upstream's names and arguments, their checks and fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flash_attn.attention import backends
from flash_attn.attention.operators import extended_backward
from flash_attn.attention.operators.results import call_of, custom_op, register_fake
from flash_attn.attention.operators.sharding import is_distributed
from flash_attn.call.arguments import check_dense, check_gradients, check_varlen
from flash_attn.call.calls import AttentionCall, GradientCall
from flash_attn.call.options import UPSTREAM_BACKWARD

_Named = dict[str, Any]
_OPTIONS = "float dropout_p, float softmax_scale, bool causal"
_GRADIENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
)
_DENSE_BACKWARD_SCHEMA = (
    f"({_GRADIENTS}, {_OPTIONS}, SymInt window_size_left, SymInt window_size_right, float softcap, "
    "Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor"
)
_VARLEN_BACKWARD_SCHEMA = (
    f"({_GRADIENTS}, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    f"{_OPTIONS}, SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, "
    "bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor"
)


def _run(named: _Named, check: Callable[[AttentionCall], None]) -> torch.Tensor:
    dout, out, softmax_lse, *gradients = (named.pop(name) for name in ("dout", "out", "softmax_lse", "dq", "dk", "dv"))
    call = call_of(named)
    check(call)
    return backends.select(call.q).backward(check_gradients(call, dout, out, softmax_lse, tuple(gradients)))


@custom_op(_DENSE_BACKWARD_SCHEMA, ("dq", "dk", "dv"))
def _flash_attn_backward(named: _Named) -> torch.Tensor:
    """Writes dq, dk, dv (each that is not None); returns softmax_d (batch, heads, seqlen_q).

    softmax_lse may be transposed, (batch, seqlen_q, heads), if its memory is as the forward wrote it.
    """
    return _run(named, check_dense)


@custom_op(_VARLEN_BACKWARD_SCHEMA, ("dq", "dk", "dv"))
def _flash_attn_varlen_backward(named: _Named) -> torch.Tensor:
    """The same for packed sequences; softmax_d is (heads, total_q)."""
    return _run(named, check_varlen)


@register_fake(_flash_attn_backward)
@register_fake(_flash_attn_varlen_backward)
def _backward_fake(named: _Named) -> torch.Tensor:
    *batch, rows, heads, _dim = named["q"].shape
    softmax_lse: torch.Tensor = named["softmax_lse"]
    return softmax_lse.new_empty((*batch, heads, rows))


_wrapped_flash_attn_backward = torch.ops.flash_attn._flash_attn_backward
_wrapped_flash_attn_varlen_backward = torch.ops.flash_attn._flash_attn_varlen_backward


def backward_by_op(gradients: GradientCall) -> torch.Tensor:
    """Writes dq, dk and dv through a custom op, which a compiler sees; returns softmax_d."""
    call, options = gradients.forward, gradients.forward.options
    if is_distributed(call.q) or UPSTREAM_BACKWARD.unserved(call) is not None:
        return extended_backward.backward_by_op(gradients)
    tensors = (
        *(gradients.dout, call.q, call.k, call.v, gradients.out, gradients.softmax_lse),
        *(gradients.dq, gradients.dk, gradients.dv),
    )
    more = (
        *(options.dropout_p, options.softmax_scale, options.causal, *options.window_size, options.softcap),
        *(options.alibi_slopes, call.deterministic, options.rng_state),
    )
    softmax_d: torch.Tensor
    if call.cu_seqlens_q is None:
        softmax_d = _wrapped_flash_attn_backward(*tensors, *more)
    else:
        lengths = (call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k)
        softmax_d = _wrapped_flash_attn_varlen_backward(*tensors, *lengths, *more)
    return softmax_d
