"""The seam between a call and a GPU: which device serves a tensor, and the kernels found for it.

A device is asked for its target, its compute units and its kernels; a kernel is launched with tensors. Implementations:
runtime.driver (the GPU that torch sees), runtime.jit.Interpreter (Triton's interpreter on the CPU), runtime.recording
(keeps what would be launched), and a simulator, which tests bring.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flash_attn.core.ck_planner import Launch
from flash_attn.core.protocol import Device, Grid, Kernel, Tensors, kernels, spoil
from flash_attn.kernels import targets
from flash_attn.kernels.variants import Variant

__all__ = [
    "Device", "Grid", "Kernel", "Tensors", "clear_kernels", "kernel", "kernels", "loses_range", "of", "plans", "run",
    "using",
]  # fmt: skip

# By torch's index; -1 is the device of CPU tensors.
_devices: dict[int, Device] = {}
_PLANS = ("plans",)
MAX_PLANS = 1024
_lock = threading.Lock()


def of(index: int) -> Device:
    """The device with torch's index. Raises ValueError for CPU tensors unless a stand-in for a GPU is set."""
    device = _devices.get(index)
    if device is None:
        device = _devices[index] = _open(index)
    return device


def _open(index: int) -> Device:
    from flash_attn.core import driver, jit

    if index >= 0:
        return driver.Driver(index)
    if not jit.interpreting():
        raise ValueError("the Triton backend runs on a GPU; CPU tensors belong to the torch backend")
    return jit.Interpreter()


def kernel(index: int, variant: Variant) -> Kernel:
    """The kernel of a variant for a device; found once. Raises what `Device.kernel` does."""
    entry: Kernel | None = kernels.get((index, variant))
    if entry is None:
        with _lock:
            entry = kernels.get((index, variant))
            if entry is None:
                entry = kernels[index, variant] = _watched(of(index), variant)
    return entry


def _watched(device: Device, variant: Variant) -> Kernel:
    from flash_attn.core import watchdog

    return watchdog.watched(device.kernel(variant), variant, device)


def plans() -> dict[tuple[object, ...], Any]:
    """What `call.plans` keeps: no tensors. It lives as long as the kernels in it."""
    cache: dict[tuple[object, ...], Any] | None = kernels.get(_PLANS)
    if cache is None:
        cache = kernels[_PLANS] = {}
    elif len(cache) > MAX_PLANS:
        cache.clear()
    return cache


def loses_range(index: int, dtype: torch.dtype) -> bool:
    """Whether products of a type lose subnormal operands on the device with torch's index: `Target.loses_range`."""
    return dtype is torch.float16 and targets.get(of(index).target).loses_range("fp16")


def run(x: torch.Tensor, launches: Sequence[Launch], tensors: Tensors) -> None:
    """Runs planned launches on the device of x: see `Device.run`. Their arguments are addresses, so a call that makes
    them has no plan of its own."""
    spoil()
    of(x.get_device()).run(launches, tensors)


def clear_kernels() -> None:
    """Empties the cache of kernels, so that the next call looks for its kernels again."""
    kernels.clear()


@contextmanager
def using(device: Device, index: int = -1) -> Iterator[None]:
    """Lets a device serve the tensors of torch's index, -1 being the CPU, and forgets the kernels found before."""
    before = _devices.get(index)
    _devices[index] = device
    clear_kernels()
    try:
        yield
    finally:
        if before is None:
            del _devices[index]
        else:
            _devices[index] = before
        clear_kernels()
