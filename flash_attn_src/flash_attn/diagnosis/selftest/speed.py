"""The speed part of the selftest: milliseconds of each shape, compared with PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
from flash_attn.diagnosis.selftest.cases import Shape

_ROUNDS = 3
_ROUND_MS = 150.0  # of calls in a row
_api: Any = flash_attn
Call = Callable[[], object]


def measure(shape: Shape, device: str) -> dict[str, Any]:
    """{"shape", "forward_ms", "backward_ms", "sdpa_forward_ms", "sdpa_backward_ms", "sdpa"}.

    A time that does not apply is None. "sdpa" is the reason why SDPA could not run, or "". Each time is the median
    of three rounds.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(length: int, heads: int) -> torch.Tensor:
        drawn = torch.randn(shape.batch, length, heads, shape.head_dim, generator=generator)
        return drawn.to(device, torch.bfloat16).requires_grad_(not shape.cache)

    q = draw(1 if shape.cache else shape.seqlen, shape.heads)
    k, v = draw(shape.seqlen, shape.heads_k), draw(shape.seqlen, shape.heads_k)

    def ours() -> Any:
        if shape.cache:
            return _api.flash_attn_with_kvcache(q, k, v, cache_seqlens=shape.seqlen)
        return _api.flash_attn_func(q, k, v, causal=shape.causal)

    attend: Any = scaled_dot_product_attention
    gqa = {} if shape.heads == shape.heads_k else {"enable_gqa": True}  # older torch lacks it

    def sdpa() -> Any:
        flipped = (x.transpose(1, 2) for x in (q, k, v))
        return attend(*flipped, is_causal=shape.causal, **gqa)

    inputs = () if shape.cache else (q, k, v)
    forward, backward = _times(ours, inputs, device)
    result = {"shape": shape.name, "forward_ms": forward, "backward_ms": backward}
    result |= {"sdpa_forward_ms": None, "sdpa_backward_ms": None, "sdpa": ""}
    try:
        result["sdpa_forward_ms"], result["sdpa_backward_ms"] = _times(sdpa, inputs, device)
    except (RuntimeError, TypeError) as error:  # out of memory, or an option that this torch lacks
        result["sdpa"] = str(error).splitlines()[0][:200]
    return result


def _times(attend: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...], device: str) -> Any:
    """Milliseconds of the forward and of the backward; None for the backward if no input needs a gradient."""

    def forward() -> object:
        with torch.no_grad():
            return attend()

    if not inputs:
        return milliseconds(forward, device), None
    out = attend()
    dout = torch.ones_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return milliseconds(forward, device), milliseconds(backward, device)


def milliseconds(call: Call, device: str, rounds: int = _ROUNDS, round_ms: float = _ROUND_MS) -> float:
    """The median of rounds of calls in a row. round_ms: how long a round may take, beyond one call."""
    call()
    _round(call, 1, device)
    repeats = max(1, min(50, int(round_ms / _round(call, 1, device))))
    return statistics.median(_round(call, repeats, device) for _ in range(rounds))


def _round(call: Call, repeats: int, device: str) -> float:
    """Milliseconds of one call among some in a row."""
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - started) * 1e3 / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats
