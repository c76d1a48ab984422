"""The gradients of attention by Triton kernels; see flash_attn.attention.backends.triton."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.triton.bias import bias_gradient, bias_of
from flash_attn.attention.backends.triton.grid import chunk_of, grid_of, is_even, splits_of
from flash_attn.attention.backends.triton.inputs import (
    VEC,
    aligned,
    flags_of,
    inputs_of,
    named,
    rows,
    sinks_of,
    strides_of,
)
from flash_attn.attention.backends.triton.kernels import find, find_one, refuse_unserved, score_kind
from flash_attn.attention.backends.triton.sparse import lists_of
from flash_attn.attention.backends.triton.sums import add_up
from flash_attn.attention.backends.triton.value_dims import cut, padded_gradients
from flash_attn.call.calls import AttentionCall, GradientCall
from flash_attn.call.plans import planned_call
from flash_attn.core.arguments import Values
from flash_attn.core.protocol import launch

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
    return planned_call(_backward, gradients)


def _backward(gradients: GradientCall) -> torch.Tensor:
    call, options = gradients.forward, gradients.forward.options
    refuse_unserved(call)
    if call.v.shape[-1] != call.q.shape[-1] and (wide := padded_gradients(gradients)) is not None:
        delta = backward(wide)
        cut(wide, gradients)
        return delta
    inputs = inputs_of(call)
    call, batch, seqlen_q, total_q, nheads = inputs.call, inputs.batch, inputs.seqlen_q, inputs.total_q, inputs.heads
    q, k, v, nheads_k, seqlen_k = call.q, call.k, call.v, call.k.shape[-2], call.longest_k
    packed_rows = call.cu_seqlens_q is not None
    total_k = k.shape[0] if packed_rows else batch * seqlen_k
    dtype, index = q.dtype, q.get_device()
    dq_kernel, dkdv_kernel = find(backward_ops(call), index, dtype, q.shape[-1], score_kind(call))
    vec = VEC[dtype]
    out, out_strides = rows(gradients.out, vec)
    dout, dout_strides = rows(gradients.dout, vec)
    softmax_lse = gradients.softmax_lse.contiguous()
    # Its kernel writes the rows of sequences alone.
    if options.attn_bias is not None:  # with room for `lost_by_rounding` behind it
        delta = softmax_lse.new_empty((2, *softmax_lse.shape))[0]
    else:
        delta = torch.zeros_like(softmax_lse) if packed_rows else torch.empty_like(softmax_lse)
    even, flags = is_even(call), inputs.flags
    values = {
        **inputs.values, **named("out", out_strides), **named("dout", dout_strides),
        "out": out, "dout": dout, "lse": softmax_lse, "delta": delta,
    }  # fmt: skip
    if options.attn_bias is not None:
        bias, bias_flag = bias_of(call)
        sinks, sink_flags = sinks_of(options.s_aux, dtype)
        values |= bias | {"sinks": sinks}
        flags |= bias_flag | sink_flags
    if options.mask is not None:
        lists, mask_flags = lists_of(call, dq_kernel.block_m, dq_kernel.block_n)
        values |= lists
        flags |= mask_flags
    if "norms" in dq_kernel.arguments.pointers:
        values["norms"] = _row_norms(call, values)

    m_blocks, planes, packed = grid_of(dq_kernel.block_m, seqlen_q, batch, nheads, total_q)
    dq, dq_strides = rows(gradients.dq, vec)
    if m_blocks * planes == 0:
        dq.zero_()
    values |= {
        **named("dq", dq_strides), "dq": dq,
        "m_blocks": m_blocks, "planes": nheads * batch, "chunk": chunk_of(planes, even, dq_kernel),
        "flags": packed | flags,
    }  # fmt: skip
    launch(dq_kernel, (m_blocks * planes, 1, 1), values)
    if dq is not gradients.dq:
        gradients.dq.copy_(dq)

    n_blocks, planes, packed = grid_of(dkdv_kernel.block_n, seqlen_k, batch, nheads_k, total_k)
    group = nheads // nheads_k
    # dk and dv of all splits, in fp32, take no more memory than dq would.
    most = nheads * total_q // max(2 * nheads_k * total_k, 1)
    splits = splits_of(group, n_blocks * planes, seqlen_q, most, index)
    planes *= splits
    results = [aligned(x, vec) for x in (gradients.dk, gradients.dv)]
    sums = results
    if splits > 1:
        create = torch.zeros if packed_rows else torch.empty
        shapes = [(*x.shape[:-2], x.shape[-2] * splits, x.shape[-1]) for x in (k, v)]
        sums = [create(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    dk, dv = sums
    if n_blocks * planes == 0:
        dk.zero_()
        dv.zero_()
    if options.mask is not None:
        values |= lists_of(call, dkdv_kernel.block_m, dkdv_kernel.block_n, by_keys=True)[0]
    values |= {
        **named("dk", strides_of(dk, vec)), **named("dv", strides_of(dv, vec)), "dk": dk, "dv": dv,
        "group": group // splits, "parts": splits, "total_k": total_k, "n_blocks": n_blocks,
        "planes": nheads_k * splits * batch, "chunk": chunk_of(planes, even, dkdv_kernel), "flags": packed | flags,
    }  # fmt: skip
    launch(dkdv_kernel, (n_blocks * planes, 1, 1), values)
    for gradient, result, parts in zip((gradients.dk, gradients.dv), results, sums, strict=True):
        if splits > 1:
            columns = result.shape[-1]
            add_up(parts, result, splits, splits, (splits * columns, 0, columns))
        if gradient is not result:
            gradient.copy_(result)
    if gradients.dbias is not None:
        bias_gradient(gradients, values)
    return delta


def _row_norms(call: AttentionCall, values: Values) -> torch.Tensor:
    """The largest squared norms of rows of dout and of v for each key head, (batch, nheads_k, 2)."""
    v, nheads_k = call.v, call.v.shape[-2]
    norms = torch.empty((call.batch, nheads_k, 2), dtype=torch.float32, device=v.device)
    kernel = find_one("bwd-norms", v.get_device(), v.dtype, v.shape[-1])
    head_dim = v.shape[-1] // VEC[v.dtype]
    launch(
        kernel, (call.batch * nheads_k, 1, 1), {**values, "norms": norms, "head_dim": head_dim, "flags": flags_of(call)}
    )
    return norms
