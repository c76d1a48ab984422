"""The custom ops of attention in FP8, and `attend` and `there_and_back`, which call them or what they do themselves.

As in flash_attn.dispatch: eager calls go straight to the backend, traced ones through an op, and the seed of dropout is
drawn outside of it.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn import rng
from flash_attn.backends import select
from flash_attn.backends.torch.fp8 import FORMAT, Descales, is_fp8, round_trip
from flash_attn.tracing import is_traced

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? descale_q, Tensor? descale_k, Tensor? descale_v, float softmax_scale, "
    "bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, "
    "float dropout_p, Tensor? rng_state, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _out_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if is_fp8(q) else q.dtype


@torch.library.custom_op("flash_attn::_fp8_forward", mutates_args=(), schema=_SCHEMA)
def _fp8_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descale_q: torch.Tensor | None,
    descale_k: torch.Tensor | None,
    descale_v: torch.Tensor | None,
    *more: Any,
) -> _Results:
    """(out, softmax_lse, descales of q, k and v), of checked arguments."""
    given = (descale_q, descale_k, descale_v)
    out, softmax_lse, _, found = select(q).fp8_forward(q, k, v, given, _out_dtype(q), *more)
    first, second, third = (
        x if y is None else x.clone(memory_format=torch.contiguous_format) for x, y in zip(found, given, strict=True)
    )
    return out, softmax_lse, first, second, third


@_fp8_forward.register_fake
def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> _Results:
    cu_seqlens_q = more[-4]
    *outer, heads, _dim = q.shape
    batch = outer[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    rows = (batch, heads, outer[1]) if cu_seqlens_q is None else (heads, outer[0])
    first, second, third = (torch.empty((batch, x.shape[-2]), dtype=torch.float32, device=q.device) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=_out_dtype(q), device=q.device)
    return out, torch.empty(rows, dtype=torch.float32, device=q.device), first, second, third


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: Descales,
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """(out, softmax_lse, rng_state or None, descales), eager or traced."""
    rng_state = rng.draw(q.device) if dropout_p > 0.0 else None
    options = (
        softmax_scale, causal, left, right, softcap, alibi_slopes, dropout_p, rng_state, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    if is_traced(q, k, v, *descales, cu_seqlens_q, cu_seqlens_k):
        out, softmax_lse, *factors = torch.ops.flash_attn._fp8_forward(q, k, v, *descales, *options)
    else:
        out, softmax_lse, _, factors = select(q).fp8_forward(q, k, v, descales, _out_dtype(q), *options)
    return out, softmax_lse, rng_state, tuple(factors)


def _there_and_back(x: torch.Tensor, descale: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """x (fp16, bf16 or fp32) as it comes out of the device's FP8, in its own type."""
    dtype = select(x).format_of(x) if x.is_cuda else FORMAT
    return round_trip(x, descale, dtype, cu_seqlens).to(x.dtype).contiguous()


_there_and_back_op = torch.library.custom_op(
    "flash_attn::_fp8_there_and_back",
    _there_and_back,
    mutates_args=(),
    schema="(Tensor x, Tensor descale, Tensor? cu_seqlens) -> Tensor",
)
_there_and_back_op.register_fake(lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device))


def there_and_back(x: torch.Tensor, descale: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """_there_and_back, eager or traced."""
    return (_there_and_back_op if is_traced(x, descale, cu_seqlens) else _there_and_back)(x, descale, cu_seqlens)
