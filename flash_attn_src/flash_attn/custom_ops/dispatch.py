"""The two calls that everything else makes, `forward` and `backward`: to a backend, or through a custom op.

In eager mode they call the backend itself, as dispatching through a custom op costs more than a small kernel. Under
torch.compile, torch.export, a dispatch mode or with a tensor subclass they go through the ops, which carry fakes.
With dropout the seed is drawn here, outside of an op: what compiles a graph may merge calls of an op with the same
arguments, and make one anew for the backward.
Shapes, dtypes and units: flash_attn.backends.torch.
"""

from __future__ import annotations

import torch

from flash_attn import dmask, rng
from flash_attn.backends import select
from flash_attn.custom_ops.attention import (
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
)
from flash_attn.custom_ops.dropout import dropout_forward
from flash_attn.tracing import is_traced


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    return_softmax: bool,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(out, softmax_lse, S_dmask or None or (0,), rng_state or None), eager or traced."""
    rng_state = rng.draw(q.device) if dropout_p > 0.0 else None
    if is_traced(q, k, v, cu_seqlens_q, cu_seqlens_k):
        if rng_state is not None:
            out, softmax_lse, s_dmask = dropout_forward(
                q, k, v, softmax_scale, causal, left, right, softcap, alibi_slopes, dropout_p, return_softmax,
                rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table,
            )  # fmt: skip
            return out, softmax_lse, s_dmask, rng_state
        if cu_seqlens_q is None or cu_seqlens_k is None:
            return _wrapped_flash_attn_forward(
                q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax
            )
        return _wrapped_flash_attn_varlen_forward(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale),
            *(causal, left, right, softcap, alibi_slopes, return_softmax, block_table),
        )
    out, softmax_lse, probabilities, rng_state = select(q).forward(
        q, k, v, None, softmax_scale, causal, left, right, softcap, alibi_slopes, dropout_p, return_softmax,
        rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, None, block_table,
    )  # fmt: skip
    s_dmask = None if probabilities is None else dmask.scaled(probabilities, q.shape[-1])
    return out, softmax_lse, s_dmask, rng_state


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    deterministic: bool,
    rng_state: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """Writes dq, dk, dv, eager or traced."""
    if is_traced(dout, q, k, v, cu_seqlens_q, cu_seqlens_k):
        gradients = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
        options = (
            dropout_p,
            softmax_scale,
            causal,
            left,
            right,
            softcap,
            alibi_slopes,
            deterministic,
            rng_state,
        )
        if cu_seqlens_q is None:
            _wrapped_flash_attn_backward(*gradients, *options)
        else:
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            _wrapped_flash_attn_varlen_backward(*gradients, *lengths, *options)
        return
    select(q).backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, left, right, softcap,
        alibi_slopes, dropout_p, deterministic, rng_state,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
