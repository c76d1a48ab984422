"""The functions of upstream's extension module, in its positional order, for libraries that call it directly.

They run on the backend that serves the tensors: flash_attn.backends.select. Options, shapes and errors are those of
flash_attn.flash_attn_interface; head_dim has to be a multiple of 8, as upstream. `zero_tensors` changes nothing:
rows outside of every sequence are always zero. A generator given as `gen_` is drawn from instead of torch's own.
"""

from __future__ import annotations

import torch
from flash_attn import __version__, custom_ops
from flash_attn.arguments import as_int, check_dense, check_kvcache, check_varlen
from flash_attn.backends import select
from flash_attn.custom_ops import maybe_contiguous
from flash_attn.kvcache_op import attend as attend_to_cache

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

# Before 2.7 a forward also returned q, k, v and out as padded.
_RETURNS_INPUTS = tuple(map(int, __version__.split(".")[:2])) < (2, 7)


def _checked(q: torch.Tensor) -> None:
    if q.shape[-1] % 8:
        raise ValueError(f"q: got head_dim {q.shape[-1]}, wanted a multiple of 8: pad q, k and v with zeros")


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
    out, softmax_lse, dmask, rng_state = custom_ops._complete(q, results)
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
        softmax_scale, is_causal, False, False,
    )  # fmt: skip
    _checked(q)
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
    zero_tensors: bool,  # noqa: ARG001
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
        softmax_scale, is_causal, False, False, block_table_,
    )  # fmt: skip
    _checked(q)
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
    gen_: torch.Generator | None = None,  # noqa: ARG001 - upstream draws what only a missing rng_state needs
    rng_state: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[dq, dk, dv, softmax_d], in the gradients given, or new ones. ValueError for dropout without rng_state."""
    left, right = check_dense(
        q, k, v, p_dropout, (window_size_left, window_size_right), softcap, alibi_slopes_,
        softmax_scale, is_causal, False, False,
    )  # fmt: skip
    _checked(q)
    dq, dk, dv = _gradients((q, k, v), (dq_, dk_, dv_), p_dropout, rng_state)
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
    zero_tensors: bool,  # noqa: ARG001
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_: torch.Generator | None = None,  # noqa: ARG001
    rng_state: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """As `bwd`, for packed sequences."""
    max_seqlen_q, max_seqlen_k = as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k)
    left, right = check_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout,
        (window_size_left, window_size_right), softcap, alibi_slopes_,
        softmax_scale, is_causal, False, False, None,
    )  # fmt: skip
    _checked(q)
    dq, dk, dv = _gradients((q, k, v), (dq_, dk_, dv_), p_dropout, rng_state)
    dout, q, k, v, out = (maybe_contiguous(x) for x in (dout, q, k, v, out))
    softmax_d = select(q).backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, is_causal, left, right, softcap, alibi_slopes_,
        p_dropout, deterministic, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    return [dq, dk, dv, softmax_d]


def _gradients(
    inputs: tuple[torch.Tensor, ...],
    given: tuple[torch.Tensor | None, ...],
    dropout_p: float,
    rng_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    if dropout_p > 0.0 and rng_state is None:
        raise ValueError("rng_state: got None, wanted what the forward returned, as p_dropout > 0")
    for name, x, gradient in zip(("dq", "dk", "dv"), inputs, given, strict=True):
        if gradient is not None and (gradient.shape != x.shape or gradient.dtype is not x.dtype):
            raise ValueError(f"{name}: got {gradient.dtype} {tuple(gradient.shape)}, wanted {x.dtype} {tuple(x.shape)}")
    return tuple(
        torch.empty_like(x) if gradient is None else gradient for x, gradient in zip(inputs, given, strict=True)
    )


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
    if num_splits < 0:
        raise ValueError(f"num_splits: got {num_splits}, wanted 0 or more")
    _checked(q)
    out, softmax_lse = attend_to_cache(
        maybe_contiguous(q), kcache, vcache, k_, v_, rotary_cos_, rotary_sin_, seqlens_k_, cache_batch_idx_,
        leftpad_k_, block_table_, softmax_scale, is_causal, left, right, softcap, is_rotary_interleaved,
        alibi_slopes_, num_splits, out=out_,
    )  # fmt: skip
    return [out, softmax_lse]
