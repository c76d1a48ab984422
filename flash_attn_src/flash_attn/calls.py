"""A call of attention as one value: the interfaces make it, autograd keeps it, the backends serve it.

A new option is a field here, a check in flash_attn.arguments, and the backends that use it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import torch

from flash_attn.block_mask import BlockMask

Window = tuple[int, int]
Descales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

_Call = TypeVar("_Call", "AttentionCall", "CacheCall")
# Tensors and options that a backward needs besides q, k and v: see AttentionCall.tensors and AttentionCall.options.
Tensors = tuple[
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None,
    torch.Tensor | None,
]  # fmt: skip
Options = tuple[Any, ...]


def maybe_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy if its last dimension is strided."""
    return x.contiguous() if x.stride(-1) != 1 else x


def new_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A tensor for the result of attention of q: shaped as q, with the head dim of v. A result of FP8 is bf16."""
    dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)


def replace(call: _Call, **changes: Any) -> _Call:
    """A copy of a call with some fields changed. dataclasses.replace takes twice as long."""
    copy = object.__new__(type(call))
    for name in _FIELDS[type(call)]:
        setattr(copy, name, changes[name] if name in changes else getattr(call, name))
    return copy


@dataclass(slots=True, eq=False)
class AttentionCall:
    """Attention of q over k and v, forward and backward.

    The checks of flash_attn.arguments and flash_attn.autograd complete a call. It must not change after that: a backend
    that needs a different call makes a copy with `replace`. Fields are slots, because reading them is part of every
    call's time.

    q                  (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q
    k, v               (batch, seqlen_k, heads_k, head_dim), or (total_k, heads_k, head_dim) with cu_seqlens_k, or
                       pages (pages, page_size, heads_k, head_dim) with block_table; v may have a head dim of its own,
                       which out has too
    softmax_scale      None stands for head_dim ** -0.5 until the checks put it in
    window_size        (left, right), -1 where open
    alibi_slopes       fp32 (heads,) or (batch, heads)
    return_softmax     whether S_dmask is wanted, which exists with dropout only
    rng_state          int64 (2,): where dropout's random numbers come from; None with dropout: the backend draws it
    cu_seqlens_q, _k   int32 (batch + 1,): where each packed sequence starts, and where the last one ends
    max_seqlen_q, _k   the longest lengths; 0 for dense tensors, whose shape tells
    seqused_k          int32 (batch,): how many keys of each sequence count
    leftpad_k          int32 (batch,): where each sequence's keys begin
    block_table        int32 (batch, max_pages): the pages of each sequence
    out                the result goes there; None: to a new tensor
    descales           fp32 (batch, heads) of q, k and v for attention in FP8, None for each tensor that is cast
    s_aux              fp16, bf16 or fp32 (heads,): the sinks. A sink is a score of each query head that joins the sum
                       of the softmax and has no value
    attn_bias          q's dtype or fp32 (1 or batch, 1 or heads, seqlen_q, seqlen_k): added to the scores after
                       softcap, -inf hides a key; dense tensors only, without dropout and ALiBi
    block_mask         which blocks of keys a block of queries sees; dense tensors only, on Triton and on a CPU
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    return_softmax: bool = False
    rng_state: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    seqused_k: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    out: torch.Tensor | None = None
    descales: Descales | None = None
    s_aux: torch.Tensor | None = None
    attn_bias: torch.Tensor | None = None
    block_mask: BlockMask | None = None

    @property
    def scale(self) -> float:
        """softmax_scale of a checked call."""
        assert self.softmax_scale is not None
        return self.softmax_scale

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def longest_q(self) -> int:
        """Queries of the longest sequence."""
        return self.q.shape[1] if self.cu_seqlens_q is None else self.max_seqlen_q

    @property
    def longest_k(self) -> int:
        """Keys of the longest sequence, as far as the host knows."""
        packed = self.cu_seqlens_q is not None or self.block_table is not None
        return self.max_seqlen_k if packed else self.k.shape[1]

    @property
    def is_inference(self) -> bool:
        """Whether the call has an option that no backward supports."""
        return self.block_table is not None or self.leftpad_k is not None or self.seqused_k is not None

    def tensors(self) -> Tensors:
        """The tensors other than q, k and v that a backward needs, for `restore`."""
        lengths = self.cu_seqlens_q, self.cu_seqlens_k
        return self.alibi_slopes, self.rng_state, *lengths, self.s_aux, self.attn_bias

    def options(self) -> Options:
        """What is no tensor and a backward needs, for `restore`."""
        return (
            *(self.softmax_scale, self.causal, self.window_size, self.softcap, self.dropout_p, self.deterministic),
            *(self.max_seqlen_q, self.max_seqlen_k),
        )


def attention_call(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    deterministic: bool,
    return_softmax: bool,
) -> AttentionCall:
    """An AttentionCall by name. Calling the class by keywords builds a dict first, which takes 0.3 us more."""
    return AttentionCall(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, deterministic, return_softmax
    )


def restore(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Tensors, options: Options) -> AttentionCall:
    """The call whose tensors() and options() were kept, as a backward needs it."""
    call = AttentionCall(q, k, v)
    call.alibi_slopes, call.rng_state, call.cu_seqlens_q, call.cu_seqlens_k, call.s_aux, call.attn_bias = tensors
    (
        call.softmax_scale, call.causal, call.window_size, call.softcap, call.dropout_p, call.deterministic,
        call.max_seqlen_q, call.max_seqlen_k,
    ) = options  # fmt: skip
    return call


class ForwardResult(NamedTuple):
    """The result of a backend's forward.

    softmax_lse    fp32, of fp64 fp64: (batch, heads, seqlen_q), packed (heads, total_q), sinks included; +inf in rows
                   without a key and a sink. out is 0 in rows without a key
    probabilities  (batch, heads, seqlen_q, seqlen_k) in q's dtype, negative where dropped; None unless asked for
    """

    out: torch.Tensor
    softmax_lse: torch.Tensor
    probabilities: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None


class Fp8Result(NamedTuple):
    """What a backend's forward in FP8 gives; descales fp32 (batch, heads) of q, k and v."""

    out: torch.Tensor
    softmax_lse: torch.Tensor
    rng_state: torch.Tensor | None
    descales: tuple[torch.Tensor, ...]


@dataclass(slots=True, eq=False)
class GradientCall:
    """The gradients of attention: dq, dk and dv are written, and dbias where it is wanted.

    forward      the call whose gradients these are; with dropout its rng_state is the one that the forward drew
    dout         the gradient of out; out, softmax_lse: what the forward gave
    dq, dk, dv   shaped as q, k and v
    dbias        contiguous, shaped as the forward's attn_bias; None: it is not wanted
    """

    forward: AttentionCall
    dout: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class CacheCall:
    """The arguments of flash_attn_with_kvcache, and those that FlashAttention-3 adds.

    q                  (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q and
                       max_seqlen_q
    k, v               (batch, seqlen_new, heads_k, head_dim), or (total_new, heads_k, head_dim) with cu_seqlens_k_new;
                       v and v_cache may have a head dim of their own, which out has too
    softmax_scale      None stands for head_dim ** -0.5 until the checks put it in
    window_size        (left, right), -1 where open
    out                written where given, else new
    rotary_seqlens     int32 (batch,): where rotary angles start instead of at cache_seqlens
    attention_chunk    > 0: a query sees keys of its own chunk of so many only
    num_splits, sm_margin, max_seqlen_k   speed only: splits of the keys (0: by shape), multiprocessors that are left
                       alone, the most keys of a sequence where the host knows and the cache has room for more
    descales           fp32 (batch, heads_k) of q, k and v: the caches are FP8 tensors, q is FP8 (the result is bf16),
                       bf16 or fp16 (nothing is appended); no rotary embedding
    s_aux              as in AttentionCall
    qv                 shaped as out: a second query, for which the values are keys: the scores are q k^T + qv v^T
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    softmax_scale: float | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    cache_seqlens: int | torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    causal: bool = False
    window_size: Window = (-1, -1)
    softcap: float = 0.0
    rotary_interleaved: bool = True
    alibi_slopes: torch.Tensor | None = None
    num_splits: int = 0
    out: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 0
    cu_seqlens_k_new: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None
    attention_chunk: int = 0
    sm_margin: int = 0
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    max_seqlen_k: int | None = None
    s_aux: torch.Tensor | None = None
    qv: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        """softmax_scale of a checked call."""
        assert self.softmax_scale is not None
        return self.softmax_scale

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def seqlen_q(self) -> int:
        """Queries of the longest sequence."""
        return self.q.shape[1] if self.cu_seqlens_q is None else self.max_seqlen_q

    @property
    def capacity(self) -> int:
        """Keys that the cache has room for, of each sequence."""
        return self.k_cache.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def length(self) -> int:
        """The most keys that the cache holds of a sequence before k, as far as the host knows."""
        if isinstance(self.cache_seqlens, int):
            return self.cache_seqlens
        return self.capacity if self.max_seqlen_k is None else min(self.max_seqlen_k, self.capacity)

    @property
    def lengths(self) -> torch.Tensor | None:
        """The number of cached keys of each sequence, as a device tensor."""
        return None if isinstance(self.cache_seqlens, int) else self.cache_seqlens

    @property
    def added(self) -> int:
        """The most new keys that a sequence gets, as far as the host knows."""
        if self.k is None:
            return 0
        return self.k.shape[1 if self.cu_seqlens_k_new is None else 0]

    @property
    def rotates_each_query(self) -> bool:
        """Whether rotary embedding turns query i by the angle of its own position, not by the first query's."""
        return self.causal or self.window_size[0] >= 0 or self.window_size[1] >= 0 or self.attention_chunk > 0


_FIELDS = {call: tuple(field.name for field in fields(call)) for call in (AttentionCall, CacheCall)}
