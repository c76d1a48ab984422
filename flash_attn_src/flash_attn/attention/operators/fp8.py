"""The custom ops of attention in FP8, and `forward` and `there_and_back`, which call them or what they do themselves.

As in `operators.dispatch`: eager calls go straight to the backend, traced ones through an op, and the seed of
dropout is drawn outside of it.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.attention import backends
from flash_attn.attention.backends.torch.fp8 import out_dtype, round_trip
from flash_attn.call.calls import AttentionCall, Fp8Result
from flash_attn.call.options import SCHEMA, as_arguments, draw_rng_state, from_arguments, option_tensors
from flash_attn.call.tracing import is_traced

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? descale_q, Tensor? descale_k, Tensor? descale_v, Tensor? cu_seqlens_q, "
    f"Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
    factors = (descale_q, descale_k, descale_v)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options = more
    call = AttentionCall(
        q, k, v, from_arguments(tuple(options)), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, descales=factors,
    )  # fmt: skip
    out, softmax_lse, _, scales = backends.select(q).fp8_forward(call)
    first, second, third = (
        x if y is None else x.clone(memory_format=torch.contiguous_format) for x, y in zip(scales, factors, strict=True)
    )
    return out, softmax_lse, first, second, third


@_fp8_forward.register_fake
def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> _Results:
    cu_seqlens_q = more[3]
    *outer, heads, _dim = q.shape
    batch = outer[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    rows = (batch, heads, outer[1]) if cu_seqlens_q is None else (heads, outer[0])
    first, second, third = (torch.empty((batch, x.shape[-2]), dtype=torch.float32, device=q.device) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=out_dtype(q), device=q.device)
    return out, torch.empty(rows, dtype=torch.float32, device=q.device), first, second, third


def forward(call: AttentionCall) -> Fp8Result:
    """Attention in FP8, eager or traced. With dropout it draws the call's rng_state."""
    descales = call.descales
    assert descales is not None
    if call.options.dropout_p > 0.0:
        call.options.rng_state = draw_rng_state(call.q.device)
    tensors = (call.q, call.k, call.v, *descales, call.cu_seqlens_q, call.cu_seqlens_k)
    if not is_traced(*tensors, *option_tensors(call.options)):
        return backends.select(call.q).fp8_forward(call)
    out, softmax_lse, *factors = torch.ops.flash_attn._fp8_forward(
        *tensors, call.max_seqlen_q, call.max_seqlen_k, *as_arguments(call.options)
    )
    return Fp8Result(out, softmax_lse, call.options.rng_state, tuple(factors))


def _there_and_back(x: torch.Tensor, descale: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """x (fp16, bf16 or fp32) as it comes out of the device's FP8, in its own type."""
    dtype = backends.select(x).fp8_format(x)
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
