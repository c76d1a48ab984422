"""Rotary position embedding: pairs of a head's elements turned by the angle of their row's position."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import flags

HAS_CU_SEQLENS = tl.constexpr(flags.HAS_CU_SEQLENS_Q)
HAS_OFFSETS = tl.constexpr(flags.HAS_OFFSETS)

_RUNTIME_ARGUMENTS = (
    "seqlen", "nheads", "half", "places", "offset", "sign", "m_blocks", "flags",
    *(f"stride_{tensor}{axis}" for tensor in "xt" for axis in "bmh"),
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def rotary(
    x, turned, cosines, sines, cu_seqlens, offsets, sign,
    stride_xb, stride_xm, stride_xh, stride_tb, stride_tm, stride_th,
    seqlen, nheads, half, places, offset, m_blocks, flags,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """turned's first 2 * half elements of every head: (a cos - b sin', a sin' + b cos) with sin' = sign * sin and
    (a, b) elements (i, i + half) of x, or (2 i, 2 i + 1) if INTERLEAVED. turned may be x.

    One program: BLOCK_M rows of every head, so that the angles are read once. Grid: m_blocks * batch.
    cosines, sines: (places, half), dense; a row beyond them is copied. Strides and half come in units of UNIT elements.
    """
    pid = tl.program_id(0)
    m_block = pid % m_blocks
    batch = pid // m_blocks
    start = batch * 0
    if flags & HAS_CU_SEQLENS:
        start = tl.load(cu_seqlens + batch)
        seqlen = tl.load(cu_seqlens + batch + 1) - start
    first = m_block * BLOCK_M
    if first >= seqlen:
        return
    if flags & HAS_OFFSETS:
        offset = tl.load(offsets + batch)
    half *= UNIT
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D // 2)
    inside = (rows[:, None] < seqlen) & (cols[None, :] < half)
    place = rows + offset
    known = inside & (place >= 0)[:, None] & (place < places)[:, None]
    angle = place.to(tl.int64)[:, None] * half + cols[None, :]
    c = tl.load(cosines + angle, mask=known, other=1.0).to(tl.float32)
    s = tl.load(sines + angle, mask=known, other=0.0).to(tl.float32) * sign

    row64 = (start + rows).to(tl.int64)[:, None]
    x += batch.to(tl.int64) * stride_xb * UNIT + row64 * (stride_xm * UNIT)
    turned += batch.to(tl.int64) * stride_tb * UNIT + row64 * (stride_tm * UNIT)
    x_step = stride_xh.to(tl.int64) * UNIT
    t_step = stride_th.to(tl.int64) * UNIT
    for head in range(nheads):
        x_row = x + head * x_step
        t_row = turned + head * t_step
        if INTERLEAVED:
            both = tl.arange(0, BLOCK_D)[None, :]
            whole = (rows[:, None] < seqlen) & (both < 2 * half)
            pairs = tl.load(x_row + both, mask=whole, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(pairs, (BLOCK_M, BLOCK_D // 2, 2)))
            both_turned = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (BLOCK_M, BLOCK_D))
            tl.store(t_row + both, both_turned.to(turned.dtype.element_ty), mask=whole)
        else:
            a = tl.load(x_row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x_row + half + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(t_row + cols[None, :], (a * c - b * s).to(turned.dtype.element_ty), mask=inside)
            tl.store(t_row + half + cols[None, :], (a * s + b * c).to(turned.dtype.element_ty), mask=inside)
