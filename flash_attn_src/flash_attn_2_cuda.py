"""The functions of upstream's extension module, in its positional order, for libraries that call it directly.

They run on the backend that serves the tensors: `attention.backends.select`. Options, shapes and errors are the ones of
flash_attn.flash_attn_interface, whose names the errors give; head_dim has to be a multiple of 8, as upstream.
`zero_tensors` changes nothing: rows outside of every sequence are always zero. A generator given as `gen_` is drawn
from instead of torch's own; from 2.8.4 on it has to be None, as upstream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from flash_attn.attention import backends
from flash_attn.attention.operators.kvcache import attend as attend_to_cache
from flash_attn.attention.operators.kvcache import check_pages
from flash_attn.attention.operators.results import complete
from flash_attn.call.arguments import (
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
from flash_attn.call.calls import AttentionCall, attention_call, cache_call, maybe_contiguous
from flash_attn.call.memory import check_outputs
from flash_attn.call.tracing import is_plain, refuse_transforms
from flash_attn.core.api import BEFORE_2_7, SINCE_2_8_4, by_name, parameters
from torch.compiler import is_compiling

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

# Before 2.7 a forward also returned q, k, v and out as padded.
_RETURNS_INPUTS = BEFORE_2_7
_TAKES_GENERATOR = not SINCE_2_8_4


_Named = dict[str, Any]
# An argument's name -> the name of the call's field or option, where it is another one without the underscore.
_FIELDS = {
    "kcache": "k_cache", "vcache": "v_cache", "seqlens_k": "cache_seqlens", "p_dropout": "dropout_p",
    "is_causal": "causal", "is_rotary_interleaved": "rotary_interleaved", "gen": "generator",
}  # fmt: skip
_OPTIONS = "is_causal window_size_left window_size_right softcap"
_LENGTHS = "max_seqlen_q max_seqlen_k"
_GRADIENTS = "dout q k v out softmax_lse dq_? dk_? dv_?"
_SEEDS = {"gen_": None, "rng_state": None}


def _extension(
    names: str, defaults: dict[str, Any] | None = None
) -> Callable[[Callable[[_Named], list[torch.Tensor]]], Callable[..., list[torch.Tensor]]]:
    """Make a function of a call's fields by name take upstream's parameters.

    Tensors' memory is read as it is: the function refuses tensor subclasses and transforms of torch.func.
    """

    def decorate(function: Callable[[_Named], list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
        @functools.wraps(function)
        def plain(named: _Named) -> list[torch.Tensor]:
            if torch._C._are_functorch_transforms_active():
                refuse_transforms(f"flash_attn_2_cuda.{function.__name__}")
            for name, x in named.items():
                if not is_compiling() and not is_plain(x):
                    raise TypeError(
                        f"{name}: got {type(x).__name__}, wanted a torch.Tensor: tensor subclasses go to the functions "
                        "of flash_attn"
                    )
            fields = {_FIELDS.get(name.rstrip("_"), name.rstrip("_")): x for name, x in named.items()}
            fields["window_size"] = fields.pop("window_size_left"), fields.pop("window_size_right")
            for name in _LENGTHS.split():
                if name in fields:
                    fields[name] = as_int(name, fields[name])
            if "zero_tensors" in fields:
                diagnose_switches(None, zero_tensors=fields.pop("zero_tensors"))
            return function(fields)

        return by_name(names, defaults)(plain)

    return decorate


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
    buffer = call.out
    inputs = {
        "q": q, "k": call.k, "v": call.v, "alibi_slopes": call.options.alibi_slopes, "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k, "seqused_k": call.seqused_k, "leftpad_k": call.leftpad_k,
        "block_table": call.block_table,
    }  # fmt: skip
    if buffer is not None and check_outputs({"out": buffer}, inputs):
        call.out = None
    out, softmax_lse, dmask, rng_state = complete(q, backends.select(q).forward(call))
    if buffer is not None and call.out is None:
        out = buffer.copy_(out)
    if _RETURNS_INPUTS:
        return [out, call.q, call.k, call.v, out, softmax_lse, dmask, rng_state]
    return [out, softmax_lse, dmask, rng_state]


@_extension(f"q k v out_? alibi_slopes_? p_dropout softmax_scale {_OPTIONS} return_softmax gen_?", {"gen_": None})
def fwd(fields: _Named) -> list[torch.Tensor]:
    """[out, softmax_lse, S_dmask, rng_state]; 2.6: [out, q, k, v, out, softmax_lse, S_dmask, rng_state]."""
    generator = fields.pop("generator")
    call = attention_call(**fields)
    check_dense(call)
    _check(call.q, call.v, fields["softmax_scale"], call.out, generator)
    return _forward(call, generator)


@parameters(since={"num_splits": "2.8.4"})
@_extension(
    "q k v out_? cu_seqlens_q cu_seqlens_k seqused_k? leftpad_k_? block_table_? alibi_slopes_? "
    f"{_LENGTHS} p_dropout softmax_scale zero_tensors {_OPTIONS} return_softmax gen_? num_splits",
    {"gen_": None, "num_splits": 0},
)
def varlen_fwd(fields: _Named) -> list[torch.Tensor]:
    """As `fwd`, for packed sequences. num_splits: speed only; RuntimeError above 1 with block_table_, as upstream."""
    check_num_splits(fields.pop("num_splits"), fields["block_table"])
    generator = fields.pop("generator")
    call = attention_call(**fields)
    check_varlen(call)
    check_per_sequence(call.q, call.batch, seqused_k=call.seqused_k, leftpad_k=call.leftpad_k)
    _check(call.q, call.v, fields["softmax_scale"], call.out, generator)
    return _forward(call, generator)


def _backward(fields: _Named, check: Callable[[AttentionCall], None]) -> list[torch.Tensor]:
    dout, out, softmax_lse, *gradients = (fields.pop(name) for name in ("dout", "out", "softmax_lse", "dq", "dk", "dv"))
    generator = fields.pop("generator")
    call = attention_call(**fields)
    check(call)
    _check(call.q, call.v, fields["softmax_scale"], None, generator)
    into = check_gradients(call, dout, out, softmax_lse, tuple(gradients))
    softmax_d = backends.select(call.q).backward(into)
    return [into.dq, into.dk, into.dv, softmax_d]


@_extension(f"{_GRADIENTS} alibi_slopes_? p_dropout softmax_scale {_OPTIONS} deterministic gen_? rng_state?", _SEEDS)
def bwd(fields: _Named) -> list[torch.Tensor]:
    """[dq, dk, dv, softmax_d], in the gradients given, or new ones. ValueError for dropout without rng_state."""
    return _backward(fields, check_dense)


@_extension(
    f"{_GRADIENTS} cu_seqlens_q cu_seqlens_k alibi_slopes_? {_LENGTHS} p_dropout softmax_scale zero_tensors {_OPTIONS} "
    "deterministic gen_? rng_state?",
    _SEEDS,
)
def varlen_bwd(fields: _Named) -> list[torch.Tensor]:
    """As `bwd`, for packed sequences."""
    return _backward(fields, check_varlen)


@_extension(
    "q kcache vcache k_? v_? seqlens_k_? rotary_cos_? rotary_sin_? cache_batch_idx_? leftpad_k_? block_table_? "
    f"alibi_slopes_? out_? softmax_scale {_OPTIONS} is_rotary_interleaved num_splits"
)
def fwd_kvcache(fields: _Named) -> list[torch.Tensor]:
    """[out, softmax_lse]; writes k_, v_ into the caches."""
    call = cache_call(cache_leftpad=fields.pop("leftpad_k"), **fields)
    check_kvcache(call, True)
    check_whole(num_splits=call.num_splits)
    _check(call.q, call.v_cache, fields["softmax_scale"], call.out)
    check_pages(call)
    call.q = maybe_contiguous(call.q)
    out, softmax_lse = attend_to_cache(call)
    return [out, softmax_lse]
