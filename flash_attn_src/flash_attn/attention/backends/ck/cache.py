"""Attention over a cache by Composable Kernel: appending, the keys in splits, and their sum."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.ck import parameters as ck_parameters
from flash_attn.attention.backends.ck.fallback import Fallback
from flash_attn.attention.backends.ck.parameters import (
    NO_TENSOR,
    Parameters,
    aligned,
    has_window_over_pages,
    window_of,
)
from flash_attn.call.arguments import check_tables
from flash_attn.call.calls import CacheCall
from flash_attn.call.options import CK_CACHE
from flash_attn.core import ck_planner, device
from flash_attn.core.ck_planner import UnsupportedError
from flash_attn.kernels import planning


def kvcache(call: CacheCall, fallback: Fallback) -> tuple[torch.Tensor, torch.Tensor]:
    """See `protocol.Backend.kvcache`."""
    if (reason := unsupported_reason(call)) is not None:
        return fallback.because("kvcache", reason).kvcache(call)
    return attend(call, fallback)


def attend(call: CacheCall, fallback: Fallback) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcache` of a call that the kernels support."""
    check_tables(call)
    q, k_cache, v_cache, k, v, block_table = call.q, call.k_cache, call.v_cache, call.k, call.v, call.block_table
    rotary_cos, alibi_slopes, cache_seqlens = call.rotary_cos, call.options.alibi_slopes, call.lengths
    if isinstance(call.cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), call.cache_seqlens, dtype=torch.int32, device=q.device)
    batch, seqlen_q, nheads, head_dim = q.shape
    nheads_k, page_size = k_cache.shape[2], k_cache.shape[1] if block_table is not None else 0
    window = window_of(call, one_query=seqlen_q == 1)
    q = aligned(q)
    if rotary_cos is not None and k is not None:
        q = q.clone()  # it is turned in place
    result = torch.empty_like(q)
    lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    seqlens = cache_seqlens if k is None or cache_seqlens is None else cache_seqlens + call.added
    # If all queries see the same keys, heads that share keys become queries of one head, so that a block reads the keys
    # once for all of them.
    group = nheads // nheads_k
    together = group > 1 and seqlen_q == 1 and window == (-1, -1) and alibi_slopes is None and rotary_cos is None
    folded_q, folded_out, lse_strides = q, result, (lse.stride(0), lse.stride(1))
    if together:
        folded_q, folded_out = (tensor.view(batch, nheads_k, group, head_dim).transpose(1, 2) for tensor in (q, result))
        lse_strides = (lse.stride(0), group)
    rows, heads = folded_q.shape[1:3]
    splits = call.num_splits or num_splits_of(q, batch * heads * -(-rows // 64), call.capacity)
    split_out = torch.empty((splits, batch, nheads, seqlen_q, head_dim), dtype=torch.float32, device=q.device)
    split_lse = torch.empty((splits, batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    parameters = Parameters()
    address, rows_of = parameters.address, parameters.rows
    shape = parameters.cache(call, folded_q, window, lse_strides)
    new = (*NO_TENSOR, *NO_TENSOR) if k is None or v is None else (*rows_of(aligned(k)), *rows_of(aligned(v)))
    packed = ck_planner.DECODE.pack(
        *shape, *rows_of(folded_q), *rows_of(k_cache), *rows_of(v_cache), *rows_of(folded_out), *new, address(lse),
        address(cache_seqlens) if k is not None else 0, address(seqlens), address(call.cache_batch_idx),
        address(block_table), 0 if block_table is None else block_table.stride(0), 0,
        address(rotary_cos), address(call.rotary_sin), 0 if rotary_cos is None else 2 * rotary_cos.shape[-1],
        int(call.rotary_interleaved), call.added, page_size, splits, 0,
        address(split_out), address(split_lse),
    )  # fmt: skip
    try:
        parameters.run("decode", packed)
    except UnsupportedError as error:
        return fallback.because("kvcache", str(error)).kvcache(call)
    return (result if call.out is None else call.out.copy_(result)), lse


def unsupported_reason(call: CacheCall) -> str | None:
    """Why no kernel takes a call, or None."""
    name = CK_CACHE.unserved(call)
    if name is not None:
        return f"{name}: the kernels have none"
    if has_window_over_pages(call):
        return "window_size: not over pages, because NaN before the window would count"
    if call.q.shape[-1] not in planning.COMPOSABLE.head_dims:
        return f"head_dim: a cache of {call.q.shape[-1]} would have to be copied"
    if not (aligned(call.k_cache) is call.k_cache and aligned(call.v_cache) is call.v_cache):
        return "k_cache, v_cache: rows that do not start on 16 bytes"
    tables = [table for table in (call.rotary_cos, call.rotary_sin) if table is not None]
    if any(table.shape[-1] % 8 or not table.is_contiguous() for table in tables):
        return "rotary_cos: rotary_dim is not a multiple of 16, or the rows do not lie dense"
    if tables and call.added == 0:
        return "rotary_cos: no new keys to turn with the queries"
    if 0 in call.q.shape or call.k_cache.shape[1] == 0:
        return "q, k_cache: an empty one"
    if call.num_splits > ck_planner.MAX_SPLITS:
        return f"num_splits: {call.num_splits} is above {ck_planner.MAX_SPLITS}"
    return ck_parameters.unsupported_reason(call.q, call.v_cache)


def num_splits_of(q: torch.Tensor, blocks: int, seqlen_k: int) -> int:
    """Splits of the keys such that their blocks fill the compute units once, each split 256 keys or more."""
    units = device.of(q.get_device()).compute_units
    return max(1, min(units // max(1, blocks), -(-seqlen_k // 256), ck_planner.MAX_SPLITS))
