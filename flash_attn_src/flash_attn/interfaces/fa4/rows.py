"""The rows of queries and keys as FlashAttention-4 takes them: in batches or packed, and how many of them count."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_attn.call.arguments import as_int, check_index


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Where sequences start and how long they are; see flash_attn.cute.flash_attn_varlen_func."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None

    @property
    def none(self) -> bool:
        """Whether every sequence is as long as its tensor."""
        tensors = (self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k, self.page_table)
        return all(x is None for x in tensors)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of queries or of keys, packed: x (total, heads, head_dim), and where sequences start and end.

    batch      how many sequences there are; longest: the most rows of one, as far as the host knows
    dense      (batch, seqlen) where x was not packed
    """

    x: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int
    dense: tuple[int, int] | None

    @property
    def batch(self) -> int:
        return self.cu_seqlens.shape[0] - 1


def packed(name: str, x: torch.Tensor, cu_seqlens: torch.Tensor | None, longest: int | None) -> Rows:
    """The rows of a packed tensor, or of a batch. longest: length of the longest sequence; if it is None, the number of
    rows takes its place."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, wanted a tensor")
    if x.dim() != (4 if cu_seqlens is None else 3):
        axes = "(batch, seqlen, heads, head_dim)"
        if cu_seqlens is not None:
            axes = f"(total_{name}, heads, head_dim) with cu_seqlens_{name}"
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted {axes}")
    if cu_seqlens is not None:
        check_index(f"cu_seqlens_{name}", cu_seqlens, x, 1)
        most = x.shape[0] if longest is None else as_int(f"max_seqlen_{name}", longest)
        return Rows(x=x, cu_seqlens=cu_seqlens, longest=most, dense=None)
    batch, seqlen = x.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen
    return Rows(x=x.flatten(0, 1), cu_seqlens=starts, longest=seqlen, dense=(batch, seqlen))


def unpacked(
    rows: Rows, out: torch.Tensor, softmax_lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The results in the layout that the queries had."""
    if rows.dense is None:
        return out, softmax_lse
    if softmax_lse is not None:
        softmax_lse = softmax_lse.unflatten(1, rows.dense).transpose(0, 1)
    return out.unflatten(0, rows.dense), softmax_lse


def rows_of(qv: torch.Tensor, queries: Rows) -> torch.Tensor:
    """qv packed as the queries are."""
    return qv if queries.dense is None else qv.flatten(0, 1)


def fewer(used: torch.Tensor | None, starts: torch.Tensor, fewer: int) -> torch.Tensor | None:
    """How many rows of each sequence count, without its last `fewer`."""
    if fewer == 0:
        return used
    return ((starts.diff() if used is None else used) - fewer).clamp_min(0)


def rows_that_do_not_count(rows: Rows, used: torch.Tensor) -> torch.Tensor:
    """bool (total,): True in the rows of every sequence from its `used` on, and in rows of no sequence."""
    starts, ends = rows.cu_seqlens[:-1], rows.cu_seqlens[1:]
    stops = torch.minimum(starts + used, ends)
    places = torch.arange(rows.x.shape[0], dtype=starts.dtype, device=starts.device)
    begun, ended = (torch.searchsorted(edges, places, right=True) for edges in (starts, stops))
    return begun == ended
