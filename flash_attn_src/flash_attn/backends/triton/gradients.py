"""The gradients of attention by Triton kernels; see flash_attn.backends.triton."""

from __future__ import annotations

import torch

from flash_attn.backends.triton.bias import bias_gradient, bias_of
from flash_attn.backends.triton.grid import add_splits, chunk_of, grid_of, is_even, splits_of
from flash_attn.backends.triton.inputs import VEC, Strides, aligned, flags_of, inputs_of, rows, sinks_of, strides_of
from flash_attn.backends.triton.kernels import find, find_one, refuse_unserved, score_kind
from flash_attn.backends.triton.sparse import lists_of
from flash_attn.backends.triton.value_dims import cut, padded_gradients
from flash_attn.calls import AttentionCall, GradientCall
from flash_attn.runtime import device

# Operations for v with the head dim of q and k, and for v with another head dim.
_BACKWARD = (("bwd-dq", "bwd-dkdv"), ("bwd-dq-v", "bwd-dkdv-v"))
_SPARSE = ("sparse-bwd-dq", "sparse-bwd-dkdv")


def backward_ops(call: AttentionCall) -> tuple[str, ...]:
    """The ops of a backward."""
    if call.options.mask is not None:
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
    inputs = inputs_of(call)
    call, batch, seqlen_q, total_q = inputs.call, inputs.batch, inputs.seqlen_q, inputs.total_q
    q, k, v, rng_state = call.q, call.k, call.v, options.rng_state
    nheads, group, _, seqlen_k, units = inputs.shapes
    nheads_k, packed_rows = k.shape[-2], call.cu_seqlens_q is not None
    total_k = k.shape[0] if packed_rows else batch * seqlen_k
    lse_strides = inputs.lse_strides
    dtype, index = q.dtype, q.get_device()
    dq_kernel, dkdv_kernel = find(backward_ops(call), index, dtype, q.shape[-1], score_kind(call))
    vec = VEC[dtype]
    strides = inputs.strides
    out, out_strides = rows(gradients.out, vec)
    dout, dout_strides = rows(gradients.dout, vec)
    softmax_lse = gradients.softmax_lse.contiguous()
    # Its kernel writes the rows of sequences alone.
    if options.attn_bias is not None:  # with room for `lost_by_rounding` behind it
        delta = softmax_lse.new_empty((2, *softmax_lse.shape))[0]
    else:
        delta = torch.zeros_like(softmax_lse) if packed_rows else torch.empty_like(softmax_lse)
    even, flags = is_even(call), inputs.flags
    more: tuple[torch.Tensor, ...] = ()
    sinks: tuple[torch.Tensor | None, ...] = ()
    bias_strides: tuple[int, ...] = ()
    if options.attn_bias is not None:
        bias, bias_strides, bias_flag = bias_of(call)
        wide_sinks, sink_flags = sinks_of(options.s_aux, dtype)
        more, sinks, flags = (bias,), (wide_sinks,), flags | bias_flag | sink_flags

    norms = None
    if device.loses_range(index, dtype):
        norms = _row_norms(call, dout, dout_strides, v, strides[6:])
    measured: tuple[torch.Tensor, ...] = () if norms is None else (norms,)
    lists: tuple[torch.Tensor | None, ...] = ()
    if options.mask is not None:
        lists, bias_strides, mask_flags = lists_of(call, dq_kernel.block_m, dq_kernel.block_n)
        flags |= mask_flags

    m_blocks, planes, packed = grid_of(dq_kernel.block_m, seqlen_q, batch, nheads, total_q)
    dq, dq_strides = rows(gradients.dq, vec)
    if m_blocks * planes == 0:
        dq.zero_()
    dq_kernel.launch(
        (m_blocks * planes, 1, 1),
        (
            q, k, v, out, dout, softmax_lse,  # inputs
            delta, dq,  # outputs
            *inputs.optional, rng_state, *more, *sinks, *measured, *lists,  # optional inputs
        ),
        (
            *inputs.scores,
            *strides, *out_strides, *dout_strides, *dq_strides, *lse_strides, inputs.head_stride,  # strides
            *inputs.shapes,
            *inputs.window,
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
        create = torch.empty if call.cu_seqlens_k is None else torch.zeros
        shapes = ((*x.shape[:-1], splits, x.shape[-1]) for x in (k, v))
        sums = [create(shape, dtype=torch.float32, device=q.device) for shape in shapes]
        dk, dv = (x.flatten(-3, -2) for x in sums)
    if n_blocks * planes == 0:
        dk.zero_()
        dv.zero_()
    if options.mask is not None:
        lists, bias_strides, _ = lists_of(call, dkdv_kernel.block_m, dkdv_kernel.block_n, by_keys=True)
    dkdv_kernel.launch(
        (n_blocks * planes, 1, 1),
        (
            q, k, v, dout, softmax_lse, delta,  # inputs
            dk, dv,  # outputs
            *inputs.optional, rng_state, *more, *measured, *lists,  # optional inputs
        ),
        (
            *inputs.scores,
            *strides, *dout_strides, *strides_of(dk, vec), *strides_of(dv, vec),
            *lse_strides, inputs.head_stride,  # strides
            nheads, group // splits, splits, seqlen_q, seqlen_k, total_k, units,  # shapes
            *inputs.window,
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
    call: AttentionCall, dout: torch.Tensor, dout_strides: Strides, v: torch.Tensor, v_strides: tuple[int, ...]
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
