"""The functions of upstream's extension module, in its positional order, for libraries that call it directly.

They run on the backend that serves the tensors: flash_attn.backends.select. Options, shapes and errors are the ones of
flash_attn.flash_attn_interface, whose names the errors give; head_dim has to be a multiple of 8, as upstream.
`zero_tensors` changes nothing: rows outside of every sequence are always zero. A generator given as `gen_` is drawn
from instead of torch's own; from 2.8.4 on it has to be None, as upstream.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from flash_attn import backends
from flash_attn.api import BEFORE_2_7, SINCE_2_8_4, parameters
from flash_attn.arguments import (
    as_int,
    check_alike,
    check_dense,
    check_gradients,
    check_kvcache,
    check_num_splits,
    check_per_sequence,
    check_varlen,
    check_whole,
    diagnose_switches,
)
from flash_attn.calls import AttentionCall, attention_call, cache_call, maybe_contiguous
from flash_attn.custom_ops.kvcache import attend as attend_to_cache
from flash_attn.custom_ops.kvcache import check_pages
from flash_attn.custom_ops.results import complete
from flash_attn.memory import check_outputs
from flash_attn.tracing import is_plain, refuse_transforms
from torch.compiler import is_compiling

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

Function = TypeVar("Function", bound=Callable[..., Any])

# Before 2.7 a forward also returned q, k, v and out as padded.
_RETURNS_INPUTS = BEFORE_2_7
_TAKES_GENERATOR = not SINCE_2_8_4


def _plain(function: Function) -> Function:
    """A function whose tensors' memory is read as it is: it refuses tensor subclasses and transforms of torch.func."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            refuse_transforms(f"flash_attn_2_cuda.{function.__name__}")
        if not is_compiling():
            for name, x in (*zip(names, args, strict=False), *kwargs.items()):
                if not is_plain(x):
                    raise TypeError(
                        f"{name}: got {type(x).__name__}, wanted a torch.Tensor: tensor subclasses go to the functions "
                        "of flash_attn"
                    )
        return function(*args, **kwargs)

    return plain  # type: ignore[return-value]


def _check(
    q: torch.Tensor, v: torch.Tensor, softmax_scale: float, out: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> None:  # fmt: skip
    """What these functions ask for beyond the public ones, of arguments that are otherwise checked."""
    if softmax_scale is None:
        raise TypeError("softmax_scale: got None, wanted a number")
    if q.shape[-1] % 8:
        raise ValueError(f"q: got head_dim {q.shape[-1]}, wanted a multiple of 8: pad q, k and v with zeros")
    if out is not None:
        check_alike("out", out, q, "q", head_dim=v.shape[-1])
    if generator is not None and not _TAKES_GENERATOR:
        raise RuntimeError("gen_: the `generator` argument is no longer supported: pass None, seed torch's own")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"gen_: got {type(generator).__name__}, wanted a torch.Generator or None")


def _forward(call: AttentionCall, generator: torch.Generator | None) -> list[torch.Tensor]:
    """The results of a checked call, its dropout drawn from a generator where one is given."""
    q = call.q
    if generator is not None and call.options.dropout_p > 0.0:
        call.options.rng_state = torch.randint(2**31 - 1, (2,), dtype=torch.int64, device=q.device, generator=generator)
    call.q, call.k, call.v = maybe_contiguous(q), maybe_contiguous(call.k), maybe_contiguous(call.v)
    given = call.out
    inputs = {
        "q": q, "k": call.k, "v": call.v, "alibi_slopes": call.options.alibi_slopes, "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k, "seqused_k": call.seqused_k, "leftpad_k": call.leftpad_k,
        "block_table": call.block_table,
    }  # fmt: skip
    if given is not None and check_outputs({"out": given}, inputs):
        call.out = None
    out, softmax_lse, dmask, rng_state = complete(q, backends.select(q).forward(call))
    if given is not None and call.out is None:
        out = given.copy_(out)
    if _RETURNS_INPUTS:
        return [out, call.q, call.k, call.v, out, softmax_lse, dmask, rng_state]
    return [out, softmax_lse, dmask, rng_state]


@_plain
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
    call = attention_call(
        q=q, k=k, v=v, softmax_scale=softmax_scale, causal=is_causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, alibi_slopes=alibi_slopes_, dropout_p=p_dropout, return_softmax=return_softmax, out=out_,
    )  # fmt: skip
    check_dense(call)
    _check(q, v, softmax_scale, out_, gen_)
    return _forward(call, gen_)


@_plain
@parameters(since={"num_splits": "2.8.4"})
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
    num_splits: int = 0,
) -> list[torch.Tensor]:
    """As `fwd`, for packed sequences. num_splits: speed only; RuntimeError above 1 with block_table_, as upstream."""
    check_num_splits(num_splits, block_table_)
    max_seqlen_q, max_seqlen_k = as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k)
    call = attention_call(
        q=q, k=k, v=v, softmax_scale=softmax_scale, causal=is_causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, alibi_slopes=alibi_slopes_, dropout_p=p_dropout, return_softmax=return_softmax, out=out_,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        seqused_k=seqused_k, leftpad_k=leftpad_k_, block_table=block_table_,
    )  # fmt: skip
    check_varlen(call)
    check_per_sequence(q, call.batch, seqused_k=seqused_k, leftpad_k=leftpad_k_)
    diagnose_switches(None, zero_tensors=zero_tensors)
    _check(q, v, softmax_scale, out_, gen_)
    return _forward(call, gen_)


@_plain
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
    call = attention_call(
        q=q, k=k, v=v, softmax_scale=softmax_scale, causal=is_causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, alibi_slopes=alibi_slopes_, dropout_p=p_dropout, deterministic=deterministic,
        rng_state=rng_state,
    )  # fmt: skip
    check_dense(call)
    _check(q, v, softmax_scale, None, gen_)
    gradients = check_gradients(call, dout, out, softmax_lse, (dq_, dk_, dv_))
    softmax_d = backends.select(q).backward(gradients)
    return [gradients.dq, gradients.dk, gradients.dv, softmax_d]


@_plain
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
    call = attention_call(
        q=q, k=k, v=v, softmax_scale=softmax_scale, causal=is_causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, alibi_slopes=alibi_slopes_, dropout_p=p_dropout, deterministic=deterministic,
        rng_state=rng_state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    check_varlen(call)
    diagnose_switches(None, zero_tensors=zero_tensors)
    _check(q, v, softmax_scale, None, gen_)
    gradients = check_gradients(call, dout, out, softmax_lse, (dq_, dk_, dv_))
    softmax_d = backends.select(q).backward(gradients)
    return [gradients.dq, gradients.dk, gradients.dv, softmax_d]


@_plain
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
    call = cache_call(
        q=q, k_cache=kcache, v_cache=vcache, softmax_scale=softmax_scale, k=k_, v=v_, rotary_cos=rotary_cos_,
        rotary_sin=rotary_sin_, cache_seqlens=seqlens_k_, cache_batch_idx=cache_batch_idx_, cache_leftpad=leftpad_k_,
        block_table=block_table_, causal=is_causal, window_size=(window_size_left, window_size_right), softcap=softcap,
        rotary_interleaved=is_rotary_interleaved, alibi_slopes=alibi_slopes_, num_splits=num_splits, out=out_,
    )  # fmt: skip
    check_kvcache(call, True)
    check_whole(num_splits=num_splits)
    _check(q, vcache, softmax_scale, out_)
    check_pages(call)
    call.q = maybe_contiguous(q)
    out, softmax_lse = attend_to_cache(call)
    return [out, softmax_lse]
