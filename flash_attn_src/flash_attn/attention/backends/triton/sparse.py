"""Attention with a mask by Triton kernels: the lists of the tiles that a program visits."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.triton.inputs import window_of
from flash_attn.attention.backends.triton.kernels import find_one
from flash_attn.call.calls import AttentionCall
from flash_attn.core.arguments import Value
from flash_attn.core.protocol import launch
from flash_attn.kernels.flags import HAS_BITS, HAS_BLOCKS, HAS_HIDDEN, HAS_IDS, HAS_RANGES


def lists_of(call: AttentionCall, block_m: int, block_n: int, *, by_keys: bool = False) -> tuple[dict[str, Value], int]:
    """Launches the kernel that lists the tiles of a call with a mask, by what the mask holds now. Returns what only
    kernels of kind `blocks` take, by name, and flags.

    A list belongs to block_m queries, by_keys to block_n keys. tiles: the lists, int32 (mask batch, mask heads, lists,
    longest + 1); tile_counts: their counts, int32 (mask batch, mask heads, lists, 2); block_mask: bytes.
    """
    mask = call.options.mask
    assert mask is not None
    batch, heads = mask.planes
    seen = None if mask.blocks is None else mask.blocks.seen.contiguous().view(torch.uint8)
    ranges, ids_q, ids_k, hidden = (
        None if x is None else x.contiguous()
        for x in (mask.ranges if mask.bits is None else mask.bits, mask.ids_q, mask.ids_k, mask.hidden)
    )
    rows, cols = -(-call.longest_q // block_m), -(-call.longest_k // block_n)
    lists, longest = (cols, rows) if by_keys else (rows, cols)
    left, right = window_of(call)
    flags = (
        (HAS_BLOCKS if seen is not None else 0)
        | (HAS_RANGES if mask.ranges is not None else 0)
        | (HAS_BITS if mask.bits is not None else 0)
        | (HAS_IDS if ids_q is not None else 0)
        | (HAS_HIDDEN if hidden is not None else 0)
    )
    (stride_sb, stride_sh), (ranges_b, ranges_h) = _strides(seen, 2), _strides(ranges, 2)
    hidden_b, hidden_h = _strides(hidden, 2)
    values: dict[str, Value] = {
        "tiles": torch.empty((batch, heads, lists, longest + 1), dtype=torch.int32, device=call.q.device),
        "tile_counts": torch.empty((batch, heads, lists, 2), dtype=torch.int32, device=call.q.device),
        "block_mask": seen, "key_ranges": ranges, "ids_q": ids_q, "ids_k": ids_k, "list_length": longest + 1,
        "stride_sb": stride_sb, "stride_sh": stride_sh, "stride_sm": 0 if seen is None else seen.shape[-1],
        "block_q": mask.block_size[0], "block_k": mask.block_size[1], "ranges_b": ranges_b, "ranges_h": ranges_h,
        "ids_qb": _strides(ids_q, 1)[0], "ids_kb": _strides(ids_k, 1)[0],
        "hidden_queries": hidden, "hidden_b": hidden_b, "hidden_h": hidden_h,
    }  # fmt: skip
    launch(
        find_one("sparse-lists", call.q.get_device(), torch.float16, 64),
        (batch * heads * lists, 1, 1),
        {
            **values, "nheads": heads, "seqlen_q": call.longest_q, "seqlen_k": call.longest_k,
            "window_left": left, "window_right": right, "block_m": block_m, "block_n": block_n,
            "lists": lists, "by_keys": int(by_keys), "flags": flags,
        },
    )  # fmt: skip
    return values | {"lists_b": heads * lists * (batch > 1), "lists_h": lists * (heads > 1)}, flags


def mark_blocks(
    lists: tuple[torch.Tensor, ...], full: tuple[torch.Tensor, ...] | None, q_blocks: int, k_blocks: int
) -> torch.Tensor:
    """The bytes of the blocks that lists name, uint8 (batch, heads, q_blocks, k_blocks): see `kernels.block_lists`.

    lists, full: (counts, indices), int32 (batch, heads, q_blocks or more) and (batch, heads, q_blocks or more, any).
    """
    counts, indices, *others = (x.to(torch.int32).contiguous() for x in (*lists, *(full or ())))
    seen = counts.new_empty((*counts.shape[:2], q_blocks, k_blocks), dtype=torch.uint8)
    full_counts, full_indices = others or (None, None)
    kernel = find_one("block-lists", counts.get_device(), torch.float16, 64)
    planes, columns = counts.shape[0] * counts.shape[1], -(-k_blocks // kernel.block_n)
    launch(
        kernel,
        (columns * q_blocks * planes, 1, 1),
        {
            "seen": seen, "counts": counts, "indices": indices, "full_counts": full_counts,
            "full_indices": full_indices, "q_blocks": q_blocks, "k_blocks": k_blocks, "list_rows": counts.shape[2],
            "list_length": indices.shape[-1], "full_length": 0 if full_indices is None else full_indices.shape[-1],
        },
    )  # fmt: skip
    return seen


def narrow_ids(ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """int32 ids that are equal where ids and keys are, int64 (batch, seqlen) both: see `kernels.narrow_ids`."""
    kernel = find_one("narrow-ids", ids.get_device(), torch.float16, 64)
    values: dict[str, Value] = {"ids": ids, "keys": keys, "seqlen_q": ids.shape[1], "seqlen_k": keys.shape[1]}
    narrow = torch.empty_like(ids, dtype=torch.int32)
    launch(kernel, (-(-ids.shape[1] // kernel.block_n) * ids.shape[0], 1, 1), {**values, "narrow": narrow})
    return narrow


def _strides(x: torch.Tensor | None, axes: int) -> tuple[int, ...]:
    """Elements from one to the next, of the first axes of a contiguous tensor; 0 for an axis that all share."""
    if x is None:
        return (0,) * axes
    return tuple(x.stride(axis) if x.shape[axis] > 1 else 0 for axis in range(axes))
