"""The Triton backend over a cache of keys and values: append, attend in parts, combine. No host synchronisation.

What only a device tensor knows, the length of each sequence, is read by the kernels; the host decides by what it
knows itself, the capacity of the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flash_attn.backends.triton_append import append
from flash_attn.backends.triton_attention import forward
from flash_attn.backends.triton_decode import Descales, attend_in_parts, units
from flash_attn.backends.triton_kernels import (
    VEC,
    aligned,
    current_stream,
    find,
    flags_of,
    score_kind,
)
from flash_attn.kernels.flags import (
    HAS_CACHE_BATCH_IDX,
    ROTARY_INTERLEAVED,
    ROTARY_MOVES,
)

# Rows of queries that share a key head, which `decode` takes at once, and `extend`.
_DECODE_ROWS = 16
_EXTEND_ROWS = 64
# Rows of queries that a multiprocessor works on at once: fewer take the same time.
_ROWS_PER_UNIT = 64


def kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    rotary_interleaved: bool,
    alibi_slopes: torch.Tensor | None,
    num_splits: int,
    *,
    out: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    attention_chunk: int = 0,
    sm_margin: int = 0,
    descales: Descales = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `backends.torch.kvcache`, but values inside of index tensors are not checked: no length is read back.

    Keys beyond the cache's capacity are dropped. A cache whose rows do not start on 16 bytes, or whose head_dim is
    no multiple of 8, is copied at every call. Raises KernelError where neither the wheel nor a JIT has the
    kernels, ValueError where pages or rotary tables do not fit.
    """
    dtype, device, head_dim = q.dtype, q.get_device(), q.shape[-1]
    vec = VEC[dtype]
    if head_dim % max(vec, 8):
        return _padded(
            q, k_cache, v_cache, k, v, out, max(vec, 8), rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
            block_table=block_table, softmax_scale=softmax_scale, causal=causal, window_left=window_left,
            window_right=window_right, softcap=softcap, rotary_interleaved=rotary_interleaved,
            alibi_slopes=alibi_slopes, num_splits=num_splits, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens, attention_chunk=attention_chunk,
            sm_margin=sm_margin, descales=descales,
        )  # fmt: skip
    q = aligned(q, vec)
    given = k_cache, v_cache
    k_cache, v_cache = aligned(k_cache, vec), aligned(v_cache, vec)
    if cu_seqlens_q is None:
        batch, max_seqlen_q = q.shape[:2]
    else:
        batch = cu_seqlens_q.shape[0] - 1
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    length, lengths = capacity, None
    if isinstance(cache_seqlens, int):
        length = cache_seqlens
    else:
        lengths = cache_seqlens

    added = 0
    if k is not None and v is not None:
        added = k.shape[1 if cu_seqlens_k_new is None else 0]
        flags = flags_of(cu_seqlens_q, cu_seqlens_k_new, lengths, None, None)
        if cache_batch_idx is not None:
            flags |= HAS_CACHE_BATCH_IDX
        if rotary_interleaved:
            flags |= ROTARY_INTERLEAVED
        if causal or window_left >= 0 or window_right >= 0 or attention_chunk > 0:
            flags |= ROTARY_MOVES
        q = append(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, length, lengths, cache_batch_idx, block_table,
            cu_seqlens_q, max_seqlen_q, cu_seqlens_k_new, rotary_seqlens,
            batch, capacity, added, flags, device, current_stream(device), vec,
        )  # fmt: skip

    parts = num_splits > 1 or attention_chunk > 0 or descales is not None
    if not parts and _many(max_seqlen_q, batch, q, k_cache, score_kind(softcap, alibi_slopes, 0.0, softmax_scale)):
        if cu_seqlens_k_new is not None:
            lengths = cu_seqlens_k_new.diff() + (length if lengths is None else lengths)
        elif lengths is not None:
            lengths = lengths + added
        length = min(length + added, capacity)
        if lengths is not None:
            lengths = lengths.clamp_(max=capacity)
        result, lse = _attend_whole(
            q, k_cache, v_cache, out, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes,
            cu_seqlens_q, max_seqlen_q, length, lengths, cache_batch_idx, cache_leftpad, block_table,
        )  # fmt: skip
    else:
        result, lse = attend_in_parts(
            q, k_cache, v_cache, out, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes,
            cu_seqlens_q, max_seqlen_q, length, lengths, cache_batch_idx, cache_leftpad, block_table,
            cu_seqlens_k_new, added, num_splits, attention_chunk, sm_margin, descales,
        )  # fmt: skip
    if k is not None:
        for cache, used in zip(given, (k_cache, v_cache), strict=True):
            if cache is not used:
                cache.copy_(used)
    return result, lse


def _many(max_seqlen_q: int, batch: int, q: torch.Tensor, k_cache: torch.Tensor, kind: str) -> bool:
    """Whether leaving each sequence's keys whole is faster than parts of them: a GPU's multiprocessors all have work,
    and the tiles of the query heads, which share no keys then, hold more queries than padding.

    Measured on an H200 (2026-11-22; 1 to 8 sequences of 4096 to 65536 keys, dims 64, 128, 256): a row of queries takes
    twice the time in parts, four times with dim 256.
    """
    nheads, nheads_k, device, head_dim = q.shape[-2], k_cache.shape[2], q.get_device(), q.shape[-1]
    shared = max_seqlen_q * (nheads // nheads_k)
    if shared <= _DECODE_ROWS:
        return False
    (kernel,) = find(("fwd",), device, q.dtype, head_dim, kind)
    whole = -(-max_seqlen_q // kernel.block_m) * kernel.block_m * nheads * batch
    parts = -(-shared // _EXTEND_ROWS) * _EXTEND_ROWS * nheads_k * batch
    return (2 if head_dim <= 128 else 4) * parts >= max(whole, _ROWS_PER_UNIT * units(device))


def _attend_whole(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    length: int,
    lengths: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of many queries to the first `length`, or each sequence's `lengths`, keys of the cache."""
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if block_table is None and cache_batch_idx is not None:
        block_table = cache_batch_idx[:, None]  # each line is a page
    if lengths is None and block_table is None:
        k_cache, v_cache = k_cache[:, :length], v_cache[:, :length]
    elif lengths is None:
        lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    result, lse, _, _ = forward(
        q, k_cache, v_cache, out, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, 0.0, False,
        None, cu_seqlens_q, None, max_seqlen_q, length, lengths, cache_leftpad, block_table,
    )  # fmt: skip
    return result, lse


def _with_zeros(x: torch.Tensor, columns: int) -> torch.Tensor:
    if x.element_size() > 1:
        return pad(x, (0, columns))
    return pad(x.view(torch.uint8), (0, columns)).view(x.dtype)


def _padded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    out: torch.Tensor | None,
    multiple: int,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcache` with a head_dim that is no multiple of what the kernels take, through padded copies."""
    head_dim = q.shape[-1]
    q, k_padded, v_padded = (_with_zeros(x, -head_dim % multiple) for x in (q, k_cache, v_cache))
    k, v = (None if x is None else _with_zeros(x, -head_dim % multiple) for x in (k, v))
    result, lse = kvcache(q, k_padded, v_padded, k, v, **options)
    if k is not None:
        k_cache.copy_(k_padded[..., :head_dim])
        v_cache.copy_(v_padded[..., :head_dim])
    result = result[..., :head_dim]
    return (result if out is None else out.copy_(result)), lse
