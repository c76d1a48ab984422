"""Combines the results of attention over splits of the keys: a mean with weights from the log-sum-exp of each split."""

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

    Grid: (batch * nheads * seqlen_q, head_dim / BLOCK_D). partial has a leading axis of num_splits, and its last axis
    is dense. partial_lse (r) and lse have no last axis. Strides are in elements. A split without keys has lse -inf and
    is not read. A row without keys gives 0 with lse +inf.
    """
    row = tl.program_id(0)
    query = row % seqlen_q
    row = row // seqlen_q
    head = (row % nheads).to(tl.int64)
    batch = (row // nheads).to(tl.int64)
    query = query.to(tl.int64)
    partial += batch * stride_pb + query * stride_pm + head * stride_ph
    partial_lse += batch * stride_rb + query * stride_rm + head * stride_rh

    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = offs_d < head_dim  # [BLOCK_D]
    b_m = float("-inf")
    b_l = 0.0
    b_acc = tl.zeros((BLOCK_D,), tl.float32)  # [BLOCK_D]
    for start in tl.range(0, num_splits, BLOCK_N):
        split = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        b_lse = tl.load(
            partial_lse + split.to(tl.int64) * stride_rs, mask=split < num_splits, other=float("-inf")
        )  # [BLOCK_N]
        # +inf means a row without keys in results of other calls. NaN counts as a split with keys, so it propagates.
        has_keys = (b_lse != float("-inf")) & (b_lse != float("inf"))  # [BLOCK_N]
        b_lse = tl.where(has_keys, b_lse, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_lse, 0))
        b_m_sub = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_weight = tl.exp2((b_lse - b_m_sub) * LOG2E)  # [BLOCK_N]
        b_alpha = tl.exp2((b_m - b_m_sub) * LOG2E)
        b_values = tl.load(  # [BLOCK_N, BLOCK_D]
            partial + (split.to(tl.int64)[:, None] * stride_ps + offs_d[None, :]),
            mask=has_keys[:, None] & inside[None, :],
            other=0.0,
        )
        b_acc = b_acc * b_alpha + tl.sum(b_values * b_weight[:, None], 0)
        b_l = b_l * b_alpha + tl.sum(b_weight, 0)
        b_m = b_m_new
    b_empty = b_l == 0.0
    b_acc = b_acc / tl.where(b_empty, 1.0, b_l)
    out += batch * stride_ob + query * stride_om + head * stride_oh
    tl.store(out + offs_d, b_acc.to(out.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        total = tl.where(b_empty, float("inf"), b_m + tl.log2(b_l) * LN2)
        tl.store(lse + batch * stride_lb + query * stride_lm + head * stride_lh, total)
