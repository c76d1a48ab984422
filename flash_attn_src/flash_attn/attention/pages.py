"""Attention over a program's own pages, for its plug-in."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.torch.fp8 import is_fp8
from flash_attn.attention.fp8_cache import has_wide_queries, set_descales
from flash_attn.attention.operators.kvcache import attend
from flash_attn.call.arguments import check_kvcache
from flash_attn.call.calls import CacheCall, Descales


def attend_pages(call: CacheCall, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> torch.Tensor:
    """The result of a call that writes nothing. The scales, of one element each, count for a cache in FP8. None: 1.

    Raises TypeError, ValueError or NotImplementedError naming what does not fit.
    """
    descales: Descales = (None, None, None)
    if is_fp8(call.k_cache):
        ones = torch.ones((call.batch, call.k_cache.shape[2]), dtype=torch.float32, device=call.q.device)
        k, v = (ones if x is None else x.float().reshape(1, 1).expand_as(ones) for x in (k_scale, v_scale))
        descales = (None, k, v)
    check_kvcache(call, False, dtype_cache=call.k_cache.dtype if has_wide_queries(call, descales) else None)
    set_descales(call, descales)
    out, _ = attend(call)
    return out
