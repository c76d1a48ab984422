"""A call of attention as one value: the interfaces make it, autograd keeps it, the backends serve it.

What modifies scores is one value inside of it: `flash_attn.call.options`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flash_attn.call.mask import block_size_of, mask_of
from flash_attn.call.options import FIELDS, Options, Window, known, option_tensors, replace

__all__ = [
    "AttentionCall", "CacheCall", "Descales", "ForwardResult", "Fp8Result", "GradientCall", "Kept", "Options", "Window",
    "attention_call", "cache_call", "kept", "maybe_contiguous", "new_out", "replace", "restore",
]  # fmt: skip

Descales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def maybe_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy if its last dimension is strided."""
    return x.contiguous() if x.stride(-1) != 1 else x


def new_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A tensor for the result of attention of q: shaped as q, with the head dim of v. A result of FP8 is bf16."""
    dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)


@known
@dataclass(slots=True, eq=False)
class AttentionCall:
    """Attention of q over k and v, forward and backward.

    The checks of `call.arguments` and `attention.autograd` complete a call. It must not change after that: a backend
    that needs a different call makes a copy with `replace`. Fields are slots, because reading them is part of every
    call's time.

    q                  (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q
    k, v               (batch, seqlen_k, heads_k, head_dim), or (total_k, heads_k, head_dim) with cu_seqlens_k, or
                       pages (pages, page_size, heads_k, head_dim) with block_table; v may have a head dim of its own,
                       which out has too
    options            what modifies scores; a call with an option that a door does not name is refused there
    return_softmax     whether S_dmask is wanted, which exists with dropout only
    cu_seqlens_q, _k   int32 (batch + 1,): where each packed sequence starts, and where the last one ends
    max_seqlen_q, _k   the longest lengths; 0 for dense tensors, whose shape tells
    seqused_k          int32 (batch,): how many keys of each sequence count
    leftpad_k          int32 (batch,): where each sequence's keys begin
    block_table        int32 (batch, max_pages): the pages of each sequence
    out                the result goes there; None: to a new tensor
    descales           fp32 (batch, heads) of q, k and v for attention in FP8, None for each tensor that is cast
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: Options = field(default_factory=Options)
    deterministic: bool = False
    return_softmax: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    seqused_k: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    out: torch.Tensor | None = None
    descales: Descales | None = None

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


class Kept(NamedTuple):
    """What a backward needs of a call besides q, k and v: the tensors, and what is none."""

    tensors: tuple[torch.Tensor | None, ...]
    rest: tuple[Any, ...]


_LENGTHS = 2  # tensors of a call itself that a backward needs


def kept(call: AttentionCall) -> Kept:
    """What `restore` makes the call from again. Pages, lengths and paddings have no backward."""
    options, kind = call.options, FIELDS[type(call.options)]
    return Kept(
        (call.cu_seqlens_q, call.cu_seqlens_k, *option_tensors(options)),
        (
            *(call.deterministic, call.max_seqlen_q, call.max_seqlen_k, type(options), block_size_of(options.mask)),
            *[getattr(options, name) for name in kind.plain],
        ),
    )


def restore(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: tuple[torch.Tensor | None, ...], rest: tuple[Any, ...]
) -> AttentionCall:
    """The call from which `kept` took these values."""
    deterministic, max_seqlen_q, max_seqlen_k, of_options, block_size, *plain = rest
    kind = FIELDS[of_options]
    parts = _LENGTHS + len(kind.tensors)
    values = dict(zip((*kind.tensors, *kind.plain), (*tensors[_LENGTHS:parts], *plain), strict=True))
    # By hand, because Dynamo does not trace a default factory.
    call = AttentionCall(q, k, v, of_options(**values))
    if tensors[parts:]:
        call.options.mask = mask_of(tensors[parts:], block_size)
    call.cu_seqlens_q, call.cu_seqlens_k = tensors[:_LENGTHS]
    call.deterministic, call.max_seqlen_q, call.max_seqlen_k = deterministic, max_seqlen_q, max_seqlen_k
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


@known
@dataclass(slots=True, eq=False)
class CacheCall:
    """The arguments of flash_attn_with_kvcache, and those that FlashAttention-3 adds.

    q                  (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q and
                       max_seqlen_q
    k, v               (batch, seqlen_new, heads_k, head_dim), or (total_new, heads_k, head_dim) with cu_seqlens_k_new;
                       v and v_cache may have a head dim of their own, which out has too
    options            what modifies scores, as in AttentionCall
    out                written where given, else new
    rotary_seqlens     int32 (batch,): where rotary angles start instead of at cache_seqlens
    num_splits, sm_margin, max_seqlen_k   speed only: splits of the keys (0: by shape), multiprocessors that are left
                       alone, the most keys of a sequence where the host knows and the cache has room for more
    descales           fp32 (batch, heads_k) of q, k and v: the caches are FP8 tensors, q is FP8 (the result is bf16),
                       bf16 or fp16 (nothing is appended); no rotary embedding
    qv                 shaped as out: a second query, for which the values are keys: the scores are q k^T + qv v^T
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    options: Options = field(default_factory=Options)
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    cache_seqlens: int | torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    rotary_interleaved: bool = True
    num_splits: int = 0
    out: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 0
    cu_seqlens_k_new: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None
    sm_margin: int = 0
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    max_seqlen_k: int | None = None
    qv: torch.Tensor | None = None

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
        options = self.options
        left, right = options.window_size
        return options.causal or left >= 0 or right >= 0 or options.attention_chunk > 0


def attention_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> AttentionCall:
    """A call whose fields and options are given side by side, by name. Raises TypeError for another name.

    The public functions make a call and its options themselves, which takes less time.
    """
    return AttentionCall(q, k, v, _take_options(given), **given)


def cache_call(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **given: Any) -> CacheCall:
    """`attention_call` over a cache."""
    return CacheCall(q, k_cache, v_cache, _take_options(given), **given)


def _take_options(arguments: dict[str, Any]) -> Options:
    return Options(**{name: arguments.pop(name) for name in FIELDS[Options].names if name in arguments})
