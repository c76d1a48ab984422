"""The public functions: checks, padding of the head dimension, autograd. Nothing here knows a backend.

Options that all but flash_attn_with_kvcache share (it has some of them):

dropout_p        probability in [0, 1) of dropping an attention weight; drawn from torch's default generator
softmax_scale    factor of q @ k^T; default head_dim ** -0.5
causal           query i sees keys up to i + seqlen_k - seqlen_q: aligned to the bottom right
window_size      (left, right), in keys: query i sees keys i + seqlen_k - seqlen_q - left to ... + right;
                 negative is open
softcap          > 0, up to 4096: scores become softcap * tanh(score / softcap)
alibi_slopes     fp32 (heads,) or (batch, heads): -slope * |i + seqlen_k - seqlen_q - j| is added to scores
deterministic    the backward gives the same bits every time
return_attn_probs  returns (out, softmax_lse, S_dmask); both extra results carry no gradient. softmax_lse is
                 fp32 (of fp64 fp64), +inf in rows that see no key and have no sink. S_dmask, in q's dtype and
                 for tests only, holds the probabilities in upstream's scale (`attention.dmask`), negative where
                 dropped; it has shape (0,) without dropout
s_aux            learnable sinks, fp16, bf16 or fp32 (heads,). A sink is a score of each head that joins the sum of the
                 softmax and has no value, so the weights of a row's keys add up to less than 1. softmax_lse includes
                 it. It has a gradient. Upstream has no sinks, so it is a keyword alone. transformers passes them by
                 this name
attn_bias        in the functions of dense tensors: q's type or fp32 (1 or batch, 1 or heads, seqlen_q, seqlen_k), added
                 to the scores after softcap. -inf hides a key. An axis of 1 is shared, without a copy. It has a
                 gradient. Not together with dropout_p and alibi_slopes. Upstream has none: a keyword alone, too.
                 A bias of the distance alone is a table (1 or batch, 1 or heads, seqlen_q + seqlen_k - 1): query i and
                 key j read its entry j - i + seqlen_q - 1, forward and backward

Inputs are fp16, bf16 or fp32 (fp64 too on a CPU), head_dim 1 to 512, heads of q a multiple of the heads of k. Under
torch.autocast they are cast to its type, as scaled_dot_product_attention does, unless all are fp16 or all bf16;
flash_attn_with_kvcache casts nothing, as it writes into the cache.
A row that sees no key gives 0, and its softmax_lse is +inf or its sink. Wrong arguments raise TypeError or ValueError
naming the argument, what came and what was wanted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.compiler import is_compiling

from flash_attn.attention.autograd import (
    FlashAttnFunc,
    FlashAttnKVPackedFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenFunc,
    FlashAttnVarlenKVPackedFunc,
    FlashAttnVarlenQKVPackedFunc,
    Result,
    attend,
    differentiable,
)
from flash_attn.attention.backends import has_plans
from flash_attn.attention.dmask import _get_block_size_n
from flash_attn.attention.fp8_cache import has_wide_queries, set_descales
from flash_attn.attention.operators import (
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
)
from flash_attn.attention.operators.kvcache import attend as attend_to_cache
from flash_attn.attention.operators.kvcache import check_pages
from flash_attn.call.arguments import as_int, check_dense, check_kvcache, check_packed, check_varlen, check_whole
from flash_attn.call.autocast import cast
from flash_attn.call.calls import AttentionCall, CacheCall, Options, Window, maybe_contiguous
from flash_attn.call.options import learned
from flash_attn.call.plans import planned
from flash_attn.call.tracing import is_plannable
from flash_attn.core.api import BEFORE_2_7

if BEFORE_2_7:
    from flash_attn.attention.api_2_6 import (
        _flash_attn_backward,
        _flash_attn_forward,
        _flash_attn_varlen_backward,
        _flash_attn_varlen_forward,
    )
else:
    from flash_attn.attention.operators import (
        _flash_attn_backward,
        _flash_attn_forward,
        _flash_attn_varlen_backward,
        _flash_attn_varlen_forward,
    )

_EXTENSION = "flash_attn_cuda" if BEFORE_2_7 else "flash_attn_gpu"

__all__ = [
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]


def __getattr__(name: str) -> ModuleType | bool:
    """flash_attn_gpu (before 2.7: flash_attn_cuda): the functions of upstream's extension, positional arguments and
    all, as a module whose name tells the backend: flash_attn_2_cuda, or flash_attn.flash_attn_triton_amd.interface_v2
    for Triton. Loaded when asked for, as it imports this module. USE_TRITON_ROCM: whether it is Triton."""
    if name not in (_EXTENSION, "USE_TRITON_ROCM"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flash_attn.attention import backends

    by_triton = backends.gpu_backend().name != "flash_attn.attention.backends.ck"
    if name != _EXTENSION:
        return by_triton
    return importlib.import_module(
        "flash_attn.flash_attn_triton_amd.interface_v2" if by_triton else "flash_attn_2_cuda"
    )


# Where `is_compiling` the custom op brings its own autograd.


def round_multiple(x: int, m: int) -> int:
    """The smallest multiple of m that is not below x."""
    return (x + m - 1) // m * m


def _run(serve: Callable[..., Result], inputs: tuple[torch.Tensor, ...], *values: Any) -> Result:
    """The result of `serve(inputs, *values)`. inputs: q, k, v, or the tensors that they are views of."""
    grad = torch.is_grad_enabled()
    if not is_plannable() or not has_plans(inputs[0]) or (grad and inputs[0].requires_grad):
        return serve(inputs, *values)
    return planned(serve, values, lambda own=values: serve(inputs, *own), grad=grad)


def _checked(call: AttentionCall, inputs: tuple[torch.Tensor, ...]) -> Result:
    """The result of a checked call, with a gradient where an input requires one."""
    if torch.is_grad_enabled() and not is_compiling():
        for x in (*inputs, *learned(call.options)):
            if x is not None and x.requires_grad:
                return differentiable(call, *inputs)
    return attend(None, call)


def _dense(inputs: tuple[torch.Tensor, ...], *values: Any) -> Result:
    """Attention of dense tensors. values: q, k, v, deterministic, return_attn_probs and the fields of `Options`."""
    q, k, v, deterministic, return_attn_probs, *options = values
    call = AttentionCall(q, k, v, Options(*options), deterministic, return_attn_probs)
    check_dense(call)
    return _checked(call, inputs)


def _varlen(inputs: tuple[torch.Tensor, ...], *values: Any) -> Result:
    """As `_dense`, of packed sequences, after their starts, their longest lengths and the pages."""
    starts_q, starts_k, longest_q, longest_k, pages, q, k, v, deterministic, return_attn_probs, *options = values
    call = AttentionCall(q, k, v, Options(*options), deterministic, return_attn_probs)
    call.cu_seqlens_q, call.cu_seqlens_k, call.block_table = starts_q, starts_k, pages
    call.max_seqlen_q, call.max_seqlen_k = longest_q, longest_k
    check_varlen(call)
    return _checked(call, inputs)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
) -> Result:
    """Attention of q (batch, seqlen_q, heads, head_dim) over k, v (batch, seqlen_k, heads_k, head_dim).

    Returns out, shaped as q; with return_attn_probs also softmax_lse (batch, heads, seqlen_q) and S_dmask
    (batch, heads, seqlen_q, seqlen_k). Options and errors: the module's docstring.
    """
    q, k, v = cast(q, k, v)
    options = softmax_scale, causal, window_size, softcap, dropout_p, 0, alibi_slopes, s_aux, attn_bias
    return _run(_dense, (q, k, v), q, k, v, deterministic, return_attn_probs, *options)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
) -> Result:
    """flash_attn_func with q, k, v in one tensor (batch, seqlen, 3, heads, head_dim).

    Its gradient comes as one tensor, without a copy.
    """
    check_packed("qkv", qkv, 5, 3)
    (qkv,) = cast(qkv)
    q, k, v = qkv.unbind(-3)
    options = softmax_scale, causal, window_size, softcap, dropout_p, 0, alibi_slopes, s_aux, attn_bias
    return _run(_dense, (qkv,), q, k, v, deterministic, return_attn_probs, *options)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
) -> Result:
    """flash_attn_func with k, v in one tensor (batch, seqlen_k, 2, heads_k, head_dim).

    Its gradient comes as one tensor, without a copy.
    """
    check_packed("kv", kv, 5, 2)
    q, kv = cast(q, kv)
    k, v = kv.unbind(-3)
    options = softmax_scale, causal, window_size, softcap, dropout_p, 0, alibi_slopes, s_aux, attn_bias
    return _run(_dense, (q, kv), q, k, v, deterministic, return_attn_probs, *options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    s_aux: torch.Tensor | None = None,
) -> Result:
    """Attention of sequences end to end: q (total_q, heads, head_dim), k, v (total_k, heads_k, head_dim).

    cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), where each sequence starts and the last one ends.
    max_seqlen_q, max_seqlen_k: the longest lengths, as ints or tensors of one element. With block_table,
    int32 (batch, max_pages), k and v are pages (pages, page_size, heads_k, head_dim), and there is no
    backward (RuntimeError). Rows of q outside every sequence give 0.

    Returns out, shaped as q; with return_attn_probs also softmax_lse (heads, total_q) and S_dmask
    (batch, heads, max_seqlen_q, max_seqlen_k). Options and errors: the module's docstring.
    """
    q, k, v = cast(q, k, v)
    max_seqlen_q = max_seqlen_q if type(max_seqlen_q) is int else as_int("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = max_seqlen_k if type(max_seqlen_k) is int else as_int("max_seqlen_k", max_seqlen_k)
    options = softmax_scale, causal, window_size, softcap, dropout_p, 0, alibi_slopes, s_aux
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table
    return _run(_varlen, (q, k, v), *lengths, q, k, v, deterministic, return_attn_probs, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Result:
    """flash_attn_varlen_func with q, k, v in one tensor (total, 3, heads, head_dim).

    cu_seqlens, int32 (batch + 1,), and max_seqlen serve queries and keys.
    """
    check_packed("qkv", qkv, 4, 3)
    (qkv,) = cast(qkv)
    q, k, v = qkv.unbind(-3)
    max_seqlen = max_seqlen if type(max_seqlen) is int else as_int("max_seqlen", max_seqlen)
    options = softmax_scale, causal, window_size, softcap, dropout_p, 0, alibi_slopes, s_aux
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, None
    return _run(_varlen, (qkv,), *lengths, q, k, v, deterministic, return_attn_probs, *options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Result:
    """flash_attn_varlen_func with k, v in one tensor (total_k, 2, heads_k, head_dim)."""
    check_packed("kv", kv, 4, 2)
    q, kv = cast(q, kv)
    k, v = kv.unbind(-3)
    max_seqlen_q = max_seqlen_q if type(max_seqlen_q) is int else as_int("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = max_seqlen_k if type(max_seqlen_k) is int else as_int("max_seqlen_k", max_seqlen_k)
    options = softmax_scale, causal, window_size, softcap, dropout_p, 0, alibi_slopes, s_aux
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None
    return _run(_varlen, (q, kv), *lengths, q, k, v, deterministic, return_attn_probs, *options)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (batch, seqlen_q, heads, head_dim) over a cache of keys and values; no backward.

    k_cache, v_cache   (batch_cache, seqlen_cache, heads_k, head_dim), or with block_table, int32
                       (batch, max_pages), pages (pages, page_size, heads_k, head_dim)
    k, v               (batch, seqlen_new, heads_k, head_dim): written into the caches at cache_seqlens
    rotary_cos, _sin   (places, rotary_dim / 2), q's dtype; with k only. New key i turns by the angle of place
                       cache_seqlens + i; query i too if causal or in a window, else by the angle of cache_seqlens.
                       rotary_interleaved pairs dims (0, 1), (2, 3), ..., else (i, i + rotary_dim / 2)
    cache_seqlens      int or int32 (batch,): keys in the cache before k; default all. Required with k. From 2.8.4 on
                       RuntimeError where block_table has no room for them, unless a graph is captured
    cache_batch_idx    int32 (batch,): the row of the cache that each sequence uses; not with block_table
    cache_leftpad      int32 (batch,): where each sequence's keys begin
    num_splits         how many splits of the keys, 0 for a choice by shape: speed only
    k_descale, v_descale   fp32 (batch, heads_k), factors of k_cache and v_cache in FP8 (float8_e4m3fnuz on gfx942,
                       float8_e4m3fn elsewhere), None for 1. With one of them the caches are FP8, q is fp16 or bf16, and
                       nothing is appended. Keywords alone, because upstream has none

    head_dim may be larger, 576 for multi-head latent attention, where v_cache is the view k_cache[..., :512] and v the
    view k[..., :512]: at most 64 columns more than v_cache has.

    Returns out, shaped as q with the head dim of v_cache; with return_softmax_lse also softmax_lse
    (batch, heads, seqlen_q), fp32.
    The other options and errors: the module's docstring.
    """
    if cache_seqlens is not None and not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = as_int("cache_seqlens", cache_seqlens)
    if type(num_splits) is not int or num_splits != 0:
        check_whole(num_splits=num_splits)
    values = (
        q, k_cache, v_cache, return_softmax_lse, k_descale, v_descale, k, v, rotary_cos, rotary_sin, cache_seqlens,
        cache_batch_idx, cache_leftpad, block_table, rotary_interleaved, num_splits, softmax_scale, causal, window_size,
        softcap, 0.0, 0, alibi_slopes, s_aux,
    )  # fmt: skip
    if is_plannable() and has_plans(q):
        return planned(_cached, values, lambda own=values: _cached(*own), grad=torch.is_grad_enabled())
    return _cached(*values)


def _cached(*values: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over a cache. values: q, the caches, return_softmax_lse, the descales; then the fields of `CacheCall`
    from k to num_splits, and the fields of `Options`."""
    q, k_cache, v_cache, return_softmax_lse, k_descale, v_descale, *more = values
    call = CacheCall(q, k_cache, v_cache, Options(*more[10:]), *more[:10])
    given = None, k_descale, v_descale
    check_kvcache(call, return_softmax_lse, dtype_cache=k_cache.dtype if has_wide_queries(call, given) else None)
    set_descales(call, given)
    check_pages(call)
    call.q = maybe_contiguous(call.q)
    if call.k is not None and call.v is not None:
        call.k, call.v = maybe_contiguous(call.k), maybe_contiguous(call.v)
    out, softmax_lse = attend_to_cache(call)
    return (out, softmax_lse) if return_softmax_lse else out
