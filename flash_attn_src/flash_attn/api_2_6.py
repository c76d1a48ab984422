"""The private functions of flash_attn_interface as flash-attn 2.6 has them: a window as one tuple, more results."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flash_attn import custom_ops
from flash_attn.arguments import as_int, check_dense, check_varlen
from flash_attn.calls import AttentionCall, Options, Window, maybe_contiguous

Forward = tuple[torch.Tensor, ...]
Backward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _padded(x: torch.Tensor, head_dim: int | None = None) -> torch.Tensor:
    """x, padded to head_dim, which is less than 8 above its own; without it, to the next multiple of 8.

    Anything that cannot be padded is returned unchanged, and the op refuses it.
    """
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.dim() == 0:
        return x
    missing = -x.shape[-1] % 8 if head_dim is None else head_dim - x.shape[-1]
    return maybe_contiguous(pad(x, (0, missing)) if 0 < missing < 8 else x)


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> Forward:
    """(out, q, k, v, out_padded, softmax_lse, S_dmask, rng_state): q, k, v, out_padded with their head dim padded."""
    options = Options(softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes=alibi_slopes)
    call = AttentionCall(q, k, v, options, return_softmax=return_softmax)
    check_dense(call)
    left, right = call.options.window_size
    head_dim = v.shape[-1]
    q, k, v = _padded(q), _padded(k), _padded(v)
    out, softmax_lse, dmask, rng_state = custom_ops._flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax
    )
    return out[..., :head_dim], q, k, v, out, softmax_lse, dmask, rng_state


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> Forward:
    """The same for packed sequences."""
    options = Options(softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes=alibi_slopes)
    call = AttentionCall(
        q, k, v, options, return_softmax=return_softmax, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q), max_seqlen_k=as_int("max_seqlen_k", max_seqlen_k),
        block_table=block_table,
    )  # fmt: skip
    check_varlen(call)
    left, right = call.options.window_size
    head_dim = v.shape[-1]
    q, k, v = _padded(q), _padded(k), _padded(v)
    out, softmax_lse, dmask, rng_state = custom_ops._flash_attn_varlen_forward(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal),
        *(left, right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k),
    )
    return out[..., :head_dim], q, k, v, out, softmax_lse, dmask, rng_state


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
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> Backward:
    """Writes dq, dk, dv, new ones for None; returns (dq, dk, dv, softmax_d). dout and out may lack the padding of q,
    k, v."""
    options = Options(softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes=alibi_slopes)
    call = AttentionCall(q, k, v, options, deterministic)
    check_dense(call)
    left, right = call.options.window_size
    dout, out = (_padded(x, v.shape[-1]) for x in (dout, out))
    dq, dk, dv = (torch.empty_like(x) if y is None else y for x, y in zip((q, k, v), (dq, dk, dv), strict=True))
    softmax_d = custom_ops._flash_attn_backward(
        *(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, left, right),
        *(softcap, alibi_slopes, deterministic, rng_state),
    )
    return dq, dk, dv, softmax_d


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
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> Backward:
    """The same for packed sequences."""
    options = Options(softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes=alibi_slopes)
    call = AttentionCall(
        q, k, v, options, deterministic, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q), max_seqlen_k=as_int("max_seqlen_k", max_seqlen_k),
    )  # fmt: skip
    check_varlen(call)
    left, right = call.options.window_size
    dout, out = (_padded(x, v.shape[-1]) for x in (dout, out))
    dq, dk, dv = (torch.empty_like(x) if y is None else y for x, y in zip((q, k, v), (dq, dk, dv), strict=True))
    softmax_d = custom_ops._flash_attn_varlen_backward(
        *(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, deterministic, rng_state),
    )
    return dq, dk, dv, softmax_d
