"""The custom op flash_attn::_flash_attn_with_kvcache, and `attend`, which calls it or the backend itself.

As in flash_attn.attention.operators.dispatch: eager calls go straight to the backend, traced ones through the op.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.attention import backends
from flash_attn.attention.backends.torch.tiles import accumulation_dtype
from flash_attn.call.arguments import check_places
from flash_attn.call.calls import CacheCall, new_out, replace
from flash_attn.call.memory import check_outputs, shares_memory
from flash_attn.call.options import FIELDS, SCHEMA, as_arguments, from_arguments, option_tensors
from flash_attn.call.tracing import is_traced, refuse_tangents_of_an_op
from flash_attn.core.api import SINCE_2_8_4
from flash_attn.core.protocol import spoil

_is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]

# The fields of a call besides its tensors, descales and options, which an op has in other forms.
_FIELDS = {
    "k": "Tensor?", "v": "Tensor?", "rotary_cos": "Tensor?", "rotary_sin": "Tensor?", "cache_batch_idx": "Tensor?",
    "cache_leftpad": "Tensor?", "block_table": "Tensor?", "rotary_interleaved": "bool", "num_splits": "SymInt",
    "cu_seqlens_q": "Tensor?", "max_seqlen_q": "SymInt", "cu_seqlens_k_new": "Tensor?", "rotary_seqlens": "Tensor?",
    "sm_margin": "SymInt", "max_seqlen_k": "SymInt?", "qv": "Tensor?",
}  # fmt: skip
_SCHEMA = (
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? cache_seqlens, SymInt? cache_length, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    f"{', '.join(f'{schema} {name}' for name, schema in _FIELDS.items())}, {SCHEMA}) -> (Tensor, Tensor)"
)
# The tensors of `_FIELDS`.
_TENSORS = tuple(name for name, schema in _FIELDS.items() if schema == "Tensor?")


@torch.library.custom_op("flash_attn::_flash_attn_with_kvcache", mutates_args=("k_cache", "v_cache"), schema=_SCHEMA)
def _flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    cache_length: int | None,
    *more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse); writes k, v into the caches. cache_length is cache_seqlens as an int."""
    descales, fields = more[:3], dict(zip(_FIELDS, more[3:], strict=False))
    options = from_arguments(more[3 + len(_FIELDS) :])
    refuse_tangents_of_an_op(q, k_cache, v_cache, *(fields[name] for name in _TENSORS), *option_tensors(options))
    call = CacheCall(q, k_cache, v_cache, options, **fields)
    call.cache_seqlens = cache_length if cache_seqlens is None else cache_seqlens
    call.out = new_out(q, v_cache)  # of the fake's strides
    call.descales = None if any(x is None for x in descales) else descales
    return _run(call)


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
    descales = call.descales or (None, None, None)
    fields = [getattr(call, name) for name in _TENSORS]
    if not is_traced(call.q, call.k_cache, call.v_cache, lengths, *descales, *fields, *option_tensors(call.options)):
        return _run(call)
    result, softmax_lse = torch.ops.flash_attn._flash_attn_with_kvcache(
        call.q, call.k_cache, call.v_cache, lengths, call.cache_seqlens if lengths is None else None, *descales,
        *[getattr(call, name) for name in _FIELDS], *as_arguments(call.options),
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
    spoil()
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


def _apart(call: CacheCall) -> CacheCall:
    """A call that appends keys and reads no input in memory of the caches, of which it copies such inputs.

    Raises ValueError for caches whose elements share memory. Tensors of other storages are not looked at.
    """
    spoil()
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
    names = ("q", "k_cache", "v_cache", "cache_seqlens", *_TENSORS)
    inputs = {name: x for name in names if isinstance(x := getattr(call, name), torch.Tensor)}
    of_options = zip(FIELDS[type(call.options)].tensors, option_tensors(call.options), strict=True)
    inputs |= {name: x for name, x in of_options if x is not None}
    if not check_outputs({"out": out}, inputs):
        return backends.select(call.q).kvcache(call)
    if shares_memory(out, call.k_cache) or shares_memory(out, call.v_cache):
        raise ValueError("out: got memory of k_cache or v_cache, wanted a tensor of its own: the cache would be lost")
    result, softmax_lse = backends.select(call.q).kvcache(replace(call, out=None))
    return out.copy_(result), softmax_lse
