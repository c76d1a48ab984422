"""The gradients of attention by Triton kernels; see flash_attn.backends.triton."""

from __future__ import annotations

import torch

from flash_attn.backends.triton.bias import bias_gradient, bias_of
from flash_attn.backends.triton.kernels import (
    VEC,
    Strides,
    add_splits,
    aligned,
    chunk_of,
    find,
    find_one,
    flags_of,
    grid_of,
    head_numbers_of,
    is_even,
    refuse_unserved,
    rows,
    score_kind,
    sinks_of,
    splits_of,
    strides_of,
    window_of,
)
from flash_attn.backends.triton.sparse import lists_of
from flash_attn.backends.triton.value_dims import cut, padded_gradients
from flash_attn.calls import AttentionCall, GradientCall
from flash_attn.runtime import device

# Operations for v with the head dim of q and k, and for v with another head dim.
_BACKWARD = (("bwd-dq", "bwd-dkdv"), ("bwd-dq-v", "bwd-dkdv-v"))
_SPARSE = ("sparse-bwd-dq", "sparse-bwd-dkdv")


def backward_ops(call: AttentionCall) -> tuple[str, ...]:
    """The ops of a backward."""
    if call.options.block_mask is not None:
        return _SPARSE
    return _BACKWARD[call.v.shape[-1] != call.q.shape[-1]]


def backward(gradients: GradientCall) -> torch.Tensor:
    """See `protocol.Backend.backward`. Every sum here has a fixed order, so it is always deterministic."""
    call, options = gradients.forward, gradients.forward.options
    refuse_unserved(call)
    if call.v.shape[-1] != call.q.shape[-1] and (wide := padded_gradients(gradients)) is not None:
        delta = backward(wide)
        cut(wide, gradients)
        return delta
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    scale, softcap, dropout_p, rng_state = options.scale, options.softcap, options.dropout_p, options.rng_state
    if cu_seqlens_q is None:
        batch, seqlen_q, nheads, head_dim = call.q.shape
        seqlen_k, nheads_k = call.k.shape[1:3]
        total_q, total_k = batch * seqlen_q, batch * seqlen_k
        lse_b, lse_h = nheads * seqlen_q, seqlen_q
    else:
        batch, seqlen_q, seqlen_k = cu_seqlens_q.shape[0] - 1, call.max_seqlen_q, call.max_seqlen_k
        total_q, nheads, head_dim = call.q.shape
        total_k, nheads_k, _ = call.k.shape
        lse_b, lse_h = 0, total_q
    dtype, index = call.q.dtype, call.q.get_device()
    dq_kernel, dkdv_kernel = find(backward_ops(call), index, dtype, head_dim, score_kind(call))
    vec = VEC[dtype]
    q, q_strides = rows(call.q, vec)
    k, k_strides = rows(call.k, vec)
    v, v_strides = rows(call.v, vec)
    out, out_strides = rows(gradients.out, vec)
    dout, dout_strides = rows(gradients.dout, vec)
    softmax_lse = gradients.softmax_lse.contiguous()
    # Its kernel writes the rows of sequences alone.
    if options.attn_bias is not None:  # with room for `lost_by_rounding` behind it
        delta = softmax_lse.new_empty((2, *softmax_lse.shape))[0]
    else:
        delta = torch.empty_like(softmax_lse) if cu_seqlens_q is None else torch.zeros_like(softmax_lse)
    even = is_even(call)
    left, right = window_of(call)
    flags = flags_of(call)
    group = nheads // nheads_k
    head_numbers, head_stride = head_numbers_of(call)
    more: tuple[torch.Tensor, ...] = ()
    sinks: tuple[torch.Tensor | None, ...] = ()
    bias_strides: tuple[int, ...] = ()
    if options.attn_bias is not None:
        bias, bias_strides, bias_flag = bias_of(call)
        wide_sinks, sink_flags = sinks_of(options.s_aux, dtype)
        more, sinks, flags = (bias,), (wide_sinks,), flags | bias_flag | sink_flags

    norms = None
    if device.loses_range(index, dtype):
        norms = _row_norms(call, dout, dout_strides, v, v_strides)
    measured: tuple[torch.Tensor, ...] = () if norms is None else (norms,)
    if options.block_mask is not None:
        lists, bias_strides = lists_of(call, dq_kernel.block_m, dq_kernel.block_n)
        measured = (*measured, *lists)

    m_blocks, planes, packed = grid_of(dq_kernel.block_m, seqlen_q, batch, nheads, total_q)
    dq, dq_strides = rows(gradients.dq, vec)
    if m_blocks * planes == 0:
        dq.zero_()
    dq_kernel.launch(
        (m_blocks * planes, 1, 1),
        (
            q, k, v, out, dout, softmax_lse,  # inputs
            delta, dq,  # outputs
            cu_seqlens_q, cu_seqlens_k, None, None, head_numbers, rng_state,  # optional inputs
            *more, *sinks, *measured,
        ),
        (
            scale, softcap, dropout_p,  # options
            *q_strides, *k_strides, *v_strides, *out_strides, *dout_strides, *dq_strides,
            lse_b, lse_h, head_stride,  # strides
            nheads, group, seqlen_q, seqlen_k, head_dim // vec,  # shapes
            left, right,  # mask
            m_blocks, nheads * batch, chunk_of(planes, even, dq_kernel), packed | flags,  # grid
            *bias_strides,
        ),
    )  # fmt: skip
    if dq is not gradients.dq:
        gradients.dq.copy_(dq)

    n_blocks, planes, packed = grid_of(dkdv_kernel.block_n, seqlen_k, batch, nheads_k, total_k)
    # dk and dv of all splits, in fp32, take no more memory than dq would.
    most = nheads * total_q // max(2 * nheads_k * total_k, 1)
    splits = splits_of(group, n_blocks * planes, seqlen_q, most, index)
    planes *= splits
    if splits == 1:
        dk, dv = aligned(gradients.dk, vec), aligned(gradients.dv, vec)
    else:
        create = torch.empty if cu_seqlens_k is None else torch.zeros
        shapes = ((*x.shape[:-1], splits, x.shape[-1]) for x in (k, v))
        sums = [create(shape, dtype=torch.float32, device=q.device) for shape in shapes]
        dk, dv = (x.flatten(-3, -2) for x in sums)
    if n_blocks * planes == 0:
        dk.zero_()
        dv.zero_()
    if options.block_mask is not None:
        lists, bias_strides = lists_of(call, dkdv_kernel.block_m, dkdv_kernel.block_n, by_keys=True)
        measured = (*measured[: -len(lists)], *lists)
    dkdv_kernel.launch(
        (n_blocks * planes, 1, 1),
        (
            q, k, v, dout, softmax_lse, delta,  # inputs
            dk, dv,  # outputs
            cu_seqlens_q, cu_seqlens_k, None, None, head_numbers, rng_state, *more, *measured,  # optional inputs
        ),
        (
            scale, softcap, dropout_p,  # options
            *q_strides, *k_strides, *v_strides, *dout_strides, *strides_of(dk, vec), *strides_of(dv, vec),
            lse_b, lse_h, head_stride,  # strides
            nheads, group // splits, splits, seqlen_q, seqlen_k, total_k, head_dim // vec,  # shapes
            left, right,  # mask
            n_blocks, nheads_k * splits * batch, chunk_of(planes, even, dkdv_kernel), packed | flags,  # grid
            *bias_strides,
        ),
    )  # fmt: skip
    if gradients.dbias is not None:
        bias_gradient(gradients, delta, norms)
    if splits > 1:
        add_splits(sums[0], gradients.dk)
        add_splits(sums[1], gradients.dv)
    else:
        for gradient, computed in ((gradients.dk, dk), (gradients.dv, dv)):
            if gradient is not computed:
                gradient.copy_(computed)
    return delta


def _row_norms(
    call: AttentionCall, dout: torch.Tensor, dout_strides: Strides, v: torch.Tensor, v_strides: Strides
) -> torch.Tensor:
    """The largest squared norms of rows of dout and of v for each key head, (batch, nheads_k, 2)."""
    dtype, index, (nheads, nheads_k) = v.dtype, v.get_device(), (dout.shape[-2], v.shape[-2])
    norms = torch.empty((call.batch, nheads_k, 2), dtype=torch.float32, device=v.device)
    find_one("bwd-norms", index, dtype, v.shape[-1]).launch(
        (call.batch * nheads_k, 1, 1),
        (
            dout, v,  # inputs
            norms,  # output
            call.cu_seqlens_q, call.cu_seqlens_k,  # optional inputs
        ),
        (
            *dout_strides, *v_strides,  # strides
            nheads, nheads // nheads_k, call.longest_q, call.longest_k, v.shape[-1] // VEC[dtype],  # shapes
            flags_of(call),  # grid
        ),
    )  # fmt: skip
    return norms
