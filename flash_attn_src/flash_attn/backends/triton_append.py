"""New keys and values into a cache, with rotary embedding of them and of q, by a Triton kernel."""

from __future__ import annotations

import torch

from flash_attn.backends.triton_kernels import aligned, find_one, strides_of
from flash_attn.kernels.flags import HAS_ROTARY_SEQLENS, ROTARY_MOVES

# Columns of the head dim that one program takes, of `combine` too.
COLUMNS = 64


def append(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    length: int,
    lengths: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    block_table: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    cu_seqlens_k_new: torch.Tensor | None,
    rotary_seqlens: torch.Tensor | None,
    batch: int,
    capacity: int,
    added: int,
    flags: int,
    device: int,
    stream: int,
    vec: int,
) -> torch.Tensor:
    """Writes k and v into the caches; returns q, turned where there is rotary embedding."""
    head_dim = q.shape[-1]
    nheads, nheads_k = q.shape[-2], k_cache.shape[2]
    k, v = aligned(k, vec), aligned(v, vec)
    kernel = find_one("append", device, q.dtype, head_dim)
    turned, q_blocks, half, places, table_row = q, 0, 0, 0, 0
    if rotary_cos is not None and rotary_sin is not None:
        rotary_cos, rotary_sin = rotary_cos.contiguous(), rotary_sin.contiguous()
        places, half = rotary_cos.shape
        table_row = half
        wanted = capacity
        if lengths is None and rotary_seqlens is None:
            wanted = length + max(added, max_seqlen_q if flags & ROTARY_MOVES else 1)
        if places < wanted:
            raise ValueError(f"rotary_cos: got {places} places, wanted at least {wanted}")
        if rotary_seqlens is not None:
            flags |= HAS_ROTARY_SEQLENS
        turned = torch.empty_like(q)
        q_blocks = -(-max_seqlen_q * nheads // kernel.block_m)
    k_blocks = -(-added * nheads_k // kernel.block_m)
    pointer = kernel.pointer
    kernel.launch(
        device, stream, (k_blocks + q_blocks) * batch, -(-head_dim // COLUMNS), 1,
        pointer(k), pointer(v), pointer(k_cache), pointer(v_cache), pointer(q), pointer(turned),
        pointer(q if rotary_cos is None else rotary_cos), pointer(q if rotary_sin is None else rotary_sin),
        *kernel.optional(cu_seqlens_q, cu_seqlens_k_new, lengths, block_table),
        *kernel.optional(cache_batch_idx, rotary_seqlens),
        *strides_of(k, vec), *strides_of(v, vec), *strides_of(k_cache, vec), *strides_of(v_cache, vec),
        *strides_of(q, vec), *strides_of(turned, vec), table_row,
        0 if block_table is None else block_table.stride(0), 0 if block_table is None else k_cache.shape[1],
        nheads, nheads_k, max_seqlen_q, length, added, capacity, head_dim // vec, half, places,
        k_blocks, q_blocks, flags,
    )  # fmt: skip
    return turned
