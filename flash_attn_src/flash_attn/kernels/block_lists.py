"""The bytes of a block mask, from lists of blocks as FlexAttention has them, made on the device at each call."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import PARTIAL_BLOCK, RUNTIME_ARGUMENTS, WHOLE_BLOCK

# Indices that are compared together.
_STEP = tl.constexpr(16)


@triton.jit
def _is_listed(blocks, counts, indices, row, length):
    """Whether a row of lists names each of some blocks, int32 [BLOCK_N]. Indices behind the count mean nothing."""
    p_indices = indices + row * length
    count = tl.minimum(tl.load(counts + row), length)
    offs = tl.arange(0, _STEP)[None, :]  # [1, _STEP]
    b_listed = blocks[:, None] + offs < 0  # [BLOCK_N, _STEP]
    for i in tl.range(0, count, _STEP):
        b_index = tl.load(p_indices + i + offs, mask=i + offs < count, other=-1)  # [1, _STEP]
        b_listed = b_listed | (blocks[:, None] == b_index)
    return tl.max(b_listed.to(tl.int32), 1)


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def mark_blocks(
    seen, counts, indices, full_counts, full_indices,
    q_blocks, k_blocks, list_rows, list_length, full_length,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N bytes of a row of blocks. Grid: cdiv(k_blocks, BLOCK_N) * q_blocks * planes.

    seen: bytes (planes, q_blocks, k_blocks), see `flags.WHOLE_BLOCK`. counts: int32 (planes, list_rows), how many
    indices of a row of blocks count. indices: int32 (planes, list_rows, list_length), the partial blocks; an index of
    no block is skipped. full_counts, full_indices: the same for whole blocks, in lists of full_length indices, 0 for
    none. A block of both lists is whole.
    """
    pid = tl.program_id(0)
    columns = tl.cdiv(k_blocks, BLOCK_N)
    blocks = pid % columns * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    outer = pid // columns
    row64 = (outer // q_blocks * list_rows + outer % q_blocks).to(tl.int64)
    b_seen = _is_listed(blocks, counts, indices, row64, list_length) * PARTIAL_BLOCK  # [BLOCK_N]
    for _ in tl.range(0, tl.minimum(full_length, 1)):  # one turn, or none
        b_full = _is_listed(blocks, full_counts, full_indices, row64, full_length)
        b_seen = tl.where(b_full != 0, WHOLE_BLOCK, b_seen)
    p_seen = seen + outer.to(tl.int64) * k_blocks
    tl.store(p_seen + blocks, b_seen.to(tl.uint8), mask=blocks < k_blocks)
