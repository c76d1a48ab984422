"""Attention by Triton kernels; see flash_attn.attention.backends.triton."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.split_kv import as_cache_call, cache_call_of
from flash_attn.attention.backends.triton.bias import bias_of
from flash_attn.attention.backends.triton.decode import attend_split, takes_pages
from flash_attn.attention.backends.triton.grid import chunk_of, grid_of, is_even
from flash_attn.attention.backends.triton.inputs import VEC, Inputs, inputs_of, pages_of, rows, sinks_of
from flash_attn.attention.backends.triton.kernels import find, forward_kind, refuse_unserved
from flash_attn.attention.backends.triton.probabilities import probabilities_of
from flash_attn.attention.backends.triton.sparse import lists_of
from flash_attn.attention.backends.triton.value_dims import padded
from flash_attn.call.calls import AttentionCall, ForwardResult, new_out
from flash_attn.call.options import SPLIT_KV, draw_rng_state
from flash_attn.call.plans import planned_call
from flash_attn.core.arguments import Value
from flash_attn.core.device import Kernel
from flash_attn.core.protocol import launch

# Operations for v with the head dim of q and k, and for v with another head dim.
_FORWARD = (("fwd",), ("fwd-v",))
_PAGED = (("fwd-paged",), ("fwd-paged-v",))
_PAGED_BY_BLOCK = (("fwd-paged-whole",), ("fwd-paged-whole-v",))
_SPARSE = ("sparse-fwd",)


def forward_ops(call: AttentionCall, kind: str) -> tuple[str]:
    """The op of a forward. With pages, the faster op if no block of keys crosses a page."""
    q = call.q
    own = call.v.shape[-1] != q.shape[-1]
    if call.options.mask is not None:
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


def _rng_state_of(call: AttentionCall) -> torch.Tensor | None:
    """Where the random numbers of a call come from. They are drawn for a call with dropout that brings none."""
    options = call.options
    if options.dropout_p > 0.0 and options.rng_state is None:
        return draw_rng_state(call.q.device)
    return options.rng_state


def forward(call: AttentionCall) -> ForwardResult:
    """See `protocol.Backend.forward`. NotImplementedError for S_dmask of a paged cache."""
    return planned_call(_forward, call)


def _forward(call: AttentionCall) -> ForwardResult:
    refuse_unserved(call)
    if call.v.shape[-1] != call.q.shape[-1] and (wide := padded(call)) is not None:
        return _forward_padded(call, wide)
    q, kind = call.q, forward_kind(call)
    (kernel,) = find(forward_ops(call, kind), q.get_device(), q.dtype, q.shape[-1], kind)
    inputs = inputs_of(call)
    if takes_pages(call) and (cached := as_cache_call(kernel.block_m, inputs.call)) is not None:
        return ForwardResult(*attend_split(cached), None, call.options.rng_state)
    return _launch(inputs, kernel, kind)


def _forward_padded(call: AttentionCall, wide: AttentionCall) -> ForwardResult:
    """The forward of a call whose head dims no kernel serves, by the same call with wider tensors."""
    # The split kernels take any pair, so a paged cache is not copied.
    if call.block_table is not None and takes_pages(call) and SPLIT_KV.unserved(call) is None:
        return ForwardResult(*attend_split(cache_call_of(call)), None, call.options.rng_state)
    result = forward(wide)
    out = result.out[..., : call.v.shape[-1]]
    return result._replace(out=out if call.out is None else call.out.copy_(out))


def _add_extras(call: AttentionCall, kernel: Kernel, values: dict[str, Value]) -> int:
    """Adds what the kernels of some kinds take besides: pages, sinks, a bias, a mask. Returns their flags."""
    options = call.options
    values["sinks"], flags = sinks_of(options.s_aux, call.q.dtype)
    values |= pages_of(call)
    if options.attn_bias is not None:
        bias, bias_flag = bias_of(call)
        values |= bias
        flags |= bias_flag
    if options.mask is not None:
        lists, mask_flags = lists_of(call, kernel.block_m, kernel.block_n)
        values |= lists
        flags |= mask_flags
    return flags


def _launch(inputs: Inputs, kernel: Kernel, kind: str) -> ForwardResult:
    call, options = inputs.call, inputs.call.options
    q, heads = call.q, inputs.heads
    result = _new_out(q, call.v) if call.out is None else call.out
    out, out_strides = rows(result, VEC[q.dtype])
    lse = torch.empty(inputs.lse_shape, dtype=torch.float32, device=q.device)
    rng_state = _rng_state_of(call)
    m_blocks, planes, packed = grid_of(kernel.block_m, inputs.seqlen_q, inputs.batch, heads, inputs.total_q)
    if m_blocks * planes == 0:  # no program runs that could clear the rows outside of every sequence
        out.zero_()
        lse.fill_(float("inf"))
    grid, values = (m_blocks * planes, 1, 1), inputs.values
    extra_flags = _add_extras(call, kernel, values)
    stride_ob, stride_om, stride_oh = out_strides
    values |= {
        "out": out, "stride_ob": stride_ob, "stride_om": stride_om, "stride_oh": stride_oh, "lse": lse,
        "rng_state": rng_state, "m_blocks": m_blocks, "planes": heads * inputs.batch,
        "chunk": chunk_of(planes, is_even(call), kernel), "flags": packed | inputs.flags | extra_flags,
    }  # fmt: skip
    launch(kernel, grid, values)
    if call.out is not None and out is not call.out:
        out = call.out.copy_(out)
    probabilities = None
    if call.return_softmax and rng_state is not None and options.dropout_p > 0.0:
        probabilities = probabilities_of(inputs, kind, values)
    return ForwardResult(out, lse, probabilities, rng_state)
