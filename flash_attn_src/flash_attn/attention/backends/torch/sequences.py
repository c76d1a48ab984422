"""Where each sequence's rows lie: in a batch, packed, or in the pages of a cache. Index values are checked here.

Reads index tensors on the host, so it synchronises with a GPU. Raises ValueError for an index out of range.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from flash_attn.call.arguments.diagnosis import INT32_MAX
from flash_attn.call.calls import AttentionCall


@dataclass(frozen=True)
class Sequence:
    """Rows q0..q1 of q; keys k0..k1 of k's rows, or of the pages that the block table names."""

    q0: int
    q1: int
    k0: int
    k1: int


def check_range(name: str, values: list[int], low: int, high: int) -> None:
    for index, value in enumerate(values):
        check_value(name, index, value, low, high)


def check_value(name: str, index: int, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value} at index {index}, wanted {low} to {high}")


def bounds(name: str, cu_seqlens: torch.Tensor, rows: int, longest: int) -> list[tuple[int, int]]:
    """Checked (start, stop) of every sequence."""
    ends = cu_seqlens.tolist()
    check_range(name, ends, 0, rows)
    pairs = list(pairwise(ends))
    for index, (start, stop) in enumerate(pairs):
        if stop < start:
            raise ValueError(f"{name}: got {stop} after {start} at index {index + 1}, wanted no decrease")
        if stop - start > longest:
            maximum = name.replace("cu_seqlens", "max_seqlen")
            raise ValueError(
                f"{maximum}: got {longest}, wanted at least {stop - start}, the longest sequence in {name}"
            )
    return pairs


def locate(call: AttentionCall) -> list[Sequence]:
    """The rows of each sequence, every index checked."""
    q, k, cu_seqlens_q, cu_seqlens_k = call.q, call.k, call.cu_seqlens_q, call.cu_seqlens_k
    block_table, seqused_k, leftpad_k = call.block_table, call.seqused_k, call.leftpad_k
    max_seqlen_q, max_seqlen_k = call.max_seqlen_q, call.max_seqlen_k
    if cu_seqlens_q is None:
        queries = [(i * q.shape[1], (i + 1) * q.shape[1]) for i in range(q.shape[0])]
    else:
        queries = bounds("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    if block_table is not None:
        capacity = block_table.shape[1] * k.shape[1]
        keys = [(0, capacity)] * len(queries)
        if cu_seqlens_k is not None and seqused_k is not None:  # seqused_k has the lengths, the pages say where
            check_range("cu_seqlens_k", cu_seqlens_k.tolist(), 0, INT32_MAX)
        elif cu_seqlens_k is not None:
            spans = bounds("cu_seqlens_k", cu_seqlens_k, capacity * len(queries), max_seqlen_k)
            keys = [(0, stop - start) for start, stop in spans]
            check_range("length of a paged sequence", [stop for _, stop in keys], 0, capacity)
    elif cu_seqlens_k is None:
        keys = [(i * k.shape[1], (i + 1) * k.shape[1]) for i in range(k.shape[0])]
    elif seqused_k is not None:  # the starts of the sequences, in any order: one may overlap another
        starts = cu_seqlens_k.tolist()
        check_range("cu_seqlens_k", starts, 0, k.shape[0])
        keys = [(start, k.shape[0]) for start in starts[:-1]]
    else:
        keys = bounds("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    if seqused_k is not None:
        used = seqused_k.tolist()
        for index, ((start, stop), length) in enumerate(zip(keys, used, strict=True)):
            check_value("seqused_k", index, length, 0, stop - start)
        keys = [(start, start + length) for (start, _), length in zip(keys, used, strict=True)]
    if leftpad_k is not None:
        pads = leftpad_k.tolist()
        for index, ((start, stop), pad) in enumerate(zip(keys, pads, strict=True)):
            check_value("leftpad_k", index, pad, 0, stop - start)
        keys = [(start + pad, stop) for (start, stop), pad in zip(keys, pads, strict=True)]
    return [Sequence(*rows, *span) for rows, span in zip(queries, keys, strict=True)]


def pages_of(cache: torch.Tensor, block_table: torch.Tensor, index: int, stop: int) -> torch.Tensor:
    """Numbers of the pages that hold the first `stop` keys of a sequence."""
    pages = block_table[index, : -(-stop // cache.shape[1])]
    for column, page in enumerate(pages.tolist()):
        if not 0 <= page < cache.shape[0]:
            raise ValueError(f"block_table: got {page} at index ({index}, {column}), wanted 0 to {cache.shape[0] - 1}")
    return pages.long()


def keys_of(x: torch.Tensor, rows: Sequence, block_table: torch.Tensor | None, index: int) -> torch.Tensor:
    """(seqlen_k, heads_k, head_dim) of one sequence; gathered from its pages if there are any."""
    if block_table is None:
        return x[rows.k0 : rows.k1]
    return x[pages_of(x, block_table, index, rows.k1)].flatten(0, 1)[rows.k0 : rows.k1]


def append(
    cache: torch.Tensor,
    new: torch.Tensor,
    start: int,
    line: int,
    block_table: torch.Tensor | None,
    index: int,
) -> None:
    """Writes new (s, heads_k, head_dim) at `start` of one sequence's cache."""
    stop = start + new.shape[0]
    if block_table is None:
        cache[line, start:stop] = new
        return
    places = torch.arange(start, stop, device=cache.device)
    pages = pages_of(cache, block_table, index, stop)[places // cache.shape[1]]
    cache[pages, places % cache.shape[1]] = new
