"""Calls on CPU tensors as the CK backend plans them for a GPU; their launches are kept, not run.

    with recording.record("gfx942") as launches:
        flash_attn_func(q, k, v)
    for launch in launches:
        print(launch.kernel, launch.grid, len(launch.argument))

A call that goes to the Triton kernels shows as one launch "triton.forward" or the like, and PyTorch computes it. What
a recorded call returns otherwise is whatever its memory held. Recordings do not nest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from flash_attn.attention import backends
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.attention.backends.ck import ComposableKernel
from flash_attn.call.calls import AttentionCall, CacheCall, ForwardResult, Fp8Result, GradientCall
from flash_attn.core import device
from flash_attn.core.ck_planner import Launch
from flash_attn.core.device import Tensors
from flash_attn.core.recording import Recording


class _Fallback:
    """Records a call to the Triton backend, and lets PyTorch compute it."""

    name = "flash_attn.attention.backends.torch"

    def __init__(self, launched: list[Launch]) -> None:
        self._launched = launched

    def _note(self, what: str) -> None:
        self._launched.append(Launch(f"triton.{what}", (1, 1, 1), b""))

    def forward(self, call: AttentionCall) -> ForwardResult:
        self._note("forward")
        return torch_backend.forward(call)

    def backward(self, gradients: GradientCall) -> torch.Tensor:
        self._note("backward")
        return torch_backend.backward(gradients)

    def kvcache(self, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
        self._note("kvcache")
        return torch_backend.kvcache(call)

    def fp8_forward(self, call: AttentionCall) -> Fp8Result:
        self._note("fp8_forward")
        return torch_backend.fp8_forward(call)

    def fp8_format(self, x: torch.Tensor) -> torch.dtype:
        return torch_backend.fp8_format(x)

    def int8_forward(self, call: AttentionCall, mean: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        self._note("int8_forward")
        return torch_backend.int8_forward(call, mean)

    def combine(self, partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self._note("combine")
        return torch_backend.combine(partial, partial_lse, out)


@contextmanager
def record(
    target: str, *, alone: bool = False, run: Callable[[Sequence[Launch], Tensors], None] | None = None
) -> Iterator[list[Launch]]:
    """Records the launches that a GPU of `target` would run. Yields the list that they are added to.

    Raises RuntimeError if nested. alone: as with FLASH_ATTENTION_TRITON_AMD_ENABLE=FALSE. run: is called with the
    launches of each call, while the memory that they name exists.
    """
    global _recording
    if _recording:
        raise RuntimeError("a recording is under way already")
    recording = Recording(target, run)
    backend = ComposableKernel(_Fallback(recording.launches), alone=alone)
    _recording = True
    try:
        with device.using(recording), backends.using(backend):
            yield recording.launches
    finally:
        _recording = False


_recording = False
