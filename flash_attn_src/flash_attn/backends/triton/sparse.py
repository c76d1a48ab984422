"""Block-sparse attention by Triton kernels: the lists of the tiles that a program visits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flash_attn.backends.triton.inputs import window_of
from flash_attn.block_mask import BlockMask
from flash_attn.calls import AttentionCall

# Tiles whose state is computed at once: a bound of the memory that lists take while they are made.
_TILES_AT_ONCE = 1 << 22


class Lists(NamedTuple):
    """What a kernel of kind `blocks` takes last: pointers, and numbers.

    tensors: the lists, int32 (mask batch, mask heads, lists, longest + 1); their counts, int32 (mask batch, mask heads,
    lists, 2); the mask, bytes. numbers: strides of the mask, strides and length of the lists, and the block size.
    """

    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]


class _Tiles(NamedTuple):
    """The tiles of a call as a kernel cuts it: shape and window decide which of them need a mask."""

    block_m: int
    block_n: int
    seqlen_q: int
    seqlen_k: int
    left: int
    right: int


_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask -> (its version, {(block size, ...): Lists})


def lists_of(call: AttentionCall, block_m: int, block_n: int, *, by_keys: bool = False) -> Lists:
    """The lists of tiles of a call with a block mask, kept as long as its mask lives and does not change.

    A list belongs to block_m queries, by_keys to block_n keys. Not kept: lists of a mask that was made in
    torch.inference_mode, because PyTorch does not count its changes; and lists in the memory of a captured graph, which
    has its content only when the graph is replayed.
    """
    mask = call.options.block_mask
    assert mask is not None
    tiles = _Tiles(block_m, block_n, call.longest_q, call.longest_k, *window_of(call))
    if mask.seen.is_inference():
        return _lists(mask, tiles, by_keys=by_keys)
    version, key = mask.seen._version, (mask.block_size, by_keys, tiles)
    of_version, kept = _kept.get(mask.seen, (version, {}))
    lists: Lists | None = kept.get(key) if of_version == version else None
    if lists is None:
        lists = _lists(mask, tiles, by_keys=by_keys)
        if not (mask.seen.is_cuda and torch.cuda.is_current_stream_capturing()):
            _kept[mask.seen] = (version, {**(kept if of_version == version else {}), key: lists})
    return lists


def _lists(mask: BlockMask, tiles: _Tiles, *, by_keys: bool) -> Lists:
    seen = mask.seen.contiguous()
    batch, heads, q_blocks, k_blocks = seen.shape
    rows, cols = -(-tiles.seqlen_q // tiles.block_m), -(-tiles.seqlen_k // tiles.block_n)
    lists, longest = (cols, rows) if by_keys else (rows, cols)
    order = torch.empty((batch * heads, lists, longest + 1), dtype=torch.int32, device=seen.device)
    counts = torch.empty((batch * heads, lists, 2), dtype=torch.int32, device=seen.device)
    planes = seen.view(batch * heads, q_blocks, k_blocks)
    if rows * cols == 0:
        counts.zero_()
    step = max(_TILES_AT_ONCE // max(rows * cols, 1), 1)
    for first in range(0, batch * heads if rows * cols else 0, step):
        here = slice(first, first + step)
        some, full = _states(planes[here], mask.block_size, tiles)
        if by_keys:  # a loop over queries loads them, and without a mask all of a tile must exist
            some, full = some.transpose(1, 2), full.transpose(1, 2)
            full[..., tiles.seqlen_q // tiles.block_m :] = False
        _fill(order[here], counts[here], full, some & ~full)
    of_entry, of_head = heads * (batch > 1), int(heads > 1)  # planes to the next one; one plane serves them all
    numbers = (
        of_entry * q_blocks * k_blocks, of_head * q_blocks * k_blocks, k_blocks,  # strides of the mask
        of_entry * lists, of_head * lists, longest + 1, *mask.block_size,
    )  # fmt: skip
    return Lists((order, counts, seen.view(torch.uint8)), numbers)


def _states(planes: torch.Tensor, block_size: tuple[int, int], tiles: _Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles have a visible key, and which have no hidden one; bool (planes, rows, cols). planes: masks (planes,
    q_blocks, k_blocks).
    """
    device = planes.device
    first_q = torch.arange(0, tiles.seqlen_q, tiles.block_m, device=device)
    last_q = (first_q + tiles.block_m).clamp_max(tiles.seqlen_q) - 1
    first_k = torch.arange(0, tiles.seqlen_k, tiles.block_n, device=device)
    last_k = first_k + tiles.block_n - 1
    some, every = planes, planes
    for axis, firsts, lasts, size in (
        (1, first_q, last_q, block_size[0]),
        (2, first_k, last_k.clamp_max(tiles.seqlen_k - 1), block_size[1]),
    ):
        # A tile lies in the blocks from its first row to its last row, which are two blocks or more only where a tile
        # is larger than a block.
        most = -(-max(tiles.block_m, tiles.block_n) // size) + 1
        blocks = [torch.minimum(firsts // size + further, lasts // size) for further in range(most)]
        some = torch.stack([some.index_select(axis, block) for block in blocks]).any(0)
        every = torch.stack([every.index_select(axis, block) for block in blocks]).all(0)
    shift = tiles.seqlen_k - tiles.seqlen_q
    low, high = first_q + shift - tiles.left, last_q + shift + tiles.right
    reached = (first_k <= high[:, None]) & (last_k >= low[:, None])
    whole = (last_k <= (first_q + shift + tiles.right)[:, None]) & (first_k >= (last_q + shift - tiles.left)[:, None])
    return some & reached, every & (whole & (last_k < tiles.seqlen_k))


def _fill(order: torch.Tensor, counts: torch.Tensor, full: torch.Tensor, partial: torch.Tensor) -> None:
    """Writes the lists of tiles, first the full ones, and their two counts."""
    at_full, at_partial = full.cumsum(-1, dtype=torch.int32), partial.cumsum(-1, dtype=torch.int32)
    full_count = at_full[..., -1:]
    torch.cat([full_count, full_count + at_partial[..., -1:]], -1, out=counts)
    last = order.shape[-1] - 1  # the place that no kernel uses
    place = torch.where(full, at_full - 1, torch.where(partial, full_count + at_partial - 1, last))
    numbers = torch.arange(last, dtype=torch.int32, device=order.device).expand(full.shape)
    order.scatter_(-1, place.long(), numbers)
