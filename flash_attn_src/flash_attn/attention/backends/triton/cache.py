"""The Triton backend over a cache of keys and values: append, attend in splits, combine. No host synchronisation.

The kernels read values in device tensors, such as the length of each sequence. The host decides by what it knows
itself, the capacity of the cache.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flash_attn.attention.backends.split_kv import are_faster, is_few
from flash_attn.attention.backends.triton.append import append
from flash_attn.attention.backends.triton.attention import forward
from flash_attn.attention.backends.triton.decode import attend_split
from flash_attn.attention.backends.triton.inputs import VEC, aligned
from flash_attn.attention.backends.triton.kernels import find, forward_kind
from flash_attn.call.calls import AttentionCall, CacheCall, replace
from flash_attn.call.options import CACHE, CACHE_AS_WHOLE
from flash_attn.call.plans import planned_call
from flash_attn.core import device
from flash_attn.kernels.value_dims import LATENT_DIM, LATENT_VALUE_DIM, served_pair


def kvcache(call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """See `protocol.Backend.kvcache`. No length is read back from the GPU.

    Keys beyond the cache's capacity are dropped. A cache whose rows do not start on 16 bytes, or whose head_dim is
    no multiple of 8, is copied at every call. Raises KernelError where neither the wheel nor a JIT has the
    kernels, ValueError where pages or rotary tables do not fit.
    """
    return planned_call(_kvcache, call)


def _kvcache(call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    given_k, given_v = call.k_cache, call.v_cache
    CACHE.refuse(call, "leave it out")
    vec = VEC[call.k_cache.dtype]
    if call.qv is not None and (reason := _unsupported_latent(call)) is not None:
        raise NotImplementedError(reason)
    if (call.q.shape[-1] | call.v_cache.shape[-1]) % max(vec, 8):
        return _padded(call, max(vec, 8))
    q, k_cache, v_cache = aligned(call.q, vec), aligned(given_k, vec), aligned(given_v, vec)
    if q is not call.q or k_cache is not given_k or v_cache is not given_v:
        call = replace(call, q=q, k_cache=k_cache, v_cache=v_cache)
    if call.k is not None and call.v is not None:
        q = append(call, call.k, call.v)
        if q is not call.q:
            call = replace(call, q=q)
    attended = _attend_whole(call) if _keeps_whole(call) else attend_split(call)
    if call.k is not None:
        for cache, used in ((given_k, k_cache), (given_v, v_cache)):
            if cache is not used:
                cache.copy_(used)
    return attended


def _keeps_whole(call: CacheCall) -> bool:
    """Whether the forward kernel takes each sequence's keys as a whole."""
    if call.num_splits > 1 or CACHE_AS_WHOLE.unserved(call) is not None:
        return False
    heads, heads_k, index, head_dim = call.q.shape[-2], call.k_cache.shape[2], call.q.get_device(), call.q.shape[-1]
    head_dim_v = call.v_cache.shape[-1]
    is_served = served_pair(head_dim, head_dim_v) == (head_dim, head_dim_v)
    if is_few(call.seqlen_q, heads, heads_k) or not is_served:
        return False
    (kernel,) = find(("fwd",), index, call.q.dtype, head_dim, forward_kind(call))
    length = min(call.length + call.added, call.capacity)
    units = device.of(index).compute_units
    return not are_faster(
        call.batch, call.seqlen_q, length, heads, heads_k, max(head_dim, head_dim_v), kernel.block_m, units
    )


def _attend_whole(call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of many queries to the current content of the cache, without splits."""
    k_cache, v_cache, block_table, lengths = call.k_cache, call.v_cache, call.block_table, call.lengths
    capacity = call.capacity
    length = min(call.length + call.added, capacity)
    if call.cu_seqlens_k_new is not None:
        lengths = call.cu_seqlens_k_new.diff() + (call.length if lengths is None else lengths)
    elif lengths is not None:
        lengths = lengths + call.added
    if lengths is not None:
        lengths = lengths.clamp_(max=capacity)
    if block_table is None and call.cache_batch_idx is not None:
        block_table = call.cache_batch_idx[:, None]  # each line is a page
    if lengths is None and block_table is None:
        k_cache, v_cache = k_cache[:, :length], v_cache[:, :length]
    elif lengths is None:
        lengths = torch.full((call.batch,), length, dtype=torch.int32, device=call.q.device)
    result = forward(AttentionCall(
        q=call.q, k=k_cache, v=v_cache, options=call.options, cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=call.seqlen_q, max_seqlen_k=length, seqused_k=lengths, leftpad_k=call.cache_leftpad,
        block_table=block_table, out=call.out,
    ))  # fmt: skip
    return result.out, result.softmax_lse


def _unsupported_latent(call: CacheCall) -> str | None:
    """Why no kernel takes a call with qv, or None."""
    if call.q.element_size() == 1:
        return "qv: not in FP8, pass fp16 or bf16"
    head_dim, head_dim_v = call.q.shape[-1], call.v_cache.shape[-1]
    if head_dim > LATENT_DIM or head_dim_v > LATENT_VALUE_DIM:
        return (
            f"qv: got head dims {head_dim} of q and {head_dim_v} of v, wanted at most {LATENT_DIM} and "
            f"{LATENT_VALUE_DIM}"
        )
    return None


def _with_zeros(x: torch.Tensor, multiple: int) -> torch.Tensor:
    columns = -x.shape[-1] % multiple
    if x.element_size() > 1:
        return pad(x, (0, columns))
    return pad(x.view(torch.uint8), (0, columns)).view(x.dtype)


def _padded(call: CacheCall, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs `kvcache` on padded copies if no kernel takes the head_dim."""
    head_dim, head_dim_v = call.q.shape[-1], call.v_cache.shape[-1]
    q, k_cache, v_cache = (_with_zeros(x, multiple) for x in (call.q, call.k_cache, call.v_cache))
    k, v, qv = (None if x is None else _with_zeros(x, multiple) for x in (call.k, call.v, call.qv))
    result, lse = kvcache(replace(call, q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, qv=qv, out=None))
    if k is not None:
        call.k_cache.copy_(k_cache[..., :head_dim])
        call.v_cache.copy_(v_cache[..., :head_dim_v])
    result = result[..., :head_dim_v]
    return (result if call.out is None else call.out.copy_(result)), lse
