"""The backward of FlashAttention-3's module by itself, as libraries call it that put attention together from parts."""

from __future__ import annotations

import torch

from flash_attn.attention.operators import _flash_attn_backward as _dense
from flash_attn.attention.operators import _flash_attn_varlen_backward as _varlen
from flash_attn.call.arguments import as_int, check_whole, renaming
from flash_attn.call.calls import Window
from flash_attn.interfaces.fa3.inputs import one_window, used_rows


@renaming(seqused_q="sequed_q", seqused_k="sequed_k")
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sequed_q: torch.Tensor | None = None,
    sequed_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    causal: bool | None = None,
    window_size: Window | None = None,
) -> torch.Tensor:
    """Writes dq, dk, dv (each that is not None); returns softmax_d (batch, heads, seqlen_q), packed (heads, total_q).

    out and softmax_lse may be of attention over more keys than k, as ring attention merges them. cu_seqlens_* with
    max_seqlen_*, int32 (batch + 1,): q, k, v are packed; sequed_*, int32 (batch,): how many of a sequence's rows
    count. causal and window_size are older names, of is_causal and of the window as one pair.
    """
    for name, x in (("q", q), ("softmax_lse", softmax_lse)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, wanted a tensor")
    check_whole(sm_margin=sm_margin)
    if is_causal and causal is not None and not causal:
        raise ValueError(f"is_causal, causal: got {is_causal!r} and {causal!r}, wanted one: causal is its older name")
    is_causal = is_causal if causal is None else causal
    left, right = one_window(window_size_left, window_size_right, window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    # A row without keys has -inf here, and +inf in flash_attn.
    lse = softmax_lse.masked_fill(softmax_lse == -torch.inf, torch.inf)
    options = (0.0, scale, is_causal, left, right, softcap, None, deterministic)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        if sequed_q is not None or sequed_k is not None:
            raise NotImplementedError("sequed_q, sequed_k: wanted None without cu_seqlens_q and cu_seqlens_k")
        return _dense(dout, q, k, v, out, lse, dq, dk, dv, *options)
    if cu_seqlens_q is None or cu_seqlens_k is None or max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError("cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: got some, wanted all or none of them")
    if sequed_q is not None or sequed_k is not None:
        cu_seqlens_q, cu_seqlens_k = used_rows(cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k)
    lengths = as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k)
    return _varlen(dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, *lengths, *options)
