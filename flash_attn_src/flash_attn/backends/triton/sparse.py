"""Block-sparse attention by Triton kernels: the lists of the tiles that a program visits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_attn.backends.triton.inputs import window_of
from flash_attn.backends.triton.kernels import find_one
from flash_attn.calls import AttentionCall


class Lists(NamedTuple):
    """What a kernel of kind `blocks` takes last: pointers, and numbers.

    tensors: the lists, int32 (mask batch, mask heads, lists, longest + 1); their counts, int32 (mask batch, mask heads,
    lists, 2); the mask, bytes. numbers: strides of the mask, strides and length of the lists, and the block size.
    """

    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]


def lists_of(call: AttentionCall, block_m: int, block_n: int, *, by_keys: bool = False) -> Lists:
    """Launches the kernel that lists the tiles of a call with a block mask, by what the mask holds now.

    A list belongs to block_m queries, by_keys to block_n keys.
    """
    mask = call.options.block_mask
    assert mask is not None
    seen = mask.seen.contiguous()
    batch, heads, q_blocks, k_blocks = seen.shape
    rows, cols = -(-call.longest_q // block_m), -(-call.longest_k // block_n)
    lists, longest = (cols, rows) if by_keys else (rows, cols)
    tiles = torch.empty((batch, heads, lists, longest + 1), dtype=torch.int32, device=seen.device)
    counts = torch.empty((batch, heads, lists, 2), dtype=torch.int32, device=seen.device)
    # To the next entry and head, in planes of the mask; one plane serves them all.
    of_entry, of_head = heads * (batch > 1), int(heads > 1)
    strides = (of_entry * q_blocks * k_blocks, of_head * q_blocks * k_blocks, k_blocks)
    tensors, block_bytes = (tiles, counts), seen.view(torch.uint8)
    find_one("sparse-lists", call.q.get_device(), torch.float16, 64).launch(
        (batch * heads * lists, 1, 1),
        (*tensors, block_bytes),
        (
            *strides,
            heads, call.longest_q, call.longest_k, *window_of(call),  # shapes
            block_m, block_n, *mask.block_size, lists, longest + 1, int(by_keys),  # tiles
        ),
    )  # fmt: skip
    return Lists((*tensors, block_bytes), (*strides, of_entry * lists, of_head * lists, longest + 1, *mask.block_size))
