"""The custom op flash_attn::_flash_attn_with_kvcache, and `attend`, which calls it or the backend itself.

As in flash_attn.custom_ops.dispatch: eager calls go straight to the backend, traced ones through the op.
"""

from __future__ import annotations

import torch

from flash_attn import backends
from flash_attn.api import SINCE_2_8_4
from flash_attn.arguments import check_places
from flash_attn.backends.torch.tiles import accumulation_dtype
from flash_attn.calls import CacheCall, new_out, replace
from flash_attn.memory import check_outputs, shares_memory
from flash_attn.tracing import is_traced, refuse_tangents_of_an_op

_is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]

_SCHEMA = (
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? cache_seqlens, SymInt? cache_length, Tensor? cache_batch_idx, "
    "Tensor? cache_leftpad, Tensor? block_table, float softmax_scale, bool causal, SymInt window_left, "
    "SymInt window_right, float softcap, bool rotary_interleaved, Tensor? alibi_slopes, SymInt num_splits, "
    "Tensor? cu_seqlens_q, SymInt max_seqlen_q, Tensor? cu_seqlens_k_new, Tensor? rotary_seqlens, "
    "SymInt attention_chunk, SymInt sm_margin, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "Tensor? s_aux, Tensor? qv) "
    "-> (Tensor, Tensor)"
)


@torch.library.custom_op("flash_attn::_flash_attn_with_kvcache", mutates_args=("k_cache", "v_cache"), schema=_SCHEMA)
def _flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    cache_length: int | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    rotary_interleaved: bool,
    alibi_slopes: torch.Tensor | None,
    num_splits: int,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    cu_seqlens_k_new: torch.Tensor | None,
    rotary_seqlens: torch.Tensor | None,
    attention_chunk: int,
    sm_margin: int,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    s_aux: torch.Tensor | None,
    qv: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse); writes k, v into the caches. cache_length is cache_seqlens as an int."""
    refuse_tangents_of_an_op(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes, s_aux, qv)
    out = new_out(q, v_cache)  # of the fake's strides
    descales = None
    if q_descale is not None and k_descale is not None and v_descale is not None:
        descales = q_descale, k_descale, v_descale
    return _run(CacheCall(
        q, k_cache, v_cache, softmax_scale, k, v, rotary_cos, rotary_sin,
        cache_length if cache_seqlens is None else cache_seqlens, cache_batch_idx, cache_leftpad, block_table, causal,
        (window_left, window_right), softcap, rotary_interleaved, alibi_slopes, num_splits, out=out,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens, attention_chunk=attention_chunk, sm_margin=sm_margin, descales=descales,
        s_aux=s_aux, qv=qv,
    ))  # fmt: skip


@_flash_attn_with_kvcache.register_fake
def _fake(
    q: torch.Tensor, _k_cache: torch.Tensor, v_cache: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    *outer, heads, _dim = q.shape
    rows = (heads, outer[0]) if len(outer) == 1 else (outer[0], heads, outer[1])
    return new_out(q, v_cache), torch.empty(rows, dtype=accumulation_dtype(q.dtype), device=q.device)


def attend(call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse), eager or traced."""
    lengths = call.cache_seqlens if isinstance(call.cache_seqlens, torch.Tensor) else None
    q_descale, k_descale, v_descale = call.descales or (None, None, None)
    if not is_traced(
        call.q, call.k_cache, call.v_cache, call.k, call.v, call.s_aux, call.qv, call.alibi_slopes, call.rotary_cos,
        call.rotary_sin, q_descale, k_descale, v_descale, lengths, call.cache_batch_idx, call.cache_leftpad,
        call.block_table, call.cu_seqlens_q, call.cu_seqlens_k_new, call.rotary_seqlens,
    ):  # fmt: skip
        return _run(call)
    result, softmax_lse = torch.ops.flash_attn._flash_attn_with_kvcache(
        call.q, call.k_cache, call.v_cache, call.k, call.v, call.rotary_cos, call.rotary_sin, lengths,
        call.cache_seqlens if lengths is None else None, call.cache_batch_idx, call.cache_leftpad, call.block_table,
        call.softmax_scale, call.causal, *call.window_size, call.softcap, call.rotary_interleaved,
        call.alibi_slopes, call.num_splits, call.cu_seqlens_q, call.max_seqlen_q, call.cu_seqlens_k_new,
        call.rotary_seqlens, call.attention_chunk, call.sm_margin, q_descale, k_descale, v_descale,
        call.s_aux, call.qv,
    )  # fmt: skip
    return (result if call.out is None else call.out.copy_(result)), softmax_lse


def check_pages(call: CacheCall) -> None:
    """RuntimeError where block_table has no room for a sequence's keys or names a page that the cache lacks.

    From 2.8.4 on, as upstream. The lengths and the table are read, for which the host waits for the GPU: not while a
    graph is captured or a call is traced.
    """
    table, lengths = call.block_table, call.lengths
    if table is None or not SINCE_2_8_4 or call.batch == 0 or is_traced(call.q, call.k_cache, table, lengths):
        return
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    pages, page_size = call.k_cache.shape[:2]
    unread = ([] if lengths is None else [lengths.amax()]) + (list(torch.aminmax(table)) if table.shape[1] else [])
    read = torch.stack(unread).tolist() if unread else []
    longest = (call.length if lengths is None else read.pop(0)) + call.added
    if longest > call.capacity:
        raise RuntimeError(
            f"block_table: got room for {call.capacity} keys a sequence, {table.shape[1]} pages of {page_size}, wanted "
            f"{longest} or more: cache_seqlens has {longest - call.added}, k appends {call.added}"
        )
    if not read or (read[0] >= 0 and read[1] < pages):
        return
    # Entries beyond a sequence's keys may hold anything.
    used = torch.arange(table.shape[1], device=table.device)[None] * page_size < (
        longest if lengths is None else lengths[:, None] + call.added
    )
    wrong = (used & ((table < 0) | (table >= pages))).nonzero()
    if wrong.shape[0]:
        row, column = wrong[0].tolist()
        raise RuntimeError(
            f"block_table: got page {int(table[row, column])} at ({row}, {column}), wanted 0 to {pages - 1}, pages of "
            "k_cache"
        )


_INPUTS = (
    "q", "k", "v", "qv", "k_cache", "v_cache", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
    "cache_leftpad", "block_table", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens", "s_aux",
)  # fmt: skip


def _apart(call: CacheCall) -> CacheCall:
    """A call that appends keys and reads no input in memory of the caches, of which it copies such inputs.

    Raises ValueError for caches whose elements share memory. Tensors of other storages are not looked at.
    """
    caches = (call.k_cache, call.v_cache)
    if not all(cache.is_contiguous() for cache in caches) or _is_alias(*caches):
        check_outputs({"k_cache": caches[0], "v_cache": caches[1]}, {})
    copies = {}
    for name in ("q", "k", "v", "qv"):
        x = getattr(call, name)
        if x is not None and any(_is_alias(x, cache) and shares_memory(x, cache) for cache in caches):
            copies[name] = x.clone()
    return replace(call, **copies) if copies else call


def _run(call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(call.cache_seqlens, int):
        check_places(call, call.cache_seqlens)
    if call.k is not None:
        call = _apart(call)
    out = call.out
    if out is None:
        return backends.select(call.q).kvcache(call)
    inputs = {name: x for name in _INPUTS if isinstance(x := getattr(call, name), torch.Tensor)}
    if not check_outputs({"out": out}, inputs):
        return backends.select(call.q).kvcache(call)
    if shares_memory(out, call.k_cache) or shares_memory(out, call.v_cache):
        raise ValueError("out: got memory of k_cache or v_cache, wanted a tensor of its own: the cache would be lost")
    result, softmax_lse = backends.select(call.q).kvcache(replace(call, out=None))
    return out.copy_(result), softmax_lse
