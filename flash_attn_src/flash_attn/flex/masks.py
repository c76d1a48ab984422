"""What the mask of a call hides: runs of queries, blocks, or single keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flash_attn.block_mask import BlockMask
from flash_attn.flex.runs import Run, groups, of_rows
from flash_attn.kernels.operation import SPARSE_BLOCK

_MOST_GROUPS = 4
# Scores that are looked at together.
_CHUNK = 1 << 26


@dataclass(frozen=True)
class Runs:
    """Each group of runs is a call. whole: the window of a mask that is one run, the same in each batch; else None."""

    groups: list[tuple[tuple[int, int], list[Run]]]
    whole: tuple[int, int] | None

    @property
    def is_aligned(self) -> bool:
        """Whether each run is aligned: see `Run.is_aligned`."""
        return all(run.is_aligned for _, runs in self.groups for run in runs)


@dataclass(frozen=True)
class Blocks:
    """Visible blocks, in which the causal mask may hide keys."""

    mask: BlockMask
    causal: bool


Mask = Runs | Blocks | None
"""What a mask is; None for one that only a bias of each score describes."""

Visible = Callable[[int, int], torch.Tensor]
"""(start, stop) -> which keys these queries see, bool (1 or batch, 1 or heads, stop - start, seqlen_k)."""


def chunks(seqlen_q: int, row: int, step: int) -> list[tuple[int, int]]:
    """Parts of the queries, multiples of step, that have a bounded number of scores; row: the scores of one query."""
    size = max(_CHUNK // row // step, 1) * step
    return [(start, min(start + size, seqlen_q)) for start in range(0, seqlen_q, size)]


def recognise(visible: Visible, sizes: tuple[int, int, int, int], block_size: tuple[int, int]) -> Mask:
    """What the mask is. Looks at every query and key once. Waits for the GPU.

    sizes: (1 or batch, 1 or heads, seqlen_q, seqlen_k). block_size: (queries, keys) of a block.
    """
    batch, heads, seqlen_q, seqlen_k = sizes
    is_whole_block = all(size % SPARSE_BLOCK == 0 for size in block_size)
    rows, blocks = [], []
    for start, stop in chunks(seqlen_q, batch * heads * seqlen_k, block_size[0]):
        seen = visible(start, stop).expand(batch, heads, stop - start, seqlen_k)
        rows.append(_rows(seen))
        if is_whole_block:
            blocks.append(_of_blocks(seen, start, block_size))
    if heads == 1:
        first, last, count = (torch.cat(part, dim=-1)[:, 0] for part in zip(*rows, strict=True))
        if torch.equal(last - first + 1, count):
            found = _runs(first.tolist(), last.tolist(), seqlen_k)
            if found is not None:
                return found
    if is_whole_block:
        some, every, every_causal, is_causal = (torch.cat(part, dim=-2) for part in zip(*blocks, strict=True))
        if torch.equal(some, every):
            return Blocks(BlockMask(some.contiguous(), block_size), causal=False)
        # A causal mask from the top left is flash_attn's where there are as many queries as keys.
        if (
            seqlen_q == seqlen_k
            and bool(is_causal.all())
            and torch.equal(some, every_causal & _reached(some, block_size))
        ):
            return Blocks(BlockMask(some.contiguous(), block_size), causal=True)
    return None


def _rows(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first and the last key that each query sees, and how many: (batch, heads, queries). None: 0, -1, 0."""
    count = seen.sum(-1)
    first = seen.byte().argmax(-1)
    last = seen.shape[-1] - 1 - seen.flip(-1).byte().argmax(-1)
    return first, torch.where(count > 0, last, -1), count


def _runs(first: list[list[int]], last: list[list[int]], seqlen_k: int) -> Runs | None:
    runs = [list(of_rows(batch, *rows)) for batch, rows in enumerate(zip(first, last, strict=True))]
    found = groups((run for of_batch in runs for run in of_batch), _MOST_GROUPS)
    if found is None:
        return None
    is_whole = len(found) == 1 and all(
        len(of_batch) == 1 and (of_batch[0].queries, of_batch[0].keys) == (len(first[0]), seqlen_k) for of_batch in runs
    )
    return Runs(found, found[0][0] if is_whole else None)


def _of_blocks(seen: torch.Tensor, start: int, block_size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Of each block: whether some key is seen, every key, every key up to the query, and none behind it."""
    queries, keys = seen.shape[-2:]
    row = torch.arange(start, start + queries, device=seen.device)[:, None]
    behind = torch.arange(keys, device=seen.device) > row
    return (
        _whole(seen, block_size, False).any(-1),
        _whole(seen, block_size, True).all(-1),
        _whole(seen | behind, block_size, True).all(-1),
        ~_whole(seen & behind, block_size, False).any(-1),
    )


def _whole(seen: torch.Tensor, block_size: tuple[int, int], fill: bool) -> torch.Tensor:
    """The elements of each block, (batch, heads, q_blocks, k_blocks, elements); fill: past the last query and key."""
    short = [-size % block for size, block in zip(seen.shape[-2:], block_size, strict=True)]
    seen = torch.nn.functional.pad(seen, (0, short[1], 0, short[0]), value=fill)
    parts = seen.unflatten(-1, (-1, block_size[1])).unflatten(-3, (-1, block_size[0]))
    return parts.transpose(-3, -2).flatten(-2)


def _reached(some: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """Which blocks hold a key that is not behind its query, (q_blocks, k_blocks)."""
    last_query = torch.arange(1, some.shape[-2] + 1, device=some.device)[:, None] * block_size[0] - 1
    return torch.arange(some.shape[-1], device=some.device) * block_size[1] <= last_query
