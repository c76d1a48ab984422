"""The arguments of flash_attn_with_kvcache."""

from __future__ import annotations

import torch

from flash_attn.call.arguments.diagnosis import (
    DENSE,
    DTYPES,
    check_block_table,
    check_index,
    check_per_sequence,
    check_strided,
    diagnose_switches,
    diagnose_tensors,
    refuse_gradients,
)
from flash_attn.call.arguments.latent import check_second_query, split_absorbed
from flash_attn.call.arguments.options import are_fine, diagnose_options
from flash_attn.call.calls import CacheCall
from flash_attn.kernels.flags import OPEN_WINDOW

_AXES = ("batch", "seqlen", "heads", "head_dim")


def check_kvcache(
    call: CacheCall,
    return_softmax_lse: bool,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    dtype_cache: torch.dtype | None = None,
) -> None:
    """Checks a call over a cache whose cache_seqlens is an int, a tensor or None, and completes it.

    dtypes: the types that the interface takes. dtype_cache: the type of the cache where it is not the type of q.
    """
    split_absorbed(call)
    q, k_cache, v_cache, k, v = call.q, call.k_cache, call.v_cache, call.k, call.v
    cache_seqlens, cache_batch_idx, block_table = call.cache_seqlens, call.cache_batch_idx, call.block_table
    softmax_scale = call.options.softmax_scale
    try:
        left, right = call.options.window_size
        batch, _, _, dim = q.shape
        batch_cache, _, heads_k, _ = k_cache.shape
        dtype, device = q.dtype, q.device
        fine = (
            are_fine(call.options, q, k_cache, v_cache, batch)
            and k_cache.stride(3) == 1
            and v_cache.stride(3) == 1
            and call.rotary_cos is None
            and call.rotary_sin is None
            and call.cache_leftpad is None
            and (call.options.s_aux is None or not call.options.s_aux.requires_grad)
            and type(call.rotary_interleaved) is bool
            and type(return_softmax_lse) is bool
            and call.cu_seqlens_q is None
            and call.cu_seqlens_k_new is None
            and call.rotary_seqlens is None
            # isinstance, which mypy would narrow by, takes longer.
            and (type(cache_seqlens) is int or _is_index(cache_seqlens, (batch,), device))  # type: ignore[arg-type]
            and (
                (batch_cache == batch if cache_batch_idx is None else _is_index(cache_batch_idx, (batch,), device))
                if block_table is None
                else cache_batch_idx is None and _is_index(block_table, (batch, block_table.shape[1]), device)
            )
            and (
                v is None
                if k is None
                else v is not None
                and k.shape[:-1] == v.shape[:-1]
                and v.shape[-1] == v_cache.shape[-1]
                and k.layout is v.layout is DENSE
                and k.dtype is dtype
                and v.dtype is dtype
                and k.device == device
                and v.device == device
                and k.shape == (batch, k.shape[1], heads_k, dim)
            )
        )
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        fine = False
    if fine:
        left = left if 0 <= left < OPEN_WINDOW else -1
        right = right if 0 <= right < OPEN_WINDOW else -1
    else:
        left, right = _diagnose(call, dtypes, dtype_cache)
        refuse_gradients(
            s_aux=call.options.s_aux,
            softmax_scale=softmax_scale,
            rotary_cos=call.rotary_cos,
            rotary_sin=call.rotary_sin,
        )
        diagnose_switches(
            softmax_scale, causal=call.options.causal, rotary_interleaved=call.rotary_interleaved,
            return_softmax_lse=return_softmax_lse,
        )  # fmt: skip
    call.options.window_size = (left, right)
    if call.qv is not None:
        check_second_query(call)
    if softmax_scale is None:
        call.options.softmax_scale = (q.shape[-1] + (0 if call.qv is None else call.qv.shape[-1])) ** -0.5


def _diagnose(call: CacheCall, dtypes: tuple[torch.dtype, ...], dtype_cache: torch.dtype | None) -> tuple[int, int]:
    """The window. Raises if a tensor or an option is wrong."""
    q, k_cache, block_table, cu_seqlens_q = call.q, call.k_cache, call.block_table, call.cu_seqlens_q
    axes_q = _AXES if cu_seqlens_q is None else ("total_q", "heads", "head_dim")
    axes_cache = _AXES if block_table is None else ("pages", "page_size", "heads", "head_dim")
    diagnose_tensors(q, k_cache, call.v_cache, axes_q, axes_cache, "k_cache", "v_cache", dtypes, dtype_cache)
    batch = q.shape[0]
    if cu_seqlens_q is not None:
        check_index("cu_seqlens_q", cu_seqlens_q, q, 1)
        batch = cu_seqlens_q.shape[0] - 1
    for name, cache in (("k_cache", k_cache), ("v_cache", call.v_cache)):
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise ValueError(f"{name}: got stride {cache.stride(-1)} in its last dimension, wanted 1: it is "
                             "written in place")  # fmt: skip
    if block_table is not None:
        if call.cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: got a tensor, wanted None with block_table")
        check_block_table(block_table, q, batch)
    elif call.cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(f"k_cache: got batch {k_cache.shape[0]}, wanted {batch} as q has, or cache_batch_idx")
    cache_seqlens = None if isinstance(call.cache_seqlens, (int, torch.SymInt)) else call.cache_seqlens
    check_per_sequence(
        q, batch, cache_seqlens=cache_seqlens, cache_batch_idx=call.cache_batch_idx, cache_leftpad=call.cache_leftpad,
        rotary_seqlens=call.rotary_seqlens,
    )  # fmt: skip
    _check_new(call, axes_q, batch, dtypes)
    _check_rotary(q, call.k, call.rotary_cos, call.rotary_sin)
    return diagnose_options(call.options, q, batch)


def _check_new(call: CacheCall, axes_q: tuple[str, ...], batch: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """The keys and values that are appended."""
    q, k, v, k_cache, cu_seqlens_k_new = call.q, call.k, call.v, call.k_cache, call.cu_seqlens_k_new
    if (k is None) != (v is None):
        raise ValueError("k, v: got only one of them, wanted both or neither")
    if k is None and cu_seqlens_k_new is not None:
        raise ValueError("cu_seqlens_k_new: got a tensor, wanted None without k and v to append")
    if k is None or v is None:
        return
    axes_new = _AXES if cu_seqlens_k_new is None else ("total_new", "heads", "head_dim")
    diagnose_tensors(q, k, v, axes_q, axes_new, dtypes=dtypes)
    if v.shape[-1] != call.v_cache.shape[-1]:
        raise ValueError(f"v: got head_dim {v.shape[-1]}, wanted {call.v_cache.shape[-1]} as v_cache has")
    if call.cache_seqlens is None:
        raise ValueError("cache_seqlens: got None, wanted the position at which k and v are appended")
    if cu_seqlens_k_new is not None:
        check_index("cu_seqlens_k_new", cu_seqlens_k_new, q, 1)
        if cu_seqlens_k_new.shape[0] != batch + 1:
            raise ValueError(
                f"cu_seqlens_k_new: got {cu_seqlens_k_new.shape[0]} elements, wanted batch + 1 = {batch + 1}"
            )
        if k.shape[1] != k_cache.shape[2]:
            raise ValueError(f"k: got {k.shape[1]} heads, wanted {k_cache.shape[2]} as k_cache has")
    elif k.shape[0] != batch or k.shape[2] != k_cache.shape[2]:
        raise ValueError(
            f"k: got shape {tuple(k.shape)}, wanted batch {batch} and {k_cache.shape[2]} heads, as q and k_cache have"
        )


def check_places(call: CacheCall, cache_length: int) -> None:
    """What the host knows of the lengths fits: keys into the cache, places into the rotary tables.

    cache_length is cache_seqlens, an int. Traced calls are checked when they run, by the op.
    """
    added = call.added if call.cu_seqlens_k_new is None else 0
    capacity = call.capacity
    if not 0 <= cache_length <= capacity - added:
        raise ValueError(
            f"cache_seqlens: got {cache_length}, wanted 0 to {capacity - added}: the cache holds {capacity} keys, and "
            f"k appends {added}"
        )
    if call.rotary_seqlens is None:
        check_tables(call)


def check_tables(call: CacheCall) -> None:
    """Raises ValueError unless the rotary tables have a row for every position that may be rotated.

    A kernel would read beyond them. If only the device knows the lengths, every position of the cache counts.
    """
    if call.rotary_cos is None:
        return
    places = call.capacity
    if call.lengths is None and call.rotary_seqlens is None:
        queries = call.seqlen_q if call.rotates_each_query else min(call.seqlen_q, 1)
        places = call.length + max(min(call.added, call.capacity - call.length), queries)
    if call.rotary_cos.shape[0] < places:
        raise ValueError(f"rotary_cos: got {call.rotary_cos.shape[0]} places, wanted at least {places}")


def _is_index(index: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> bool:
    return (
        index is not None
        and index.shape == shape
        and index.dtype is torch.int32
        and index.device == device
        and index.stride(-1) == 1
    )


def _check_rotary(q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos, rotary_sin: got only one of them, wanted both or neither")
    if cos is None or sin is None:
        return
    if k is None:
        raise ValueError("rotary_cos: got a tensor, wanted None without k and v to append")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_strided(name, table)
        if table.dtype is not q.dtype:
            raise TypeError(f"{name}: got {table.dtype}, wanted {q.dtype} as q has")
        if table.device != q.device:
            raise ValueError(f"{name}: got a tensor on {table.device}, wanted {q.device} where q is")
        if table.dim() != 2 or not 0 < 2 * table.shape[1] <= q.shape[-1]:
            raise ValueError(
                f"{name}: got shape {tuple(table.shape)}, wanted (places, rotary_dim / 2) with "
                f"rotary_dim at most {q.shape[-1]}"
            )
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_sin: got shape {tuple(sin.shape)}, wanted {tuple(cos.shape)} as rotary_cos has")
