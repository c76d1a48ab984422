"""FlashAttention-3's module by name and signature, on the kernels of flash_attn.

What only concerns speed (pack_gqa, sm_margin, scheduler_metadata, and num_splits where gradients are kept) never
changes a result: query heads are always packed where it pays, and nothing has to be planned ahead. softmax_lse is
-inf in rows that see no key. v may have another head dim than q and k, but not in FP8. FP8 inputs come with q_descale,
k_descale and v_descale, fp32 (batch, heads_k), give a bf16 result and have no gradient. s_aux: learnable sinks, as in
flash_attn.flash_attn_func. qv, shaped as the result, is a second query, for which the values are keys: the scores are
softmax_scale * (q @ k + qv @ v). On a GPU q and k then have at most 64 columns and v at most 512. There is no gradient
with qv. In FP8 these raise NotImplementedError: qv, and s_aux in flash_attn_varlen_func.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import flash_attn
import torch
from flash_attn import fp8
from flash_attn.attention.backends.torch.fp8 import is_fp8
from flash_attn.attention.fp8_cache import has_wide_queries, set_descales
from flash_attn.attention.operators.kvcache import attend as attend_to_cache
from flash_attn.call.arguments import (
    as_int,
    check_alike,
    check_dense,
    check_index,
    check_kvcache,
    check_packed,
    check_strided,
    check_varlen,
    check_whole,
    diagnose_switches,
    renaming,
)
from flash_attn.call.autocast import cast
from flash_attn.call.calls import CacheCall, Window, attention_call, cache_call, maybe_contiguous, replace
from flash_attn.call.memory import refuse_shared
from flash_attn.call.tracing import refuse_transforms
from flash_attn.interfaces.fa3 import chunks, operators, rotary, second_query
from flash_attn.interfaces.fa3.backward import _flash_attn_backward
from flash_attn.interfaces.fa3.inputs import chosen_rows, factors, one_window, used_rows
from flash_attn.interfaces.fa3.split_kv import flash_attn_combine, get_scheduler_metadata

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_3_gpu",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _result(out: torch.Tensor, softmax_lse: torch.Tensor, with_lse: bool) -> _Result:
    return (out, softmax_lse.masked_fill(softmax_lse == torch.inf, -torch.inf)) if with_lse else out


def _keeps_gradients(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _forward_alone(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """FP8 tensors without their history: upstream's forward takes those that require gradients, and has no backward."""
    return tuple(x.detach() if is_fp8(x) else x for x in tensors)


def _check(attention_chunk: int, num_splits: int, pack_gqa: bool | None, sm_margin: int) -> None:
    check_whole(attention_chunk=attention_chunk, num_splits=num_splits, sm_margin=sm_margin)
    diagnose_switches(None, pack_gqa=False if pack_gqa is None else pack_gqa)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> _Result:
    """out, with return_attn_probs (out, softmax_lse (batch, heads, seqlen_q)): flash_attn.flash_attn_func.

    attention_chunk > 0: a query sees keys of its own chunk of so many only.
    """
    q, k, v = _forward_alone(*cast(q, k, v))
    qv = None if qv is None else cast(qv)[0]
    call = attention_call(
        q=fp8.stand_in(q), k=fp8.stand_in(k), v=fp8.stand_in(v), softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, deterministic=deterministic, return_softmax=return_attn_probs,
        s_aux=s_aux,
    )  # fmt: skip
    check_dense(call)
    _check(attention_chunk, num_splits, pack_gqa, sm_margin)
    descales = factors(q, k, q.shape[0], (q_descale, k_descale, v_descale))
    if qv is not None:
        call.q, call.k, call.v = q, k, v
        pair = second_query.attend(call, qv, softmax_scale, attention_chunk, num_splits, sm_margin)
        return _result(*pair, return_attn_probs)
    if is_fp8(q) and (attention_chunk > 0 or s_aux is not None):  # the kernels over a cache have both in FP8
        cached = flash_attn_with_kvcache(
            q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, softmax_scale=softmax_scale,
            causal=causal, window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
            num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin, return_softmax_lse=True, s_aux=s_aux,
        )  # fmt: skip
        return (cached[0], cached[1]) if return_attn_probs else cached[0]
    if is_fp8(q):
        out, softmax_lse, _ = fp8.flash_attn_fp8_func(
            q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, True, *descales
        )
    elif num_splits != 1 and not _keeps_gradients(q, k, v, s_aux):
        out, softmax_lse = attend_to_cache(CacheCall(
            q=maybe_contiguous(q), k_cache=maybe_contiguous(k), v_cache=maybe_contiguous(v),
            options=replace(call.options, attention_chunk=attention_chunk), num_splits=num_splits, sm_margin=sm_margin,
        ))  # fmt: skip
    elif attention_chunk > 0:
        batch, seqlen_q, heads, _ = q.shape
        seqlen_k = k.shape[1]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        pieces = chunks.split(starts * seqlen_q, starts * seqlen_k, seqlen_k, attention_chunk)
        longest = seqlen_q if seqlen_q > seqlen_k else min(seqlen_q, attention_chunk)
        out, softmax_lse, _ = flash_attn.flash_attn_varlen_func(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *pieces, longest, min(seqlen_k, attention_chunk), 0.0,
            softmax_scale, causal, window_size, softcap, None, deterministic, True, s_aux=s_aux,
        )  # fmt: skip
        out = out.view(batch, seqlen_q, heads, v.shape[-1])
        softmax_lse = softmax_lse.view(heads, batch, seqlen_q).transpose(0, 1)
    else:
        out, softmax_lse, _ = flash_attn.flash_attn_func(
            q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, True, s_aux=s_aux
        )
    return _result(out, softmax_lse, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> _Result:
    """flash_attn_func of qkv (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads + 2 * heads_k, head_dim).

    The latter needs num_heads_q, its number of query heads.
    """
    if isinstance(qkv, torch.Tensor) and qkv.dim() == 4:
        check_strided("qkv", qkv)
        if (
            num_heads_q is None
            or not 0 < as_int("num_heads_q", num_heads_q) < qkv.shape[2]
            or (qkv.shape[2] - num_heads_q) % 2
        ):
            raise ValueError(
                f"num_heads_q: got {num_heads_q}, wanted the query heads among the {qkv.shape[2]} of qkv, the rest "
                "being as many key as value heads"
            )
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], -2)
    else:
        check_packed("qkv", qkv, 5, 3)
        q, k, v = qkv.unbind(-3)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        1, None, deterministic, sm_margin, return_attn_probs, s_aux=s_aux,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> _Result:
    """flash_attn.flash_attn_varlen_func; softmax_lse is (heads, total_q).

    seqused_q, seqused_k, int32 (batch,): how many rows of each sequence count; the others give 0, and get no
    gradient. attention_chunk > 0: a query sees keys of its own chunk of so many only.
    """
    q, k, v = _forward_alone(*cast(q, k, v))
    qv = None if qv is None else cast(qv)[0]
    max_seqlen_q, max_seqlen_k = as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k)
    call = attention_call(
        q=fp8.stand_in(q), k=fp8.stand_in(k), v=fp8.stand_in(v), softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, deterministic=deterministic, return_softmax=return_attn_probs,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        s_aux=s_aux,
    )  # fmt: skip
    check_varlen(call)
    _check(attention_chunk, num_splits, pack_gqa, sm_margin)
    if is_fp8(q) and s_aux is not None:
        raise NotImplementedError("s_aux: got sinks and packed FP8 tensors, wanted q, k and v in fp16 or bf16")
    descales = factors(q, k, cu_seqlens_q.shape[0] - 1, (q_descale, k_descale, v_descale))
    sequences = cu_seqlens_q.shape[0] - 1
    if seqused_q is not None or seqused_k is not None:
        cu_seqlens_q, cu_seqlens_k = used_rows(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if attention_chunk > 0:
        cu_seqlens_q, cu_seqlens_k = chunks.split(cu_seqlens_q, cu_seqlens_k, max_seqlen_k, attention_chunk)
        max_seqlen_k = min(max_seqlen_k, attention_chunk)
    if qv is not None:
        call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k = q, k, v, cu_seqlens_q, cu_seqlens_k
        call.max_seqlen_k = max_seqlen_k
        pair = second_query.attend(call, qv, softmax_scale, 0, num_splits, sm_margin)
        return _result(*pair, return_attn_probs)
    args = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size)
    if is_fp8(q):
        pieces = (cu_seqlens_q.shape[0] - 1) // max(sequences, 1)  # of each sequence
        each = tuple(None if x is None else x.repeat_interleave(pieces, 0) for x in descales)
        out, softmax_lse, _ = fp8.flash_attn_varlen_fp8_func(*args, softcap, None, deterministic, True, None, *each)
    else:
        out, softmax_lse, _ = flash_attn.flash_attn_varlen_func(*args, softcap, None, deterministic, True, s_aux=s_aux)
    return _result(out, softmax_lse, return_attn_probs)


@renaming(block_table="page_table")
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """flash_attn.flash_attn_with_kvcache, page_table being its block_table; and

    cu_seqlens_q       int32 (batch + 1,): q is (total_q, heads, head_dim), and max_seqlen_q is required
    cu_seqlens_k_new   int32 (batch + 1,): k, v are (total_new, heads_k, head_dim)
    rotary_seqlens     int32 (batch,): where rotary angles, if any, start instead of at cache_seqlens
    cache_batch_idx    with page_table: the row of it that each sequence of q has
    attention_chunk    > 0: a query sees keys of its own chunk of so many only
    k_descale, v_descale   fp32 (batch, heads_k): k_cache and v_cache are FP8. q is FP8 with q_descale, and out is bf16;
                       or q is fp16 or bf16, as out is then, and nothing is appended

    Returns out, with return_softmax_lse (out, softmax_lse, out_partial, lse_partial), the last two empty.
    """
    _check(attention_chunk, num_splits, pack_gqa, sm_margin)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = chosen_rows(q, page_table, cache_batch_idx), None
    if max_seqlen_q is not None:
        check_whole(max_seqlen_q=max_seqlen_q)
    elif cu_seqlens_q is not None:
        raise ValueError("max_seqlen_q: got None, wanted the longest length, as cu_seqlens_q is given")
    if cache_seqlens is not None and not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = as_int("cache_seqlens", cache_seqlens)
    call = cache_call(
        q=q, k_cache=k_cache, v_cache=v_cache, softmax_scale=softmax_scale, k=k, v=v, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, block_table=page_table, causal=causal, window_size=window_size, softcap=softcap,
        rotary_interleaved=rotary_interleaved, num_splits=num_splits, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q or 0, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens,
        attention_chunk=attention_chunk, sm_margin=sm_margin, s_aux=s_aux, qv=qv,
    )  # fmt: skip
    descales = q_descale, k_descale, v_descale
    check_kvcache(call, return_softmax_lse, _CACHE_DTYPES, k_cache.dtype if has_wide_queries(call, descales) else None)
    if scheduler_metadata is not None:
        check_index("scheduler_metadata", scheduler_metadata, q, 1)
    set_descales(call, descales)
    if is_fp8(q):
        call = rotary.turned(call)
    call.q = maybe_contiguous(call.q)
    call.qv = None if call.qv is None else maybe_contiguous(call.qv)
    call.k = None if call.k is None else maybe_contiguous(call.k)
    call.v = None if v is None else maybe_contiguous(v)
    out, softmax_lse = attend_to_cache(call)
    if not return_softmax_lse:
        return out
    nothing = softmax_lse.new_empty((0,))
    return *_result(out, softmax_lse, True), nothing, nothing


_forward_over_cache = renaming(
    k_cache="k", v_cache="v", k="k_new", v="v_new", cache_seqlens="seqused_k", cache_batch_idx="kv_batch_idx",
    cache_leftpad="leftpad_k", rotary_seqlens="seqlens_rotary",
)(flash_attn_with_kvcache)  # fmt: skip


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out_: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    out: torch.Tensor | None = None,
    window_size: Window | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, softmax_lse, out_partial, lse_partial), the last two empty: what the functions above are upstream, which
    libraries call that put attention together from parts.

    With cu_seqlens_k, flash_attn_varlen_func; else with cu_seqlens_q or any of k_new, seqused_k, page_table,
    kv_batch_idx and leftpad_k, flash_attn_with_kvcache, k and v being the cache; else flash_attn_func. out_ is written
    where given, and has no gradient. out and window_size are older names, of out_ and of the window as one pair.
    """
    if out_ is not None and out is not None:
        raise ValueError("out_, out: got both, wanted one of them: out is an older name of out_")
    window = one_window(window_size_left, window_size_right, window_size)
    descales = (q_descale, k_descale, v_descale)
    cached = {"k_new": k_new, "page_table": page_table, "kv_batch_idx": kv_batch_idx, "leftpad_k": leftpad_k}
    over_cache = cu_seqlens_k is None and (
        cu_seqlens_q is not None or seqused_k is not None or any(x is not None for x in cached.values())
    )
    result: torch.Tensor | tuple[torch.Tensor, ...]
    if cu_seqlens_k is not None:
        if refused := [name for name, x in cached.items() if x is not None]:
            raise NotImplementedError(f"{', '.join(refused)}: wanted None with cu_seqlens_k")
        if cu_seqlens_q is None or max_seqlen_q is None or max_seqlen_k is None:
            raise ValueError("cu_seqlens_q, max_seqlen_q, max_seqlen_k: got None, wanted all of them with cu_seqlens_k")
        result = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale,
            causal, qv, *descales, window, attention_chunk, softcap, num_splits, pack_gqa, False, sm_margin, True,
        )  # fmt: skip
    elif seqused_q is not None:
        raise NotImplementedError("seqused_q: wanted None without cu_seqlens_k")
    elif over_cache:
        result = _forward_over_cache(
            q, k, v, k_new, v_new, qv, rotary_cos, rotary_sin, seqused_k, kv_batch_idx, leftpad_k, page_table,
            cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, seqlens_rotary, *descales, softmax_scale, causal, window,
            attention_chunk, softcap, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, True,
        )  # fmt: skip
    else:
        result = flash_attn_func(
            q, k, v, softmax_scale, causal, qv, *descales, window, attention_chunk, softcap, num_splits, pack_gqa,
            False, sm_margin, True,
        )  # fmt: skip
    computed, softmax_lse = result[0], result[1]
    if (buffer := out_ if out is None else out) is not None:
        refuse_transforms("out_, which has no gradient")
        caches = {"k": k, "v": v} if over_cache else {}
        kept = {"q": q, "k": k, "v": v} if _keeps_gradients(q, k, v) else {}
        refuse_shared({"out_": buffer}, {**caches, **kept})
        check_alike("out_", buffer, computed, "the result")
        with torch.no_grad():  # or the buffer would keep every call's history
            computed = buffer.copy_(computed)
    nothing = softmax_lse.new_empty((0,))
    return computed, softmax_lse, nothing, nothing


operators.define(_flash_attn_forward, _flash_attn_backward)


def _scheduler_metadata(*args: Any) -> torch.Tensor:
    """get_scheduler_metadata in the positional order of upstream's extension."""
    *sizes, headdim_v, dtype, cache_seqlens, cu_q, _cu_k, cu_new, _used_q, leftpad, page = args[:15]
    more, window, rest = args[15:17], args[17:19], args[19:]
    order: tuple[Any, ...] = (*sizes, cache_seqlens, dtype, headdim_v, cu_q, cu_new, leftpad, page, *more)
    return get_scheduler_metadata(*(*order, window, *rest))


def _backward_by_position(*args: Any) -> tuple[torch.Tensor]:
    """(softmax_d,) of _flash_attn_backward, whose gradients come before the lengths in upstream's extension."""
    return (_flash_attn_backward(*args[:6], *args[9:15], *args[6:9], *args[15:]),)


# The functions of upstream's extension, in its positional order, for libraries that call it directly.
flash_attn_3_gpu = SimpleNamespace(
    fwd=_flash_attn_forward,
    bwd=_backward_by_position,
    fwd_combine=flash_attn_combine,
    get_scheduler_metadata=_scheduler_metadata,
)
