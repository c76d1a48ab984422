"""Attention of few queries to many keys, as decoding without a cache of its own makes it, as a call over a cache.

The kernels of a cache share out the keys among programs and read those of a head once for all of its query heads,
where the forward kernel would leave most of a GPU idle.
"""

from __future__ import annotations

import torch

from flash_attn.cache_call import CacheCall
from flash_attn.runtime.launch import compute_units

# Rows of queries that share a key head, and keys from which on sharing them out pays. Measured on an H200 (2026-11-22;
# 1 to 64 sequences, heads 32:8 and 32:32): 1.1 to 1.8 times as fast at 1024 keys, 1.6 to 5.9 at 4096, up to 9.3 beyond.
_ROWS = 16
_KEYS = 1024


def are_few(q: torch.Tensor, k: torch.Tensor, batch: int, max_seqlen_q: int, max_seqlen_k: int) -> bool:
    """Whether queries (..., heads, head_dim) are so few and their keys (..., heads_k, head_dim) so many, and query
    heads share keys or the key heads of all sequences are too few for the GPU."""
    if max_seqlen_k < _KEYS:
        return False
    heads_k = k.shape[-2]
    group = q.shape[-2] // heads_k
    return max_seqlen_q * group <= _ROWS and (group > 1 or batch * heads_k < compute_units(q.get_device()))


def as_cache_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> CacheCall | None:
    """The forward of a backend, without dropout, as a call over a cache where `are_few` holds, else None. Arguments as
    in flash_attn.backends.torch.forward."""
    if cu_seqlens_q is None:
        batch, max_seqlen_q = q.shape[:2]
        max_seqlen_k = k.shape[1] if block_table is None else max_seqlen_k
    else:
        batch = cu_seqlens_q.shape[0] - 1
    if not are_few(q, k, batch, max_seqlen_q, max_seqlen_k):
        return None
    lengths, lines = seqused_k, None
    if cu_seqlens_k is not None:
        if lengths is None:
            lengths = cu_seqlens_k.diff()
        if block_table is None:  # every sequence is a line that starts at a row of its own
            lines = cu_seqlens_k[:-1]
            k, v = (x.as_strided((1, *x.shape), (x.stride(0), *x.stride())) for x in (k, v))
    return CacheCall(
        q, k, v, softmax_scale, None, None, None, None, lengths, lines, leftpad_k, block_table, causal, window_left,
        window_right, softcap, True, alibi_slopes, 0, out, cu_seqlens_q, max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
