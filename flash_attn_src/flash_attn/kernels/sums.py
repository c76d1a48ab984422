"""Sums behind a backward: of parts of dk and dv, of the gradients of a table of distances, and of a sink's weights."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import LOG2E

_RUNTIME_ARGUMENTS = (
    *(f"stride_{letters}" for letters in ("pm", "ps", "rs", "ob", "om", "oh", "lb", "lh")),
    *("batch", "nheads", "seqlen_q", "head_dim", "parts", "group", "rows"),
)


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def attn_sum(
    partial, out, stride_pm, stride_ps, stride_rs, stride_ob, stride_om, stride_oh,
    nheads, seqlen_q, head_dim, parts, group, rows,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M of the `rows` rows of out (batch, seqlen_q, nheads, head_dim), and BLOCK_D columns.

    A row is the sum of `parts` rows of partial, in fp32 and in order: of groups of so many rows, which are stride_rs
    apart, the groups stride_ps. The first ones of two rows of out are stride_pm apart. Strides are in elements. Grid:
    (blocks of rows, pieces of head_dim).
    """
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]  # [BLOCK_M, 1]
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    inside = (row < rows) & (offs_d < head_dim)  # [BLOCK_M, BLOCK_D]
    head = (row % nheads).to(tl.int64)
    query = (row // nheads % seqlen_q).to(tl.int64)
    batch = (row // nheads // seqlen_q).to(tl.int64)
    p_partial = partial + row.to(tl.int64) * stride_pm + offs_d
    b_sum = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)  # [BLOCK_M, BLOCK_D]
    for part in tl.range(0, parts):
        step = (part // group).to(tl.int64) * stride_ps + (part % group).to(tl.int64) * stride_rs
        b_sum += tl.load(p_partial + step, mask=inside, other=0.0)
    p_out = out + (batch * stride_ob + query * stride_om + head * stride_oh) + offs_d
    tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def attn_bwd_dsinks(lse, delta, sinks, dsinks, stride_lb, stride_lh, batch, seqlen_q, BLOCK_M: tl.constexpr):
    """One program: the gradient of a head's sink, which has the weight exp(sink - lse) in each row and no value.

    Grid: heads. lse, and delta as `backward_dq` leaves it: rows of so many sequences, dense. A row that no sequence has
    has lse +inf and delta 0.
    """
    head = tl.program_id(0)
    b_sink = tl.load(sinks + head).to(tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
    for entry in tl.range(0, batch):
        first = stride_lb.to(tl.int64) * entry + head.to(tl.int64) * stride_lh
        for row in tl.range(0, seqlen_q, BLOCK_M):
            offs_m = row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            b_lse = tl.load(lse + first + offs_m, mask=offs_m < seqlen_q, other=float("inf"))
            b_delta = tl.load(delta + first + offs_m, mask=offs_m < seqlen_q, other=0.0)
            b_sum -= tl.exp2((b_sink - b_lse) * LOG2E) * b_delta
    tl.store(dsinks + head, tl.sum(b_sum, 0).to(dsinks.dtype.element_ty))
