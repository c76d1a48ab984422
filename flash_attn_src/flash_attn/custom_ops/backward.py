"""The custom ops of attention's backward, with upstream's names and arguments, their checks and fakes."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn import backends
from flash_attn.arguments import check_dense, check_gradients, check_varlen
from flash_attn.calls import AttentionCall, GradientCall, Options
from flash_attn.custom_ops import extended_backward
from flash_attn.custom_ops.results import register_fake
from flash_attn.custom_ops.sharding import is_distributed
from flash_attn.options import UPSTREAM_BACKWARD

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


@torch.library.custom_op(
    "flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), schema=_DENSE_BACKWARD_SCHEMA
)
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes dq, dk, dv (each that is not None); returns softmax_d (batch, heads, seqlen_q).

    softmax_lse may be transposed, (batch, seqlen_q, heads), if its memory is as the forward wrote it.
    """
    window = (window_size_left, window_size_right)
    options = Options(softmax_scale, causal, window, softcap, dropout_p, alibi_slopes=alibi_slopes, rng_state=rng_state)
    call = AttentionCall(q, k, v, options, deterministic)
    check_dense(call)
    return backends.select(q).backward(check_gradients(call, dout, out, softmax_lse, (dq, dk, dv)))


@torch.library.custom_op(
    "flash_attn::_flash_attn_varlen_backward",
    mutates_args=("dq", "dk", "dv"),
    schema=_VARLEN_BACKWARD_SCHEMA,
)
def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,  # noqa: ARG001
) -> torch.Tensor:
    """The same for packed sequences; softmax_d is (heads, total_q)."""
    window = (window_size_left, window_size_right)
    options = Options(softmax_scale, causal, window, softcap, dropout_p, alibi_slopes=alibi_slopes, rng_state=rng_state)
    call = AttentionCall(
        q, k, v, options, deterministic, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    check_varlen(call)
    return backends.select(q).backward(check_gradients(call, dout, out, softmax_lse, (dq, dk, dv)))


@register_fake(_flash_attn_backward)
@register_fake(_flash_attn_varlen_backward)
def _backward_fake(named: dict[str, Any]) -> torch.Tensor:
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
