"""Joins the results of attention over parts of the keys: a weighted mean, by the log-sum-exp of each part."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import LN2, LOG2E

_RUNTIME_ARGUMENTS = (
    *(f"stride_{tensor}{axis}" for tensor in ("p", "r") for axis in "sbmh"),
    *(f"stride_{tensor}{axis}" for tensor in ("o", "l") for axis in "bmh"),
    "nheads", "seqlen_q", "head_dim", "num_splits",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def attn_combine(
    partial, partial_lse, out, lse,
    stride_ps, stride_pb, stride_pm, stride_ph, stride_rs, stride_rb, stride_rm, stride_rh,
    stride_ob, stride_om, stride_oh, stride_lb, stride_lm, stride_lh,
    nheads, seqlen_q, head_dim, num_splits,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_D columns of one row of out (batch, seqlen_q, nheads, head_dim).

    Grid: (batch * nheads * seqlen_q, head_dim / BLOCK_D). partial has a leading axis of num_splits, its last one
    is dense; partial_lse (r) and lse are without the last axis. Strides in elements. A part without keys has
    lse -inf and is not read; a row without keys gives 0, its lse +inf.
    """
    row = tl.program_id(0)
    query = row % seqlen_q
    row = row // seqlen_q
    head = (row % nheads).to(tl.int64)
    batch = (row // nheads).to(tl.int64)
    query = query.to(tl.int64)
    partial += batch * stride_pb + query * stride_pm + head * stride_ph
    partial_lse += batch * stride_rb + query * stride_rm + head * stride_rh

    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = offs_d < head_dim
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, num_splits, BLOCK_N):
        split = start + tl.arange(0, BLOCK_N)
        part = tl.load(partial_lse + split.to(tl.int64) * stride_rs, mask=split < num_splits, other=float("-inf"))
        # +inf stands for a row without keys in results of other calls. NaN is seen: it is to come out again.
        seen = (part != float("-inf")) & (part != float("inf"))
        part = tl.where(seen, part, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(part, 0))
        m_sub = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2((part - m_sub) * LOG2E)
        alpha = tl.exp2((m_i - m_sub) * LOG2E)
        values = tl.load(
            partial + (split.to(tl.int64)[:, None] * stride_ps + offs_d[None, :]),
            mask=seen[:, None] & inside[None, :],
            other=0.0,
        )
        acc = acc * alpha + tl.sum(values * weight[:, None], 0)
        l_i = l_i * alpha + tl.sum(weight, 0)
        m_i = m_new
    empty = l_i == 0.0
    acc = acc / tl.where(empty, 1.0, l_i)
    out += batch * stride_ob + query * stride_om + head * stride_oh
    tl.store(out + offs_d, acc.to(out.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        total = tl.where(empty, float("inf"), m_i + tl.log2(l_i) * LN2)
        tl.store(lse + batch * stride_lb + query * stride_lm + head * stride_lh, total)
