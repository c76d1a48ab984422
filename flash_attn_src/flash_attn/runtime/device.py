"""The seam between a call and a GPU: which device serves a tensor, and the kernels found for it.

A device is asked for its target, its compute units and its kernels; a kernel is launched with tensors. Implementations:
runtime.driver (the GPU that torch sees), runtime.jit.Interpreter (Triton's interpreter on the CPU), runtime.recording
(keeps what would be launched), and a simulator, which tests bring.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from flash_attn.kernels import targets
from flash_attn.kernels.variants import Variant
from flash_attn.runtime.ck_planner import Launch

Grid = tuple[int, int, int]
Tensors = Sequence[torch.Tensor | None]


class Kernel(Protocol):
    """A kernel of one device. Tile sizes are 0 where the kernel has none. takes_sinks: it has the pointer `sinks`."""

    block_m: int
    block_n: int
    num_xcds: int
    takes_sinks: bool

    def launch(self, grid: Grid, tensors: Tensors, numbers: Sequence[int | float]) -> None:
        """Launches on torch's current stream. Every tensor lives until the launch is made.

        tensors: the kernel's pointers in order, None where an optional one is absent; numbers: its other arguments.
        Raises KernelError where the kernel cannot be compiled.
        """


class Device(Protocol):
    """What serves the tensors of one torch device."""

    @property
    def target(self) -> str:
        """The GPU target: "gfx942", "sm_90"."""

    @property
    def compute_units(self) -> int:
        """Compute units, on an NVIDIA GPU multiprocessors."""

    def kernel(self, variant: Variant) -> Kernel:
        """A Triton kernel. Raises KernelError if neither the store nor a JIT has it."""

    def has_composable_kernel(self) -> bool:
        """Whether there are kernels of Composable Kernel."""

    def has_stored(self, name: str) -> bool:
        """Whether the store has a kernel of this name."""

    def run(self, launches: Sequence[Launch], tensors: Tensors) -> None:
        """Runs planned launches of AMD's kernels, whose arguments hold the addresses of these tensors.

        Raises KernelError where the store lacks one of the kernels.
        """


# By torch's index; -1 is the device of CPU tensors.
_devices: dict[int, Device] = {}
# Cache of all kernels that were found. The key is chosen by the finder. A public call looks each kernel up here once.
kernels: dict[tuple[object, ...], Any] = {}
_PLANS = ("plans",)
MAX_PLANS = 1024
_lock = threading.Lock()


def of(index: int) -> Device:
    """The device with torch's index. Raises ValueError for CPU tensors unless a stand-in for a GPU is set."""
    found = _devices.get(index)
    if found is None:
        found = _devices[index] = _open(index)
    return found


def _open(index: int) -> Device:
    from flash_attn.runtime import driver, jit

    if index >= 0:
        return driver.Driver(index)
    if not jit.interpreting():
        raise ValueError("the Triton backend runs on a GPU; CPU tensors belong to the torch backend")
    return jit.Interpreter()


def kernel(index: int, variant: Variant) -> Kernel:
    """The kernel of a variant for a device; found once. Raises what `Device.kernel` does."""
    found: Kernel | None = kernels.get((index, variant))
    if found is None:
        with _lock:
            found = kernels.get((index, variant))
            if found is None:
                found = kernels[index, variant] = _watched(of(index), variant)
    return found


def _watched(device: Device, variant: Variant) -> Kernel:
    from flash_attn.runtime import watchdog

    return watchdog.watched(device.kernel(variant), variant, device)


def plans() -> dict[tuple[object, ...], Any]:
    """Launches that were worked out, by all that they depend on; no tensors. It lives as long as the kernels in it."""
    found: dict[tuple[object, ...], Any] | None = kernels.get(_PLANS)
    if found is None:
        found = kernels[_PLANS] = {}
    elif len(found) > MAX_PLANS:
        found.clear()
    return found


def loses_range(index: int, dtype: torch.dtype) -> bool:
    """Whether products of a type lose subnormal operands on the device with torch's index: `Target.loses_range`."""
    return dtype is torch.float16 and targets.get(of(index).target).loses_range("fp16")


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
