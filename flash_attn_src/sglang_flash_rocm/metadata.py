"""What one step of SGLang computes, as tensors that the kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool


@dataclass(frozen=True)
class Step:
    """The sequences of a step. Their new keys are counted in seq_lens and have pages.

    seq_lens        int32 (batch,): the keys of each sequence
    block_table     int32 (batch, pages) of the pool, or of its part for layers with full attention
    window_table    int32 (batch, pages) of the pool's part for layers with a sliding window; None without such a part
    window_slots    int64 (tokens,): where new keys go in that part; None without it
    cu_seqlens_q    int32 (batch + 1,), from 0; None where each sequence has one query
    max_query_len, max_seq_len   at least the queries and the keys of the longest sequence
    """

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    window_table: torch.Tensor | None
    window_slots: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    max_query_len: int
    max_seq_len: int


class StepBuilder:
    """Makes steps of SGLang's batches. Nothing waits for the GPU, and a graph can capture `decode`."""

    def __init__(self, req_to_token: torch.Tensor, pool: Any, page_size: int) -> None:
        """req_to_token: int32 (requests, context length), the slots of each request's keys."""
        self._req_to_token, self._page_size = req_to_token, page_size
        self._windows = pool if isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0 else None

    def decode(self, batch: Any) -> Step:
        """One query a sequence. The host does not know the lengths, so max_seq_len is the context length."""
        return self._step(batch, None, 1, self._req_to_token.shape[1])

    def extend(self, batch: Any) -> Step:
        """The lengths on the host are those that SGLang's scheduler made the batch of."""
        lengths = [int(length) for length in batch.extend_seq_lens_cpu]
        longest = max(new + int(old) for new, old in zip(lengths, batch.extend_prefix_lens_cpu, strict=True))
        starts = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return self._step(batch, starts, max(lengths), longest)

    def _step(self, batch: Any, cu_seqlens_q: torch.Tensor | None, max_query_len: int, max_seq_len: int) -> Step:
        size = batch.batch_size
        # The first slot of a page gives the page's number. Slots beyond a sequence's keys are stale and never read.
        firsts = self._req_to_token[:, : max_seq_len : self._page_size]
        firsts = firsts.index_select(0, batch.req_pool_indices[:size])
        window_table = window_slots = None
        if self._windows is not None:
            window_table = self._pages(self._windows.translate_loc_from_full_to_swa(firsts)).int()
            window_slots = self._windows.translate_loc_from_full_to_swa(batch.out_cache_loc)
        return Step(
            batch.seq_lens[:size].int(), self._pages(firsts), window_table, window_slots, cu_seqlens_q, max_query_len,
            max_seq_len,
        )  # fmt: skip

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self._page_size == 1 else slots // self._page_size
