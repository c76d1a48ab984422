"""One part of a step by flash_attn's attention over a paged cache."""

from __future__ import annotations

import torch
from flash_attn.attention.fp8_cache import has_wide_queries, set_descales
from flash_attn.attention.operators.kvcache import attend as attend_to_cache
from flash_attn.call.arguments import check_kvcache
from flash_attn.call.calls import CacheCall, Options, replace

from vllm_flash_rocm.metadata import Part


def attend(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    part: Part,
    max_seq_len: int,
    options: Options,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Causal attention of a part's queries (tokens, heads, head_size), in their shape.

    caches: pages of keys and values (pages, page_size, heads_k, head_size). options: of the layer. scales: fp32, one
    element each, of caches in FP8. Raises TypeError, ValueError or NotImplementedError naming what does not fit.
    """
    rows = query[part.first : part.stop]
    keys, values = caches
    call = CacheCall(  # with options of its own, which the checks complete
        q=rows if part.cu_seqlens_q is not None else rows[:, None], k_cache=keys, v_cache=values,
        options=replace(options), cache_seqlens=part.seq_lens, block_table=part.block_table,
        cu_seqlens_q=part.cu_seqlens_q, max_seqlen_q=0 if part.cu_seqlens_q is None else part.max_query_len,
        max_seqlen_k=max_seq_len,
    )  # fmt: skip
    descales = (None, None, None)
    if scales is not None:
        shape = part.seq_lens.shape[0], keys.shape[2]
        k_scale, v_scale = (scale.reshape(1, 1).expand(shape) for scale in scales)
        descales = (None, k_scale, v_scale)  # type: ignore[assignment]
    check_kvcache(call, False, dtype_cache=keys.dtype if has_wide_queries(call, descales) else None)
    set_descales(call, descales)
    out, _ = attend_to_cache(call)
    return out if part.cu_seqlens_q is not None else out[:, 0]
