"""SageAttention's function by name and signature, on the kernels of flash_attn for Radeon GPUs.

This is not thu-ml's package `sageattention`: it has none of its code. It has `sageattn` alone.
"""

from __future__ import annotations

import torch
from flash_attn.int8 import flash_attn_int8_func

__all__ = ["sageattn"]

_LAYOUTS = ("HND", "NHD")


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    smooth_k: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with INT8 queries and keys: `flash_attn.int8`, which has the errors and the GPUs.

    q, k, v: fp16 or bf16, head dims up to 128, (batch, heads, seqlen, head_dim) with tensor_layout "HND",
    (batch, seqlen, heads, head_dim) with "NHD". sm_scale: 1 / sqrt(head_dim) by default. Returns the output in the
    layout of q; with return_lse also the logsumexp, fp32 (batch, heads, seqlen_q).

    ValueError for another layout, and for is_causal with different numbers of queries and keys. NotImplementedError
    for attn_mask. Arguments that are not named here raise TypeError.
    """
    if tensor_layout not in _LAYOUTS:
        raise ValueError(f"tensor_layout: got {tensor_layout!r}, wanted one of {', '.join(_LAYOUTS)}")
    if attn_mask is not None:
        raise NotImplementedError("attn_mask: the INT8 kernels take none, call scaled_dot_product_attention")
    if tensor_layout == "HND":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if is_causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"is_causal: got {q.shape[1]} queries and {k.shape[1]} keys, wanted as many queries as keys")
    result = flash_attn_int8_func(q, k, v, sm_scale, is_causal, smooth_k, return_lse)
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out.transpose(1, 2) if tensor_layout == "HND" else out
    return out if lse is None else (out, lse)
