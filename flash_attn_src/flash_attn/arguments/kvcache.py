"""The arguments of flash_attn_with_kvcache."""

from __future__ import annotations

import torch

from flash_attn.arguments.diagnosis import (
    DENSE,
    DTYPES,
    LEAST,
    MAX_HEAD_DIM,
    MOST,
    MOST_SOFTCAP,
    check_block_table,
    check_index,
    check_per_sequence,
    check_strided,
    diagnose_options,
    diagnose_switches,
    diagnose_tensors,
)
from flash_attn.calls import CacheCall
from flash_attn.kernels.flags import OPEN_WINDOW


def check_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    rotary_interleaved: bool,
    return_softmax_lse: bool,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    table: str = "block_table",
) -> tuple[int, int]:
    """The window, -1 where open; arguments as in flash_attn_with_kvcache, cache_seqlens an int, a tensor or None.

    The last ones are those of FlashAttention-3's interface, the types that it takes, and its name of block_table.
    """
    try:
        left, right = window_size
        batch, _, heads, dim = q.shape
        shape = k_cache.shape
        batch_cache, _, heads_k, dim_k = shape
        dtype = q.dtype
        device = q.device
        fine = (
            shape == v_cache.shape
            and dim == dim_k
            and 0 < dim <= MAX_HEAD_DIM
            and heads_k > 0
            and heads > 0
            and heads % heads_k == 0
            and dtype is k_cache.dtype
            and dtype is v_cache.dtype
            and dtype in DTYPES
            and device == k_cache.device
            and device == v_cache.device
            and q.layout is k_cache.layout is v_cache.layout is DENSE
            and k_cache.stride(3) == 1
            and v_cache.stride(3) == 1
            and (softcap == 0.0 or LEAST <= softcap <= MOST_SOFTCAP)
            and type(left) is int
            and type(right) is int
            and rotary_cos is None
            and rotary_sin is None
            and cache_leftpad is None
            and alibi_slopes is None
            and type(causal) is bool
            and (softmax_scale is None or (type(softmax_scale) is float and LEAST <= softmax_scale <= MOST))
            and type(rotary_interleaved) is bool
            and type(return_softmax_lse) is bool
            and cu_seqlens_q is None
            and cu_seqlens_k_new is None
            and rotary_seqlens is None
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
                and k.shape == v.shape
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
        return left, right
    axes = ("batch", "seqlen", "heads", "head_dim")
    paged = block_table is not None
    axes_cache = ("pages", "page_size", "heads", "head_dim") if paged else axes
    axes_q = axes if cu_seqlens_q is None else ("total_q", "heads", "head_dim")
    diagnose_tensors(q, k_cache, v_cache, axes_q, axes_cache, "k_cache", "v_cache", dtypes)
    batch = q.shape[0]
    if cu_seqlens_q is not None:
        check_index("cu_seqlens_q", cu_seqlens_q, q, 1)
        if max_seqlen_q is None:
            raise ValueError("max_seqlen_q: got None, wanted the longest length, as cu_seqlens_q is given")
        batch = cu_seqlens_q.shape[0] - 1
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(-1) != 1:
            raise ValueError(f"{name}: got stride {cache.stride(-1)} in its last dimension, wanted 1: it is "
                             "written in place")  # fmt: skip
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(f"cache_batch_idx: got a tensor, wanted None with {table}")
        check_block_table(block_table, q, batch, table)
    elif cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(f"k_cache: got batch {k_cache.shape[0]}, wanted {batch} as q has, or cache_batch_idx")
    check_per_sequence(
        q, batch, cache_seqlens=None if isinstance(cache_seqlens, (int, torch.SymInt)) else cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, rotary_seqlens=rotary_seqlens,
    )  # fmt: skip
    if (k is None) != (v is None):
        raise ValueError("k, v: got only one of them, wanted both or neither")
    if k is None and cu_seqlens_k_new is not None:
        raise ValueError("cu_seqlens_k_new: got a tensor, wanted None without k and v to append")
    if k is not None and v is not None:
        axes_new = axes if cu_seqlens_k_new is None else ("total_new", "heads", "head_dim")
        diagnose_tensors(q, k, v, axes_q, axes_new, dtypes=dtypes)
        if cache_seqlens is None:
            raise ValueError("cache_seqlens: got None, wanted the place where k and v go")
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
                f"k: got shape {tuple(k.shape)}, wanted batch {batch} and {k_cache.shape[2]} heads, "
                "those of q and k_cache"
            )
    _check_rotary(q, k, rotary_cos, rotary_sin)
    diagnose_switches(
        softmax_scale, causal=causal, rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse
    )
    return diagnose_options(q, batch, 0.0, window_size, softcap, alibi_slopes)


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
    """The rotary tables have a place for every row that may be turned: ValueError, before a kernel reads beyond them.

    Where a device alone knows the lengths, those are all that the cache has room for.
    """
    if call.rotary_cos is None:
        return
    wanted = call.capacity
    if call.lengths is None and call.rotary_seqlens is None:
        queries = call.seqlen_q if call.moving else min(call.seqlen_q, 1)
        wanted = call.length + max(min(call.added, call.capacity - call.length), queries)
    if call.rotary_cos.shape[0] < wanted:
        raise ValueError(f"rotary_cos: got {call.rotary_cos.shape[0]} places, wanted at least {wanted}")


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
