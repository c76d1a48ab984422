"""The functions of upstream's extension module, in its positional order, for libraries that call it directly.

They run on the backend that serves the tensors: flash_attn.backends.select. Options, shapes and errors are those of
flash_attn.flash_attn_interface, whose names the errors give; head_dim has to be a multiple of 8, as upstream.
`zero_tensors` changes nothing: rows outside of every sequence are always zero. A generator given as `gen_` is drawn
from instead of torch's own.
"""

from __future__ import annotations

import torch
from flash_attn import __version__, custom_ops
from flash_attn.arguments import (
    as_int,
    check_alike,
    check_dense,
    check_gradients,
    check_kvcache,
    check_per_sequence,
    check_varlen,
    check_whole,
    diagnose_switches,
)
from flash_attn.backends import select
from flash_attn.calls import CacheCall
from flash_attn.custom_ops import maybe_contiguous
from flash_attn.custom_ops.kvcache import attend as attend_to_cache

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

# Before 2.7 a forward also returned q, k, v and out as padded.
_RETURNS_INPUTS = tuple(map(int, __version__.split(".")[:2])) < (2, 7)


def _check(
    q: torch.Tensor, softmax_scale: float, out: torch.Tensor | None = None, generator: torch.Generator | None = None
) -> None:
    """What these functions ask for beyond the public ones, of arguments that are otherwise checked."""
    if softmax_scale is None:
        raise TypeError("softmax_scale: got None, wanted a number")
    if q.shape[-1] % 8:
        raise ValueError(f"q: got head_dim {q.shape[-1]}, wanted a multiple of 8: pad q, k and v with zeros")
    if out is not None:
        check_alike("out", out, q, "q")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"gen_: got {type(generator).__name__}, wanted a torch.Generator or None")


def _state(q: torch.Tensor, dropout_p: float, generator: torch.Generator | None) -> torch.Tensor | None:
    if generator is None or dropout_p == 0.0:
        return None
    return torch.randint(2**31 - 1, (2,), dtype=torch.int64, device=q.device, generator=generator)


def _results(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
) -> list[torch.Tensor]:
    out, softmax_lse, dmask, rng_state = custom_ops.complete(q, results)
    if _RETURNS_INPUTS:
        return [out, q, k, v, out, softmax_lse, dmask, rng_state]
    return [out, softmax_lse, dmask, rng_state]


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_: torch.Tensor | None,
    alibi_slopes_: torch.Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_: torch.Generator | None = None,
) -> list[torch.Tensor]:
    """[out, softmax_lse, S_dmask, rng_state]; 2.6: [out, q, k, v, out, softmax_lse, S_dmask, rng_state]."""
    left, right = check_dense(
        q, k, v, p_dropout, (window_size_left, window_size_right), softcap, alibi_slopes_,
        softmax_scale, is_causal, False, return_softmax,
    )  # fmt: skip
    _check(q, softmax_scale, out_, gen_)
    q, k, v = (maybe_contiguous(x) for x in (q, k, v))
    results = select(q).forward(
        q, k, v, out_, softmax_scale, is_causal, left, right, softcap, alibi_slopes_, p_dropout, return_softmax,
        _state(q, p_dropout, gen_), None, None, q.shape[1], k.shape[1], None, None, None,
    )  # fmt: skip
    return _results(q, k, v, results)


def varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    leftpad_k_: torch.Tensor | None,
    block_table_: torch.Tensor | None,
    alibi_slopes_: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_: torch.Generator | None = None,
) -> list[torch.Tensor]:
    """As `fwd`, for packed sequences."""
    max_seqlen_q, max_seqlen_k = as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k)
    left, right = check_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout,
        (window_size_left, window_size_right), softcap, alibi_slopes_,
        softmax_scale, is_causal, False, return_softmax, block_table_,
    )  # fmt: skip
    check_per_sequence(q, cu_seqlens_q.shape[0] - 1, seqused_k=seqused_k, leftpad_k=leftpad_k_)
    diagnose_switches(None, zero_tensors=zero_tensors)
    _check(q, softmax_scale, out_, gen_)
    q, k, v = (maybe_contiguous(x) for x in (q, k, v))
    results = select(q).forward(
        q, k, v, out_, softmax_scale, is_causal, left, right, softcap, alibi_slopes_, p_dropout, return_softmax,
        _state(q, p_dropout, gen_), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k_,
        block_table_,
    )  # fmt: skip
    return _results(q, k, v, results)


def bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq_: torch.Tensor | None,
    dk_: torch.Tensor | None,
    dv_: torch.Tensor | None,
    alibi_slopes_: torch.Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_: torch.Generator | None = None,
    rng_state: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[dq, dk, dv, softmax_d], in the gradients given, or new ones. ValueError for dropout without rng_state."""
    left, right = check_dense(
        q, k, v, p_dropout, (window_size_left, window_size_right), softcap, alibi_slopes_,
        softmax_scale, is_causal, deterministic, False,
    )  # fmt: skip
    _check(q, softmax_scale, None, gen_)
    softmax_lse = check_gradients(dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, p_dropout, rng_state)
    dq, dk, dv = custom_ops.gradients((q, k, v), (dq_, dk_, dv_))
    dout, q, k, v, out = (maybe_contiguous(x) for x in (dout, q, k, v, out))
    softmax_d = select(q).backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, is_causal, left, right, softcap, alibi_slopes_,
        p_dropout, deterministic, rng_state, None, None, q.shape[1], k.shape[1],
    )  # fmt: skip
    return [dq, dk, dv, softmax_d]


def varlen_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq_: torch.Tensor | None,
    dk_: torch.Tensor | None,
    dv_: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes_: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_: torch.Generator | None = None,
    rng_state: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """As `bwd`, for packed sequences."""
    max_seqlen_q, max_seqlen_k = as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k)
    left, right = check_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout,
        (window_size_left, window_size_right), softcap, alibi_slopes_,
        softmax_scale, is_causal, deterministic, False, None,
    )  # fmt: skip
    diagnose_switches(None, zero_tensors=zero_tensors)
    _check(q, softmax_scale, None, gen_)
    softmax_lse = check_gradients(dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, p_dropout, rng_state)
    dq, dk, dv = custom_ops.gradients((q, k, v), (dq_, dk_, dv_))
    dout, q, k, v, out = (maybe_contiguous(x) for x in (dout, q, k, v, out))
    softmax_d = select(q).backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, is_causal, left, right, softcap, alibi_slopes_,
        p_dropout, deterministic, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    return [dq, dk, dv, softmax_d]


def fwd_kvcache(
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    k_: torch.Tensor | None,
    v_: torch.Tensor | None,
    seqlens_k_: torch.Tensor | None,
    rotary_cos_: torch.Tensor | None,
    rotary_sin_: torch.Tensor | None,
    cache_batch_idx_: torch.Tensor | None,
    leftpad_k_: torch.Tensor | None,
    block_table_: torch.Tensor | None,
    alibi_slopes_: torch.Tensor | None,
    out_: torch.Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[torch.Tensor]:
    """[out, softmax_lse]; writes k_, v_ into the caches."""
    left, right = check_kvcache(
        q, kcache, vcache, k_, v_, rotary_cos_, rotary_sin_, seqlens_k_, cache_batch_idx_, leftpad_k_, block_table_,
        (window_size_left, window_size_right), softcap, alibi_slopes_, softmax_scale, is_causal,
        is_rotary_interleaved, True,
    )  # fmt: skip
    check_whole(num_splits=num_splits)
    _check(q, softmax_scale, out_)
    out, softmax_lse = attend_to_cache(CacheCall(
        maybe_contiguous(q), kcache, vcache, softmax_scale, k_, v_, rotary_cos_, rotary_sin_, seqlens_k_,
        cache_batch_idx_, leftpad_k_, block_table_, is_causal, left, right, softcap, is_rotary_interleaved,
        alibi_slopes_, num_splits, out_,
    ))  # fmt: skip
    return [out, softmax_lse]
