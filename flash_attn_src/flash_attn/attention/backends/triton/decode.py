"""Split-KV attention of few queries to a cache by Triton kernels: in splits of the keys, which are joined."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.triton.inputs import (
    VEC,
    head_flags_of,
    head_numbers_of,
    lse_of,
    named,
    rows,
    sinks_of,
    strides_of,
    table_stride_of,
    window_of,
)
from flash_attn.attention.backends.triton.kernels import find_one
from flash_attn.call.calls import AttentionCall, CacheCall, new_out
from flash_attn.core import device
from flash_attn.core.arguments import Value, Values
from flash_attn.core.device import Kernel
from flash_attn.core.protocol import launch, spoil
from flash_attn.kernels import flags as bits
from flash_attn.kernels import planning
from flash_attn.kernels.splits import profitable_splits
from flash_attn.kernels.variants import bucket


def takes_pages(call: AttentionCall) -> bool:
    """Whether the kernels here find the pages of a forward. True without pages."""
    table = call.block_table
    return table is None or table.shape[1] * call.k.shape[1] < planning.SPLIT_KV.max_page_units


def attend_split(call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of few queries to the cached and the new keys, computed in splits and then combined."""
    q, k_cache, v_cache, out = call.q, call.k_cache, call.v_cache, call.out
    cu_seqlens_q, options = call.cu_seqlens_q, call.options
    head_numbers, head_stride = head_numbers_of(call)
    length, lengths, added, capacity, seqlen_q = call.length, call.lengths, call.added, call.capacity, call.seqlen_q
    index, head_dim, head_dim_v = q.get_device(), q.shape[-1], v_cache.shape[-1]
    batch = call.batch
    vec = VEC[k_cache.dtype]
    if call.qv is not None:
        q = _joined(call.qv, q)
    nheads, nheads_k = q.shape[-2], k_cache.shape[2]
    lse, lse_b, lse_h = lse_of(call)
    flags = head_flags_of(options) | (
        (bits.HAS_CU_SEQLENS_Q if cu_seqlens_q is not None else 0)
        | (bits.HAS_CU_SEQLENS_K if call.cu_seqlens_k_new is not None else 0)
        | (bits.HAS_SEQUSED_K if lengths is not None else 0)
        | (bits.HAS_LEFTPAD_K if call.cache_leftpad is not None else 0)
    )
    group = nheads // nheads_k
    m_rows = max(seqlen_q, min(q.shape[0], 1)) * group
    kernel, table, page_size = _kernel(call, m_rows)
    table_stride = 0
    if table is not None:
        flags |= bits.HAS_BLOCK_TABLE
        table_stride = table_stride_of(table)
    limits = planning.SPLIT_KV
    unit = limits.page_unit if page_size % limits.page_unit == 0 else 1
    if call.block_table is not None and capacity // unit >= limits.max_page_units:
        raise ValueError(
            f"block_table: got room for {capacity} keys a sequence, wanted less than {limits.max_page_units * unit} "
            f"with {page_size} a page"
        )
    left, right = window_of(call)
    m_blocks = -(-m_rows // kernel.block_m)
    programs = m_blocks * nheads_k * batch
    blocks = -(-min(length + added, capacity, left + right + seqlen_q) // kernel.block_n)
    num_splits = call.num_splits
    if num_splits == 0:
        units = max(device.of(index).compute_units - call.sm_margin, 1)
        resident = limits.resident if call.qv is None else limits.latent_resident
        num_splits = profitable_splits(programs, blocks, units, kernel.block_m, resident)
    elif num_splits > blocks:
        num_splits = max(blocks, 1)
    partial = partial_lse = lse
    if num_splits > 1:
        if lse.numel() * head_dim_v >= 1 << 31:
            raise ValueError(f"num_splits: got {num_splits}, wanted 1 for {lse.numel()} rows of {head_dim_v}")
        partial = lse.new_empty((num_splits, *lse.shape, head_dim_v))
        partial_lse = lse.new_empty((num_splits, *lse.shape))
    result = new_out(q, v_cache) if out is None else out
    result, out_strides = rows(result, vec)
    q_descale = k_descale = v_descale = lse
    if call.descales is not None:
        flags |= bits.HAS_DESCALE
        q_descale, k_descale, v_descale = (descale.contiguous() for descale in call.descales)
        if q.element_size() > 1:
            flags |= bits.QUERY_HAS_16_BITS | (bits.QUERY_IS_FP16 if q.dtype is torch.float16 else 0)
    s_aux = options.s_aux
    if s_aux is not None and flags & bits.QUERY_IS_FP16:  # the kernel knows no result but bf16 and takes fp32, too
        s_aux = s_aux.float()
    sinks, sink_flags = sinks_of(s_aux, result.dtype)
    if cu_seqlens_q is not None:  # no program writes rows outside of every sequence
        partial_lse.fill_(float("inf"))
        if num_splits == 1:
            result.zero_()
    grid = (programs * num_splits, 1, 1)
    values: dict[str, Value] = {
        **named("q", strides_of(q, vec)), **named("k", strides_of(k_cache, vec)),
        **named("v", strides_of(v_cache, vec)), **named("out", out_strides),
        "q": q, "k": k_cache, "v": v_cache, "out": result, "lse": lse, "partial": partial, "partial_lse": partial_lse,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k_new, "seqused_k": lengths,
        "leftpad_k": call.cache_leftpad, "alibi_slopes": head_numbers, "block_table": table,
        "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "sinks": sinks,
        "scale": options.scale, "softcap": options.softcap, "page_inverse": unit / page_size,
        "stride_lb": lse_b, "stride_lh": lse_h, "stride_ab": head_stride, "stride_tb": table_stride,
        "page_size": page_size, "page_shift": unit.bit_length() - 1,
        "nheads_k": nheads_k, "group": group, "seqlen_q": seqlen_q, "seqlen_k": length, "seqlen_new": added,
        "capacity": capacity, "head_dim": head_dim // vec, "head_dim_v": head_dim_v // vec,
        "window_left": left, "window_right": right, "chunk": options.attention_chunk,
        "lse_rows": lse.numel(), "m_blocks": m_blocks, "num_splits": num_splits, "flags": flags | sink_flags,
    }  # fmt: skip
    launch(kernel, grid, values)
    if num_splits > 1:
        out_b, out_m, out_h = result.stride()[:3] if cu_seqlens_q is None else (0, *result.stride()[:2])
        _join({
            "partial": partial, "partial_lse": partial_lse, "out": result, "lse": lse,
            "stride_ps": lse.numel() * head_dim_v, "stride_pb": lse_b * head_dim_v, "stride_pm": head_dim_v,
            "stride_ph": lse_h * head_dim_v,
            "stride_rs": lse.numel(), "stride_rb": lse_b, "stride_rm": 1, "stride_rh": lse_h,
            "stride_ob": out_b, "stride_om": out_m, "stride_oh": out_h,
            "stride_lb": lse_b, "stride_lm": 1, "stride_lh": lse_h,
            "nheads": nheads, "seqlen_q": q.shape[-3], "head_dim": head_dim_v, "num_splits": num_splits,
        }, result, head_dim_v, lse.numel(), num_splits)  # fmt: skip
    if out is not None and result is not out:
        result = out.copy_(result)
    return result, lse


def _joined(qv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Rows of qv, each followed by its row of q. No copy if both are already views of such rows."""
    spoil()
    ends = qv.data_ptr() + qv.shape[-1] * qv.element_size()
    if ends == q.data_ptr() and qv.stride() == q.stride() and qv.untyped_storage()._cdata == q.untyped_storage()._cdata:
        return qv.as_strided((*q.shape[:-1], qv.shape[-1] + q.shape[-1]), q.stride())
    return torch.cat((qv, q), -1)


def _kernel(call: CacheCall, m_rows: int) -> tuple[Kernel, torch.Tensor | None, int]:
    """The kernel for so many rows of a key head, the table in which it looks for pages, and their size. A cache without
    pages has one to a line, and no table where the lines are in order."""
    few, many = ("decode", "extend") if call.qv is None else ("latent", "latent-extend")
    key = call.q.get_device(), call.k_cache.dtype, max(call.q.shape[-1], call.v_cache.shape[-1])
    kind = "any"
    if call.options.softcap == 0.0 and call.options.alibi_slopes is None:
        kind = "plain" if call.options.s_aux is None else "sink"
    table, page_size = call.block_table, max(call.k_cache.shape[1], 1)
    padded = table is not None and call.cache_leftpad is not None
    if table is None:
        table, page_size = call.cache_batch_idx, planning.SPLIT_KV.endless
    op = few
    kernel = find_one(op, *key, kind)
    if m_rows > kernel.block_m:
        op = many
        kernel = find_one(op, *key, kind)
    if page_size % kernel.block_n or padded:
        kernel = find_one(f"{op}-paged", *key, kind)
        if table is None:
            table = torch.arange(call.batch, dtype=torch.int32, device=call.q.device)
    return kernel, table, page_size


def combine(partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """See `protocol.Backend.combine`."""
    batch, seqlen, nheads, head_dim = out.shape
    lse = torch.empty((batch, nheads, seqlen), dtype=torch.float32, device=out.device).transpose(1, 2)
    values: dict[str, Value] = {
        "partial": partial, "partial_lse": partial_lse, "out": out, "lse": lse,
        "nheads": nheads, "seqlen_q": seqlen, "head_dim": head_dim, "num_splits": partial.shape[0],
    }  # fmt: skip
    for letter, axes, tensor in (
        *(("p", "sbmh", partial), ("r", "sbmh", partial_lse)),
        *(("o", "bmh", out), ("l", "bmh", lse)),
    ):
        values |= {f"stride_{letter}{axis}": stride for axis, stride in zip(axes, tensor.stride(), strict=False)}
    _join(values, out, head_dim, lse.numel(), partial.shape[0])
    return lse


def _join(values: Values, out: torch.Tensor, head_dim: int, rows: int, num_splits: int) -> None:
    """Launches `attn_combine` for so many rows."""
    kind = "wide" if num_splits > planning.SPLIT_KV.many_splits and rows <= planning.SPLIT_KV.few_rows else "plain"
    kernel = find_one("combine", out.get_device(), out.dtype, head_dim, kind)
    launch(kernel, (rows, -(-head_dim // bucket(head_dim, "combine")), 1), values)
