"""How many programs a kernel of whole sequences has, and in which order they run."""

from __future__ import annotations

from flash_attn.call.calls import AttentionCall
from flash_attn.core import device
from flash_attn.core.device import Kernel
from flash_attn.kernels import planning
from flash_attn.kernels.flags import PACKED_BLOCKS


def is_even(call: AttentionCall) -> bool:
    """Whether every block of queries has the same work."""
    return (not call.options.causal or call.options.window_size[0] >= 0) and call.cu_seqlens_q is None


def grid_of(block: int, max_seqlen: int, batch: int, heads: int, rows: int) -> tuple[int, int, int]:
    """(blocks, planes, flag) of a grid of blocks * planes programs. As many blocks for each sequence and head as the
    longest sequence has; or, where far fewer hold all packed `rows`, these for each head: see `common.schedule`.
    """
    blocks = -(-max(max_seqlen, min(rows, 1)) // block)  # One at least, which tells rows outside of every sequence.
    packed = rows // block + batch
    least, most = planning.GRID.packed_share
    if most * packed < least * blocks * batch:
        return packed, heads, PACKED_BLOCKS
    return blocks, heads * batch, 0


def chunk_of(planes: int, even: bool, kernel: Kernel) -> int:
    """How many planes `common.program_order` takes at once, at most CHUNK_MASK. even: every block of a plane has the
    same work.
    """
    return min(planes, 1 if even and kernel.num_xcds == 1 else planning.GRID.chunk)


def splits_of(group: int, programs: int, rows: int, most: int, index: int) -> int:
    """How many programs of dk and dv share the query heads of a key head.

    Without sharing there are `programs`, for `rows` queries each. It is the least number that keeps the GPU busy, at
    most half the group and `most`.
    """
    if programs == 0 or group * rows < planning.GRID.rows_worth_splits:
        return 1
    goal = planning.GRID.programs_of_unit * device.of(index).compute_units
    possible = [splits for splits in range(1, min(group // 2, most) + 1) if group % splits == 0] or [1]
    return next((splits for splits in possible if programs * splits >= goal), possible[-1])
