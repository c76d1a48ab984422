"""New keys and values into a cache, with rotary embedding of them and of q, by a Triton kernel."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.triton.inputs import VEC, named, rows, strides_of, table_stride_of
from flash_attn.attention.backends.triton.kernels import find_one
from flash_attn.call.arguments import check_tables
from flash_attn.call.calls import CacheCall
from flash_attn.core.arguments import Value
from flash_attn.core.protocol import launch
from flash_attn.kernels import flags as bits
from flash_attn.kernels.variants import bucket


def append(call: CacheCall, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Writes k and v into the caches of a call, whose rows are aligned to 16 bytes.

    Returns its q, rotated if the call has rotary embedding.
    """
    check_tables(call)
    q, head_dim, head_dim_v = call.q, call.q.shape[-1], v.shape[-1]
    width = max(head_dim, head_dim_v)
    nheads, nheads_k = q.shape[-2], call.k_cache.shape[2]
    added, seqlen_q, lengths = call.added, call.seqlen_q, call.lengths
    rotary_cos, rotary_sin, block_table = call.rotary_cos, call.rotary_sin, call.block_table
    vec = VEC[q.dtype]
    k, k_strides = rows(k, vec)
    v, v_strides = rows(v, vec)
    flags = (
        (bits.HAS_CU_SEQLENS_Q if call.cu_seqlens_q is not None else 0)
        | (bits.HAS_CU_SEQLENS_K if call.cu_seqlens_k_new is not None else 0)
        | (bits.HAS_SEQUSED_K if lengths is not None else 0)
        | (bits.HAS_CACHE_BATCH_IDX if call.cache_batch_idx is not None else 0)
        | (bits.ROTARY_INTERLEAVED if call.rotary_interleaved else 0)
        | (bits.ROTARY_MOVES if call.rotates_each_query else 0)
    )
    kernel = find_one("append", q.get_device(), q.dtype, head_dim)
    turned, q_blocks, half, places, table_row = q, 0, 0, 0, 0
    if rotary_cos is not None and rotary_sin is not None:
        rotary_cos, rotary_sin = rotary_cos.contiguous(), rotary_sin.contiguous()
        places, half = rotary_cos.shape
        table_row = half
        if call.rotary_seqlens is not None:
            flags |= bits.HAS_ROTARY_SEQLENS
        turned = torch.empty_like(q)
        if call.cu_seqlens_q is not None:  # the kernel takes no rows beyond max_seqlen_q
            turned.fill_(float("nan"))
        q_blocks = -(-seqlen_q * nheads // kernel.block_m)
    k_blocks = -(-added * nheads_k // kernel.block_m)
    pages: dict[str, Value] = {"block_table": None, "stride_tb": 0, "page_size": 0}
    if block_table is not None:
        stride = table_stride_of(block_table)
        pages = {"block_table": block_table, "stride_tb": stride, "page_size": call.k_cache.shape[1]}
    launch(
        kernel,
        ((k_blocks + q_blocks) * call.batch, -(-width // bucket(width, "append")), 1),
        {
            **named("k_new", k_strides), **named("v_new", v_strides),
            **named("k", strides_of(call.k_cache, vec)), **named("v", strides_of(call.v_cache, vec)),
            **named("q", strides_of(q, vec)), **named("q_turned", strides_of(turned, vec)), **pages,
            "k_new": k, "v_new": v, "k": call.k_cache, "v": call.v_cache, "q": q, "q_turned": turned,
            "cos": q if rotary_cos is None else rotary_cos, "sin": q if rotary_sin is None else rotary_sin,
            "cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k_new, "seqused_k": lengths,
            "cache_batch_idx": call.cache_batch_idx, "rotary_seqlens": call.rotary_seqlens, "stride_cm": table_row,
            "nheads": nheads, "nheads_k": nheads_k, "seqlen_q": seqlen_q, "seqlen_k": call.length,
            "seqlen_new": added, "capacity": call.capacity, "head_dim": head_dim // vec,
            "head_dim_v": head_dim_v // vec, "rotary_half": half, "places": places,
            "k_blocks": k_blocks, "q_blocks": q_blocks, "flags": flags,
        },
    )  # fmt: skip
    return turned
