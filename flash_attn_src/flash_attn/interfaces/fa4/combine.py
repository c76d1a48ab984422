"""FlashAttention-4's flash_attn_combine."""

from __future__ import annotations

import torch

from flash_attn.call.arguments import check_index, diagnose_switches
from flash_attn.interfaces.fa3.split_kv import flash_attn_combine as combine

_PARTIAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seqused: torch.Tensor | None = None,
    virtual_batch_idx: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, softmax_lse) of attention that was computed over splits of the keys; softmax_lse None unless return_lse.

    out_partial        (splits, batch, seqlen, heads, head_dim) or (splits, total, heads, head_dim)
    lse_partial        fp32 (splits, batch, seqlen, heads) or (splits, total, heads); -inf where a split holds no key
    out                written where given; else new, of out_dtype (default: out_partial's)
    softmax_lse        fp32 (batch, seqlen, heads) or (total, heads)
    cu_seqlens, seqused, virtual_batch_idx   int32: which rows count and in which order upstream's kernel takes them.
                       Here every row is combined, which changes no row that counts
    """
    if not isinstance(out_partial, torch.Tensor) or out_partial.dtype not in _PARTIAL_DTYPES:
        got = getattr(out_partial, "dtype", type(out_partial).__name__)
        raise TypeError(f"out_partial: got {got}, wanted a tensor of float32, float16 or bfloat16")
    for name, index in (("cu_seqlens", cu_seqlens), ("seqused", seqused), ("virtual_batch_idx", virtual_batch_idx)):
        if index is not None:
            check_index(name, index, out_partial, 1)
    diagnose_switches(None, return_lse=return_lse)
    if out is None and out_dtype is None:
        out_dtype = out_partial.dtype
    combined, softmax_lse = combine(out_partial.float(), lse_partial, out, out_dtype)
    return combined, softmax_lse if return_lse else None
