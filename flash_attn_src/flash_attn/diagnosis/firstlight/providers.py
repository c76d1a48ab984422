"""Which provider of kernels is fastest on this GPU: AMD's assembly, Composable Kernel or this project's Triton kernels.

Forward and backward of 2 x 4096 tokens are timed with each provider, for fp16 and bf16, four head dims, without a mask,
causal and with a window. The rows have the form of kernels/providers.py, for calls of more than 128 queries.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from flash_attn.attention.backends import choice, triton
from flash_attn.attention.backends.ck import ComposableKernel
from flash_attn.attention.backends.sources import Sources
from flash_attn.call.calls import GradientCall, attention_call
from flash_attn.diagnosis.selftest import speed
from flash_attn.kernels.assembly import CAUSAL, PLAIN, WINDOW
from flash_attn.kernels.providers import ASM, CK, TRITON, Row

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DIMS = (64, 128, 192, 256)
TOKENS = 4096
# A row holds for longer calls than this. A shorter one leaves a tile of the assembly half empty.
SHORT = 128
# A provider goes first if it is faster than the table's by so much. Less is noise.
GAIN = 1.03
_ROUNDS = 3


def providers() -> dict[str, Any]:
    """A backend for each provider. It raises NotImplementedError for a call that the provider has no kernel for."""
    ck = ComposableKernel(triton, alone=True)
    return {ASM: Sources(ck, triton, forced=ASM), CK: ck, TRITON: triton}


def rows(target: str, device: str = "cuda") -> Iterator[Row]:
    """The row of each kind of call, as it is measured."""
    backends = providers()
    for name, dtype in DTYPES.items():
        for dim in DIMS:
            for mask in (PLAIN, CAUSAL, WINDOW):
                for op, call in _calls(backends[TRITON], dtype, dim, mask, device).items():
                    yield fastest(target, op, name, dim, mask, _times(call, backends, device))


def fastest(target: str, op: str, dtype: str, dim: int, mask: str, times: Mapping[str, float]) -> Row:
    """The row of a kind of call from the milliseconds of each provider that can serve it."""
    below = max((other for other in DIMS if other < dim), default=0)
    ranked = sorted(times, key=lambda provider: times[provider])
    why = "measured here: " + ", ".join(f"{provider} {times[provider]:.3f} ms" for provider in ranked)
    return Row(target, op, (dtype,), (below + 1, dim), (mask,), SHORT + 1, tuple(ranked), why)


def better(measured: Iterator[Row] | list[Row]) -> list[Row]:
    """The rows whose first provider is faster than the one that calls take now, by more than noise."""
    gains = []
    for row in measured:
        now = choice.find(row.target, row.op, row.dtypes[0], row.dims[1], row.masks[0], TOKENS).sources
        times = dict(part.split(" ")[:2] for part in row.why.partition(": ")[2].split(", "))
        taken = next((provider for provider in now if provider in times), row.sources[0])
        if float(times[taken]) > GAIN * float(times[row.sources[0]]):
            gains.append(row)
    return gains


def _calls(made_by: Any, dtype: torch.dtype, dim: int, mask: str, device: str) -> dict[str, Callable[[Any], object]]:
    """Forward and backward of one kind of call, each by the backend that it gets. made_by makes out for the second."""
    heads = max(2048 // dim, 8)
    q, k, v, dout = (torch.randn(2, TOKENS, heads, dim, device=device, dtype=dtype) for _ in range(4))
    window = (TOKENS // 4, 0) if mask == WINDOW else (-1, -1)
    call = attention_call(q, k, v, softmax_scale=dim**-0.5, causal=mask != PLAIN, window_size=window)
    out, lse, *_ = made_by.forward(call)
    gradients = GradientCall(call, dout, out, lse, *(torch.empty_like(x) for x in (q, k, v)))
    return {"fwd": lambda backend: backend.forward(call), "bwd": lambda backend: backend.backward(gradients)}


def _times(call: Callable[[Any], object], backends: Mapping[str, Any], device: str) -> dict[str, float]:
    """Median milliseconds of a call by each provider that can serve it. The providers take turns."""
    taken: dict[str, list[float]] = {}
    for _ in range(_ROUNDS):
        for provider, backend in backends.items():
            with suppress(NotImplementedError):
                milliseconds = speed.milliseconds(partial(call, backend), device, 1, 30.0)
                taken.setdefault(provider, []).append(milliseconds)
    return {provider: statistics.median(each) for provider, each in taken.items()}
