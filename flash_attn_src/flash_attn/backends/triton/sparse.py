"""Attention with a mask by Triton kernels: the lists of the tiles that a program visits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_attn.backends.triton.inputs import window_of
from flash_attn.backends.triton.kernels import find_one
from flash_attn.calls import AttentionCall
from flash_attn.kernels.flags import HAS_BLOCKS, HAS_IDS, HAS_RANGES


class Lists(NamedTuple):
    """What a kernel of kind `blocks` takes last: pointers, numbers, and flags.

    tensors: the lists, int32 (mask batch, mask heads, lists, longest + 1); their counts, int32 (mask batch, mask heads,
    lists, 2); the block mask, bytes; ranges of keys; ids of queries and of keys. numbers: strides of the block mask,
    strides and length of the lists, the block size, strides of ranges and ids.
    """

    tensors: tuple[torch.Tensor | None, ...]
    numbers: tuple[int, ...]
    flags: int


def lists_of(call: AttentionCall, block_m: int, block_n: int, *, by_keys: bool = False) -> Lists:
    """Launches the kernel that lists the tiles of a call with a mask, by what the mask holds now.

    A list belongs to block_m queries, by_keys to block_n keys.
    """
    mask = call.options.mask
    assert mask is not None
    batch, heads = mask.planes
    seen = None if mask.blocks is None else mask.blocks.seen.contiguous().view(torch.uint8)
    ranges, ids_q, ids_k = (None if x is None else x.contiguous() for x in (mask.ranges, mask.ids_q, mask.ids_k))
    rows, cols = -(-call.longest_q // block_m), -(-call.longest_k // block_n)
    lists, longest = (cols, rows) if by_keys else (rows, cols)
    tiles = torch.empty((batch, heads, lists, longest + 1), dtype=torch.int32, device=call.q.device)
    counts = torch.empty((batch, heads, lists, 2), dtype=torch.int32, device=call.q.device)
    tensors = (tiles, counts, seen, ranges, ids_q, ids_k)
    flags = (
        (HAS_BLOCKS if seen is not None else 0)
        | (HAS_RANGES if ranges is not None else 0)
        | (HAS_IDS if ids_q is not None else 0)
    )
    blocks = (*_strides(seen, 2), 0 if seen is None else seen.shape[-1])
    parts = (*mask.block_size, *_strides(ranges, 2), *_strides(ids_q, 1), *_strides(ids_k, 1))
    find_one("sparse-lists", call.q.get_device(), torch.float16, 64).launch(
        (batch * heads * lists, 1, 1),
        tensors,
        (
            *blocks,
            heads, call.longest_q, call.longest_k, *window_of(call),  # shapes
            block_m, block_n, lists, longest + 1, int(by_keys), flags,  # tiles
            *parts,
        ),
    )  # fmt: skip
    of_entry, of_head = heads * lists * (batch > 1), lists * (heads > 1)
    return Lists(tensors, (*blocks, of_entry, of_head, longest + 1, *parts), flags)


def _strides(x: torch.Tensor | None, axes: int) -> tuple[int, ...]:
    """Elements from one to the next, of the first axes of a contiguous tensor; 0 for an axis that all share."""
    if x is None:
        return (0,) * axes
    return tuple(x.stride(axis) if x.shape[axis] > 1 else 0 for axis in range(axes))
