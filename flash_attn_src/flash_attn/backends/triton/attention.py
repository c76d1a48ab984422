"""Attention by Triton kernels; see flash_attn.backends.triton."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_attn import rng
from flash_attn.backends.split_kv import as_cache_call, cache_call_of
from flash_attn.backends.triton.bias import bias_of
from flash_attn.backends.triton.decode import MAX_PAGE_UNITS, attend_split
from flash_attn.backends.triton.kernels import (
    VEC,
    chunk_of,
    find,
    flags_of,
    forward_kind,
    grid_of,
    head_numbers_of,
    is_even,
    refuse_unserved,
    rows,
    sinks_of,
    table_stride_of,
    window_of,
)
from flash_attn.backends.triton.sparse import lists_of
from flash_attn.backends.triton.value_dims import padded
from flash_attn.calls import AttentionCall, ForwardResult, new_out, replace
from flash_attn.options import PROBABILITIES, SPLIT_KV, plan_key
from flash_attn.runtime import device
from flash_attn.runtime.device import Grid, Kernel

# Operations for v with the head dim of q and k, and for v with another head dim.
_FORWARD = (("fwd",), ("fwd-v",))
_PAGED = (("fwd-paged",), ("fwd-paged-v",))
_PAGED_BY_BLOCK = (("fwd-paged-whole",), ("fwd-paged-whole-v",))
_SPARSE = ("sparse-fwd",)
_PROBABILITIES = ("probabilities",)


def forward_ops(call: AttentionCall, kind: str) -> tuple[str]:
    """The op of a forward. With pages, the faster op if no block of keys crosses a page."""
    q = call.q
    own = call.v.shape[-1] != q.shape[-1]
    if call.options.block_mask is not None:
        return _SPARSE
    if call.block_table is None:
        return _FORWARD[own]
    if call.leftpad_k is None and q.dtype is not torch.float32:
        (kernel,) = find(_PAGED_BY_BLOCK[own], q.get_device(), q.dtype, q.shape[-1], kind)
        if call.k.shape[1] % kernel.block_n == 0:
            return _PAGED_BY_BLOCK[own]
    return _PAGED[own]


def _new_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q) if v.shape[-1] == q.shape[-1] else new_out(q, v)


class _Plan(NamedTuple):
    """A launch of the forward kernel without optional tensors."""

    kernel: Kernel
    grid: Grid
    absent: tuple[None, ...]
    numbers: tuple[int | float, ...]
    lse_shape: tuple[int, ...]


def _plan_key(call: AttentionCall) -> tuple[object, ...] | None:
    """All that the plan of a call depends on, but for the alignment of its tensors; None for a call with options that
    no plan has."""
    q, k, v = call.q, call.k, call.v
    if not (
        call.cu_seqlens_q is call.seqused_k is call.leftpad_k is call.block_table is call.out is None
        and call.cu_seqlens_k is None
        and call.options.dropout_p == 0.0
    ):
        return None
    options = plan_key(call.options)
    if options is None:
        return None
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.get_device(),
        *options,
    )  # fmt: skip


def forward(call: AttentionCall) -> ForwardResult:
    """See `protocol.Backend.forward`. NotImplementedError for S_dmask of a paged cache."""
    key = _plan_key(call)
    if key is None:
        return _forward(call)
    q, k, v = call.q, call.k, call.v
    plan: _Plan | None = device.plans().get(key)
    if plan is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        return _forward(call, key)
    out = _new_out(q, v)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device)
    plan.kernel.launch(plan.grid, (q, k, v, out, lse, *plan.absent), plan.numbers)
    return ForwardResult(out, lse, None, call.options.rng_state)


def _forward(call: AttentionCall, key: tuple[object, ...] | None = None) -> ForwardResult:
    """`forward` of any call. key: where the plan of the launch is kept."""
    refuse_unserved(call)
    q, k, v, out = call.q, call.k, call.v, call.out
    cu_seqlens_q, block_table = call.cu_seqlens_q, call.block_table
    head_numbers, head_stride = head_numbers_of(call)
    options = call.options
    scale, softcap, dropout_p = options.scale, options.softcap, options.dropout_p
    if call.return_softmax and dropout_p > 0.0:
        PROBABILITIES.refuse(call, "leave one of them out")
    if cu_seqlens_q is None:
        batch, seqlen_q, nheads, head_dim = q.shape
        total_q = batch * seqlen_q
    else:
        batch, seqlen_q = cu_seqlens_q.shape[0] - 1, call.max_seqlen_q
        total_q, nheads, head_dim = q.shape
    dtype, index, head_dim_v = q.dtype, q.get_device(), v.shape[-1]
    biased, sparse = options.attn_bias is not None, options.block_mask is not None
    splits = block_table is None or block_table.shape[1] * k.shape[1] < MAX_PAGE_UNITS
    if head_dim_v != head_dim and (wide := padded(call)) is not None:
        # The split kernels take any pair, so a paged cache is not copied.
        if block_table is not None and splits and SPLIT_KV.unserved(call) is None:
            return ForwardResult(*attend_split(cache_call_of(call)), None, options.rng_state)
        found = forward(wide)
        result = found.out[..., :head_dim_v]
        return found._replace(out=result if out is None else out.copy_(result))
    kind = forward_kind(call)
    (kernel,) = find(forward_ops(call, kind), index, dtype, head_dim, kind)
    vec = VEC[dtype]
    q, q_strides = rows(q, vec)
    k, k_strides = rows(k, vec)
    v, v_strides = rows(v, vec)
    given = call
    if q is not call.q or k is not call.k or v is not call.v:
        call = replace(call, q=q, k=k, v=v)
    if splits:
        cached = as_cache_call(kernel.block_m, call)
        if cached is not None:
            return ForwardResult(*attend_split(cached), None, options.rng_state)
    result, out_strides = rows(_new_out(q, v) if out is None else out, vec)
    if cu_seqlens_q is None:
        lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
        lse_b, lse_h = nheads * seqlen_q, seqlen_q
    else:
        lse = torch.empty((nheads, total_q), dtype=torch.float32, device=q.device)
        lse_b, lse_h = 0, total_q
    seqlen_k = call.longest_k
    rng_state = options.rng_state
    if dropout_p > 0.0 and rng_state is None:
        rng_state = rng.draw(q.device)

    left, right = window_of(call)
    m_blocks, planes, packed = grid_of(kernel.block_m, seqlen_q, batch, nheads, total_q)
    if m_blocks * planes == 0:  # no program runs that could clear the rows outside of every sequence
        result.zero_()
        lse.fill_(float("inf"))
    flags = packed | flags_of(call)
    more: tuple[torch.Tensor | None, ...] = (block_table,)
    if kernel.takes_sinks:
        sinks, sink_flags = sinks_of(options.s_aux, dtype)
        more, flags = (block_table, sinks), flags | sink_flags
    bias_strides: tuple[int, ...] = ()
    if biased:
        bias, bias_strides, bias_flag = bias_of(call)
        more, flags = (*more, bias), flags | bias_flag
    if sparse:
        lists, bias_strides = lists_of(call, kernel.block_m, kernel.block_n)
        more = (*more, *lists)
    group = nheads // k.shape[-2]
    table_stride, page_size = (0, 1) if block_table is None else (table_stride_of(block_table), k.shape[1])
    grid = (m_blocks * planes, 1, 1)
    optional = (cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.leftpad_k, head_numbers, rng_state, *more)
    numbers = (
        scale, softcap, dropout_p,  # options
        *q_strides, *k_strides, *v_strides, *out_strides,
        lse_b, lse_h, head_stride, table_stride, page_size,  # strides
        nheads, group, seqlen_q, seqlen_k, head_dim // vec,  # shapes
        left, right,  # mask
        m_blocks, nheads * batch, chunk_of(planes, is_even(call), kernel), flags,  # grid
        *bias_strides,
    )  # fmt: skip
    kernel.launch(grid, (q, k, v, result, lse, *optional), numbers)
    if key is not None and q is given.q and k is given.k and v is given.v and m_blocks * planes > 0:
        device.plans()[key] = _Plan(kernel, grid, (None,) * len(optional), numbers, tuple(lse.shape))
    if out is not None and result is not out:
        out.copy_(result)
        result = out
    if not call.return_softmax or dropout_p == 0.0:
        return ForwardResult(result, lse, None, rng_state)

    probabilities = torch.empty((batch, nheads, seqlen_q, seqlen_k), dtype=dtype, device=q.device)
    (kernel,) = find(_PROBABILITIES, index, dtype, head_dim, kind)
    m_blocks, n_blocks = -(-seqlen_q // kernel.block_m), -(-seqlen_k // kernel.block_n)
    kernel.launch(
        (m_blocks * n_blocks * nheads * batch, 1, 1),
        (
            q, k, lse,  # inputs
            probabilities,  # output
            cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.leftpad_k, head_numbers, rng_state,
        ),
        (
            scale, softcap, dropout_p,  # options
            *q_strides, *k_strides, lse_b, lse_h, head_stride,  # strides
            nheads, group, seqlen_q, seqlen_k, head_dim // vec,  # shapes
            left, right,  # mask
            m_blocks, n_blocks, flags,  # grid
        ),
    )  # fmt: skip
    return ForwardResult(result, lse, probabilities, rng_state)
