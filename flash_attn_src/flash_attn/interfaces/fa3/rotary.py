"""Rotary embedding of FP8 queries and keys: before a call over a cache, because no kernel turns FP8."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.torch.cache import turn
from flash_attn.attention.backends.torch.fp8 import sequence_of_rows
from flash_attn.call.arguments import check_tables
from flash_attn.call.calls import CacheCall, replace


def turned(call: CacheCall) -> CacheCall:
    """The call with q and k turned, and without rotary tables. They are turned in fp32 and cast to their FP8 again."""
    if call.k is None or call.rotary_cos is None:
        return call
    check_tables(call)
    q = _turned(call, call.q, call.cu_seqlens_q, call.rotates_each_query)
    k = _turned(call, call.k, call.cu_seqlens_k_new, True)
    return replace(call, q=q, k=k, rotary_cos=None, rotary_sin=None, rotary_seqlens=None)


def _turned(call: CacheCall, x: torch.Tensor, cu_seqlens: torch.Tensor | None, each: bool) -> torch.Tensor:
    """x with row i of a sequence turned by the angle of place origin + i; without `each`, of place origin."""
    assert call.rotary_cos is not None
    assert call.rotary_sin is not None
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        rows = torch.arange(batch * seqlen, device=x.device)
        sequence, offset = rows // max(seqlen, 1), rows % max(seqlen, 1)
    else:
        sequence = sequence_of_rows(x, cu_seqlens).long()
        offset = torch.arange(x.shape[0], device=x.device) - cu_seqlens[sequence]
    origin = call.cache_seqlens if call.rotary_seqlens is None else call.rotary_seqlens
    places = origin[sequence] if isinstance(origin, torch.Tensor) else torch.full_like(sequence, int(origin or 0))
    if each:
        places = places + offset
    places = places.clamp(0, call.rotary_cos.shape[0] - 1)  # of rows outside of every sequence
    cos, sin = (table.float()[places][:, None] for table in (call.rotary_cos, call.rotary_sin))
    flat = x if cu_seqlens is not None else x.flatten(0, 1)
    limit = torch.finfo(x.dtype).max
    return turn(flat.float(), cos, sin, call.rotary_interleaved).clamp(-limit, limit).to(x.dtype).view(x.shape)
