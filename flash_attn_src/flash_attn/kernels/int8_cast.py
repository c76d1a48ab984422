"""Casts of queries and keys to INT8, with one scale for each block of rows of a head."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import row_stride
from flash_attn.kernels.tiles import load_tile, store_tile

_RUNTIME_ARGUMENTS = ("stride_xb", "stride_xm", "stride_xh", "nheads", "seqlen", "head_dim", "blocks", "smooth")


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def int8_cast(
    x, mean, y, scales, stride_xb, stride_xm, stride_xh, nheads, seqlen, head_dim, blocks, smooth,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of a head in INT8, with their scale.

    Grid: blocks * nheads * batch. x is (batch, seqlen, nheads, head_dim), its strides and head_dim are in units of VEC
    elements (16 bytes). y is dense (batch, nheads, seqlen, head_dim), scales is (batch, nheads, blocks): a row of x is
    a row of y times its scale. smooth: nonzero subtracts mean, fp32 (batch, nheads, head_dim), from each row first.
    """
    program = tl.program_id(0)
    block, plane = program % blocks, program // blocks
    batch, head = plane // nheads, plane % nheads
    columns = head_dim * VEC
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    p_x = x + (batch.to(tl.int64) * stride_xb * VEC + (head * VEC).to(tl.int64) * stride_xh)
    row = row_stride(stride_xm, VEC).to(tl.int64)
    b_x = load_tile(p_x, 0, offs_m, row, seqlen, columns, BLOCK_D).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    if smooth:
        b_mean = tl.load(mean + plane.to(tl.int64) * columns + offs_d, mask=offs_d < columns, other=0.0)  # [BLOCK_D]
        b_x = tl.where((offs_m < seqlen)[:, None], b_x - b_mean[None, :], 0.0)
    # 2 ** -100 keeps both factors finite for a block of zeros.
    largest = tl.maximum(tl.max(tl.max(tl.abs(b_x), 1), 0), 7.888609052210118e-31)
    b_x = b_x * (127.0 / largest)
    b_y = (b_x + tl.where(b_x < 0.0, -0.5, 0.5)).to(tl.int8)  # [BLOCK_M, BLOCK_D]
    tl.store(scales + plane.to(tl.int64) * blocks + block, largest / 127.0)
    store_tile(y + plane.to(tl.int64) * seqlen * columns, b_y, offs_m, columns.to(tl.int64), seqlen, columns, BLOCK_D)
