"""Gradients of the forward ops of attention: from out and, which the public functions lack, softmax_lse.

`keep_*` saves what a backward of flash_attn.custom_ops needs (torch.library's setup_context), `*_backward` calls the
backward op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad


def differentiate(
    op: Any,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    tensors: tuple[torch.Tensor, ...],
    lengths: tuple[Any, ...],
    options: tuple[Any, ...],
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv by a backward op, from the gradients of out and softmax_lse; None where neither reaches one.

    That of softmax_lse reaches the scores as p * dlse. The op gives them p * (dout @ v - rowsum(dout * out)), which is
    the same where the first column of dout holds dlse, that of v ones, and all else zeros. Dropout comes after
    softmax_lse.
    """
    q, k, v, out, softmax_lse = tensors
    dq = dk = dv = None
    if dout is not None:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        op(dout, *tensors, dq, dk, dv, *lengths, *options, alibi_slopes, False, rng_state)
    if dlse is not None:
        more_q, more_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        columns = (0, q.shape[-1] - 1)
        column = pad(dlse.transpose(-1, -2)[..., None].to(q.dtype), columns)
        ones = pad(torch.ones_like(v[..., :1]), columns)
        op(
            *(column, q, k, ones, torch.zeros_like(out), softmax_lse, more_q, more_k, None, *lengths),
            *(0.0, *options[1:], alibi_slopes, False),
        )
        dq, dk = (more_q, more_k) if dq is None or dk is None else (dq + more_q, dk + more_k)
    return dq, dk, dv


def keep_dense(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, _ = inputs
    out, softmax_lse, dmask, rng_state = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(dmask, rng_state)
    ctx.save_for_backward(q, k, v, out, softmax_lse, alibi_slopes, rng_state)
    ctx.options = (dropout_p, softmax_scale, causal, left, right, softcap)


def dense_backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    *tensors, alibi_slopes, rng_state = ctx.saved_tensors
    op = torch.ops.flash_attn._flash_attn_backward
    gradients = differentiate(op, dout, dlse, tensors, (), ctx.options, alibi_slopes, rng_state)
    return *gradients, *(None,) * 8


def keep_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k = inputs[:5]
    alibi_slopes, _, block_table, leftpad_k, seqused_k, _ = inputs[13:]
    out, softmax_lse, dmask, rng_state = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(dmask, rng_state)
    ctx.save_for_backward(q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state)
    ctx.lengths = inputs[5:7]
    ctx.options = inputs[7:13]
    ctx.inference = block_table is not None or leftpad_k is not None or seqused_k is not None


def varlen_backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    if ctx.inference:
        raise RuntimeError("block_table, leftpad_k, seqused_k: attention with any of them has no backward")
    *tensors, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state = ctx.saved_tensors
    lengths = (cu_seqlens_q, cu_seqlens_k, *ctx.lengths)
    gradients = differentiate(
        torch.ops.flash_attn._flash_attn_varlen_backward,
        dout,
        dlse,
        tensors,
        lengths,
        ctx.options,
        alibi_slopes,
        rng_state,
    )
    return *gradients, *(None,) * 16
