"""New keys and values into a cache, with rotary embedding of them and of q, by a Triton kernel."""

from __future__ import annotations

import torch

from flash_attn.arguments import check_tables
from flash_attn.backends.triton.kernels import VEC, aligned, find_one, flags_of, strides_of
from flash_attn.calls import CacheCall
from flash_attn.kernels.flags import HAS_CACHE_BATCH_IDX, HAS_ROTARY_SEQLENS, ROTARY_INTERLEAVED, ROTARY_MOVES
from flash_attn.kernels.variants import bucket
from flash_attn.runtime.launch import current_stream


def append(call: CacheCall, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Writes k and v into the caches of a call, whose rows start on 16 bytes; returns its q, turned where there is
    rotary embedding."""
    check_tables(call)
    q, device, head_dim = call.q, call.q.get_device(), call.q.shape[-1]
    nheads, nheads_k = q.shape[-2], call.k_cache.shape[2]
    length, lengths, added, capacity, seqlen_q = call.length, call.lengths, call.added, call.capacity, call.seqlen_q
    rotary_cos, rotary_sin, block_table = call.rotary_cos, call.rotary_sin, call.block_table
    vec = VEC[q.dtype]
    k, v = aligned(k, vec), aligned(v, vec)
    flags = flags_of(call.cu_seqlens_q, call.cu_seqlens_k_new, lengths, None, None)
    if call.cache_batch_idx is not None:
        flags |= HAS_CACHE_BATCH_IDX
    if call.rotary_interleaved:
        flags |= ROTARY_INTERLEAVED
    if call.moving:
        flags |= ROTARY_MOVES
    kernel = find_one("append", device, q.dtype, head_dim)
    turned, q_blocks, half, places, table_row = q, 0, 0, 0, 0
    if rotary_cos is not None and rotary_sin is not None:
        rotary_cos, rotary_sin = rotary_cos.contiguous(), rotary_sin.contiguous()
        places, half = rotary_cos.shape
        table_row = half
        if call.rotary_seqlens is not None:
            flags |= HAS_ROTARY_SEQLENS
        turned = torch.empty_like(q)
        if call.cu_seqlens_q is not None:  # the kernel takes no rows beyond max_seqlen_q
            turned.fill_(float("nan"))
        q_blocks = -(-seqlen_q * nheads // kernel.block_m)
    k_blocks = -(-added * nheads_k // kernel.block_m)
    pointer = kernel.pointer
    kernel.launch(
        device, current_stream(device),
        (k_blocks + q_blocks) * call.batch, -(-head_dim // bucket(head_dim, "append")), 1,
        pointer(k), pointer(v), pointer(call.k_cache), pointer(call.v_cache), pointer(q), pointer(turned),
        pointer(q if rotary_cos is None else rotary_cos), pointer(q if rotary_sin is None else rotary_sin),
        *kernel.optional(call.cu_seqlens_q, call.cu_seqlens_k_new, lengths, block_table),
        *kernel.optional(call.cache_batch_idx, call.rotary_seqlens),
        *strides_of(k, vec), *strides_of(v, vec), *strides_of(call.k_cache, vec), *strides_of(call.v_cache, vec),
        *strides_of(q, vec), *strides_of(turned, vec), table_row,
        0 if block_table is None else block_table.stride(0), 0 if block_table is None else call.k_cache.shape[1],
        nheads, nheads_k, seqlen_q, length, added, capacity, head_dim // vec, half, places,
        k_blocks, q_blocks, flags,
    )  # fmt: skip
    return turned
