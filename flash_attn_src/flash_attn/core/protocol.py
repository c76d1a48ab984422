"""What `device` asks of a GPU, and the cache of its kernels. Implementations are listed in `device`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from flash_attn.core.arguments import Arguments, Values
from flash_attn.core.ck_planner import Launch
from flash_attn.kernels.variants import Variant

Grid = tuple[int, int, int]
Tensors = Sequence[torch.Tensor | None]


class Kernel(Protocol):
    """A kernel of one device. Tile sizes are 0 where the kernel has none."""

    block_m: int
    block_n: int
    num_xcds: int
    arguments: Arguments

    def launch(self, grid: Grid, tensors: Tensors, numbers: Sequence[int | float]) -> None:
        """Launches on torch's current stream. Every tensor lives until the launch is made.

        tensors: the kernel's pointers in order, None where an optional one is absent; numbers: its other arguments, as
        `Arguments.fill` makes both.
        Raises KernelError where the kernel cannot be compiled.
        """


class _Recording(threading.local):
    """The record of the call that this thread makes, see `call.plans`. None: it is not recorded."""

    tape: Any = None


recording = _Recording()


def spoil() -> None:
    """Says that what the call does depends on more than the key of its plan: it gets no plan."""
    if recording.tape is not None:
        recording.tape.is_spoiled = True


def launch(kernel: Kernel, grid: Grid, values: Values) -> None:
    """Launches a kernel with its arguments out of `values`: see `Arguments.fill` and `Kernel.launch`."""
    if recording.tape is not None:
        recording.tape.launch(kernel, grid, *kernel.arguments.fill(values))
    else:
        kernel.launch(grid, *kernel.arguments.fill(values))


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


@runtime_checkable
class Gpu(Protocol):
    """A device whose driver collects launches, and whose system may limit their time.

    screen: PCI address of a GPU that can drive a screen, "" where torch does not tell it, None for other GPUs.
    """

    screen: str | None

    def queue(self) -> int:
        """Where launches on torch's current stream are collected: a number of the stream, or less than 0 while it is
        captured, one number for all streams of a graph."""

    def submit(self) -> bool:
        """Makes the driver submit what was launched on torch's current stream, without waiting for it.

        False, and nothing is submitted, while the stream is captured into a graph.
        """


# Cache of all kernels that were found. The key is chosen by the finder. A public call looks each kernel up here once.
kernels: dict[tuple[object, ...], Any] = {}
