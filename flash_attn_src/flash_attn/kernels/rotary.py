"""Rotary position embedding: rotates pairs of a head's elements by the angle of their row's position."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import HAS_CU_SEQLENS_Q, HAS_OFFSETS

_RUNTIME_ARGUMENTS = (
    "seqlen", "nheads", "half", "places", "offset", "sign", "m_blocks", "flags",
    *(f"stride_{tensor}{axis}" for tensor in "xt" for axis in "bmh"),
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def rotary(
    x, turned, cosines, sines, cu_seqlens, offsets, sign,
    stride_xb, stride_xm, stride_xh, stride_tb, stride_tm, stride_th,
    seqlen, nheads, half, places, offset, m_blocks, flags,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, USE_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The first 2 * half elements of every head of `turned`: (a cos - b sin', a sin' + b cos), sin' = sign * sin.

    (a, b) are the elements (i, i + half) of x, with USE_INTERLEAVED (2 i, 2 i + 1). turned may be x.
    One program: BLOCK_M rows of every head, so that the angles are loaded once. Grid: m_blocks * batch.
    cosines, sines: (places, half), dense. A row beyond them is copied. Strides and half are in units of UNIT elements.
    """
    pid = tl.program_id(0)
    m_block = pid % m_blocks
    batch = pid // m_blocks
    start = batch * 0
    if flags & HAS_CU_SEQLENS_Q:
        start = tl.load(cu_seqlens + batch)
        seqlen = tl.load(cu_seqlens + batch + 1) - start
    if m_block * BLOCK_M >= seqlen:
        return
    if flags & HAS_OFFSETS:
        offset = tl.load(offsets + batch)
    half *= UNIT
    x += batch.to(tl.int64) * stride_xb * UNIT
    turned += batch.to(tl.int64) * stride_tb * UNIT
    x_step = stride_xh.to(tl.int64) * UNIT
    t_step = stride_th.to(tl.int64) * UNIT
    # Once, unless the caller's longest length is too small, by which the host sizes the grid.
    for first in tl.range(m_block * BLOCK_M, seqlen, m_blocks * BLOCK_M):
        pos_m = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        offs_d = tl.arange(0, BLOCK_D // 2)  # [BLOCK_D // 2]
        inside = (pos_m[:, None] < seqlen) & (offs_d[None, :] < half)  # [BLOCK_M, BLOCK_D // 2]
        position = pos_m + offset  # [BLOCK_M]
        known = inside & (position >= 0)[:, None] & (position < places)[:, None]  # [BLOCK_M, BLOCK_D // 2]
        angle = position.to(tl.int64)[:, None] * half + offs_d[None, :]  # [BLOCK_M, BLOCK_D // 2]
        b_cos = tl.load(cosines + angle, mask=known, other=1.0).to(tl.float32)  # [BLOCK_M, BLOCK_D // 2]
        b_sin = tl.load(sines + angle, mask=known, other=0.0).to(tl.float32) * sign  # [BLOCK_M, BLOCK_D // 2]

        row64 = (start + pos_m).to(tl.int64)[:, None]  # [BLOCK_M, 1]
        p_rows = x + row64 * (stride_xm * UNIT)  # [BLOCK_M, 1]
        p_turned_rows = turned + row64 * (stride_tm * UNIT)  # [BLOCK_M, 1]
        for head in range(nheads):
            p_x = p_rows + head * x_step
            p_turned = p_turned_rows + head * t_step
            if USE_INTERLEAVED:
                offs_pairs = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
                whole = (pos_m[:, None] < seqlen) & (offs_pairs < 2 * half)
                b_pairs = tl.load(p_x + offs_pairs, mask=whole, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
                b_a, b_b = tl.split(tl.reshape(b_pairs, (BLOCK_M, BLOCK_D // 2, 2)))  # [BLOCK_M, BLOCK_D // 2] both
                b_turned = tl.reshape(
                    tl.join(b_a * b_cos - b_b * b_sin, b_a * b_sin + b_b * b_cos), (BLOCK_M, BLOCK_D)
                )  # [BLOCK_M, BLOCK_D]
                tl.store(p_turned + offs_pairs, b_turned.to(turned.dtype.element_ty), mask=whole)
            else:
                b_a = tl.load(p_x + offs_d[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D // 2]
                b_b = tl.load(p_x + half + offs_d[None, :], mask=inside, other=0.0).to(
                    tl.float32
                )  # [BLOCK_M, BLOCK_D // 2]
                tl.store(
                    p_turned + offs_d[None, :], (b_a * b_cos - b_b * b_sin).to(turned.dtype.element_ty), mask=inside
                )
                tl.store(
                    p_turned + half + offs_d[None, :],
                    (b_a * b_sin + b_b * b_cos).to(turned.dtype.element_ty),
                    mask=inside,
                )
