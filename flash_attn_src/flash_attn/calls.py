"""One call over a cache of keys and values, as a value: what the interfaces make and the backends take."""

from __future__ import annotations

from typing import NamedTuple

import torch


class CacheCall(NamedTuple):
    """The arguments of flash_attn_with_kvcache, checked, and those that FlashAttention-3 adds.

    q                  (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q and
                       max_seqlen_q
    k, v               (batch, seqlen_new, heads_k, head_dim), or (total_new, heads_k, head_dim) with cu_seqlens_k_new
    window_left, _right   -1 where open
    out                written where given, else new
    rotary_seqlens     int32 (batch,): where rotary angles start instead of at cache_seqlens
    attention_chunk    > 0: a query sees keys of its own chunk of so many only
    num_splits, sm_margin, max_seqlen_k   speed only: parts of the keys (0: by shape), multiprocessors that are left
                       alone, the most keys of a sequence where the host knows and the cache has room for more
    descales           fp32 (batch, heads_k) of q, k and v: these are FP8 tensors, whose result is bf16 and which have
                       no rotary embedding
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    softmax_scale: float
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    cache_seqlens: int | torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    rotary_interleaved: bool = True
    alibi_slopes: torch.Tensor | None = None
    num_splits: int = 0
    out: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 0
    cu_seqlens_k_new: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None
    attention_chunk: int = 0
    sm_margin: int = 0
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    max_seqlen_k: int | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def seqlen_q(self) -> int:
        """Queries of the longest sequence."""
        return self.q.shape[1] if self.cu_seqlens_q is None else self.max_seqlen_q

    @property
    def capacity(self) -> int:
        """Keys that the cache has room for, of each sequence."""
        return self.k_cache.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def length(self) -> int:
        """The most keys that the cache holds of a sequence before k, as far as the host knows."""
        if isinstance(self.cache_seqlens, int):
            return self.cache_seqlens
        return self.capacity if self.max_seqlen_k is None else min(self.max_seqlen_k, self.capacity)

    @property
    def lengths(self) -> torch.Tensor | None:
        """What the cache holds of each sequence, where the device alone knows."""
        return None if isinstance(self.cache_seqlens, int) else self.cache_seqlens

    @property
    def added(self) -> int:
        """The most new keys that a sequence gets, as far as the host knows."""
        if self.k is None:
            return 0
        return self.k.shape[1 if self.cu_seqlens_k_new is None else 0]

    @property
    def moving(self) -> bool:
        """Whether rotary embedding turns query i by the angle of its own place, not by that of the first."""
        return self.causal or self.window_left >= 0 or self.window_right >= 0 or self.attention_chunk > 0
