"""How many programs a kernel of whole sequences has, and in which order they run."""

from __future__ import annotations

import torch

from flash_attn.calls import AttentionCall
from flash_attn.kernels.flags import PACKED_BLOCKS
from flash_attn.runtime import device
from flash_attn.runtime.device import Kernel

# Queries of all heads that a program of dk and dv needs before sharing them between programs is worth the sum.
_ROWS_WORTH_SPLITS = 4096


def is_even(call: AttentionCall) -> bool:
    """Whether every block of queries has the same work."""
    return (not call.options.causal or call.options.window_size[0] >= 0) and call.cu_seqlens_q is None


def grid_of(block: int, max_seqlen: int, batch: int, heads: int, rows: int) -> tuple[int, int, int]:
    """(blocks, planes, flag) of a grid of blocks * planes programs. As many blocks for each sequence and head as the
    longest sequence has; or, where far fewer hold all packed `rows`, these for each head: see `common.schedule`.

    A program that has to find its sequence takes a microsecond more. Measured on an H200 (2026-11-22): it is profitable
    with 0.6 of the blocks and not with 0.8; 2000 sequences of 16 rows beside one of 4096 take 0.14 to 0.26 times as
    long.
    """
    blocks = -(-max(max_seqlen, min(rows, 1)) // block)  # One at least, which tells rows outside of every sequence.
    packed = rows // block + batch
    if 3 * packed < 2 * blocks * batch:
        return packed, heads, PACKED_BLOCKS
    return blocks, heads * batch, 0


def chunk_of(planes: int, even: bool, kernel: Kernel) -> int:
    """How many planes `common.program_order` takes at once, at most CHUNK_MASK. even: every block of a plane has the
    same work.

    Measured on an H200 (2026-11-21): uneven blocks gain 4 to 8 % with 8 planes over 1, even ones lose as much in
    dk and dv to a colder cache; taking all planes loses again.
    """
    return min(planes, 1 if even and kernel.num_xcds == 1 else 8)


def splits_of(group: int, programs: int, rows: int, most: int, index: int) -> int:
    """How many programs of dk and dv share the query heads of a key head.

    Without sharing there are `programs`, for `rows` queries each. It is the least number that keeps the GPU busy, at
    most half the group and `most`.

    Measured on an H200 (2026-11-22): three programs for each multiprocessor, where adding up takes less than is won.
    With 8 query heads to one key head of 128, causal, the whole backward of 2048 tokens takes 0.39 times as long, of
    8192 0.52, of 16384 0.72; with 32 and 2048 0.21.
    """
    if programs == 0 or group * rows < _ROWS_WORTH_SPLITS:
        return 1
    wanted = 3 * device.of(index).compute_units
    possible = [splits for splits in range(1, min(group // 2, most) + 1) if group % splits == 0] or [1]
    return next((splits for splits in possible if programs * splits >= wanted), possible[-1])


def add_splits(partial: torch.Tensor, result: torch.Tensor) -> None:
    """Writes the sum of partial (..., splits, head_dim) over the splits, at least two, to result. Overwrites partial.

    The order of the additions is fixed. All but the last are in the type of partial.
    """
    count = partial.shape[-2]
    while count > 2:
        half = count // 2
        partial[..., :half, :] += partial[..., count - half : count, :]
        count -= half
    torch.add(partial[..., 0, :], partial[..., 1, :], out=result)
