"""Long launches in pieces, for systems that reset a GPU whose kernel runs too long, as Windows does after two seconds.

`slices` says what the pieces are, and `submissions` submits each alone. The time of a launch is estimated from the
shapes of the call and from the GPU: see `Rate.programs`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flash_attn.core import environment, slices, submissions
from flash_attn.core.platform import PLATFORM
from flash_attn.core.protocol import Device, Gpu, Grid, Kernel, Tensors
from flash_attn.kernels import targets
from flash_attn.kernels.variants import Variant

# Cycles of full speed that every compute unit is supposed to reach in a second: a quarter of 2 GHz, because small GPUs
# are slowed down by heat and memory.
CYCLES_PER_SECOND = 0.5e9
FP32_FLOPS_PER_CYCLE = 128  # of one compute unit without a matrix unit for the type
_KEPT_ESTIMATES = 64  # of one kernel


@dataclass(frozen=True)
class Rate:
    """The facts for the estimate: operations per second of a compute unit, and the number of compute units."""

    flops: float
    compute_units: int

    def programs(self, seconds: float, flops: int) -> int:
        """How many programs of so many operations end within so many seconds.

        It is a multiple of the compute units, which run side by side: fewer programs would end no earlier.
        """
        return self.compute_units * max(int(seconds * self.flops / flops), 1)


class WatchedKernel:
    """Launches a kernel in pieces of at most about so many seconds. Tiles and results are the kernel's own.

    counted: the submissions of the GPU, None where each kernel is a task of its own, as on Linux.
    """

    def __init__(
        self, kernel: Kernel, variant: Variant, rate: Rate, seconds: float, counted: submissions.Submissions | None
    ) -> None:
        self._kernel, self._rate, self._seconds, self._counted = kernel, rate, seconds, counted
        self._function = variant.operation.function
        self._unit = 16 // {"fp32": 4, "fp16": 2, "bf16": 2}.get(variant.dtype, 1)  # elements in 16 bytes
        self.arguments, self.num_xcds = kernel.arguments, kernel.num_xcds
        self.block_m, self.block_n = kernel.block_m, kernel.block_n
        # id of the numbers of a launch -> the numbers, and their programs_within(). Plans pass the same tuples again.
        self._estimates: dict[int, tuple[tuple[int | float, ...], int]] = {}

    def launch(self, grid: Grid, tensors: Tensors, numbers: Sequence[int | float]) -> None:
        """See `protocol.Kernel.launch`."""
        known = self._estimates.get(id(numbers))
        size = known[1] if known is not None and known[0] is numbers else self.programs_within(numbers)
        kernel, name, counted = self._kernel, self._function, self._counted
        if grid[0] <= size:
            if counted is None:
                kernel.launch(grid, tensors, numbers)
            else:
                counted.launch(kernel, name, grid, tensors, numbers, self._seconds * grid[0] / size)
        elif counted is None:
            for piece in self._pieces(grid, tensors, numbers, size):
                kernel.launch(*piece)
        else:
            pieces = self._pieces(grid, tensors, numbers, size)
            counted.launch_apart(kernel, name, pieces, self._seconds * grid[0] / size)

    def programs_within(self, numbers: Sequence[int | float]) -> int:
        """How many programs a launch may have."""
        operations, _ = slices.FUNCTIONS[self._function]
        size = self._rate.programs(self._seconds, operations(self._values(numbers)))
        if isinstance(numbers, tuple):
            if len(self._estimates) >= _KEPT_ESTIMATES:
                self._estimates.clear()
            self._estimates[id(numbers)] = numbers, size
        return size

    def _values(self, numbers: Sequence[Any]) -> dict[str, int]:
        values = dict(zip(self.arguments.numbers, numbers, strict=True))
        return values | {"unit": self._unit, "block_m": self.block_m, "block_n": self.block_n}

    def _pieces(
        self, grid: Grid, tensors: Tensors, numbers: Sequence[int | float], size: int
    ) -> Iterator[submissions.Piece]:
        _, parts = slices.FUNCTIONS[self._function]
        names, pointers = self.arguments.numbers, self.arguments.pointers
        for programs, offsets, changed in parts(self._values(numbers) | {"programs": grid[0]}, size):
            moved = tensors
            if offsets:
                moved = [slices.moved(x, offsets[name], name) for name, x in zip(pointers, tensors, strict=True)]
            some = [changed.get(name, number) for name, number in zip(names, numbers, strict=True)]
            yield (programs, *grid[1:]), moved, some


def watched(kernel: Kernel, variant: Variant, device: Device) -> Kernel:
    """The kernel itself where nothing limits a launch, or where its launches are short whatever the call.

    Otherwise the same kernel with its launches in pieces. Raises RuntimeError for a limit that is no number of seconds.
    """
    if variant.operation.function not in slices.FUNCTIONS:
        return kernel
    try:
        seconds = environment.seconds(os.environ, environment.MAX_LAUNCH_SECONDS)
    except ValueError as error:
        raise RuntimeError(f"{error}: set it to a number of seconds, or to 0 for no limit") from None
    gpu = device if isinstance(device, Gpu) else None
    if seconds is None:
        limit = PLATFORM.launch_limit(None if gpu is None else gpu.screen)
        seconds = 0.0 if limit is None else limit.seconds
    if not seconds:
        return kernel
    flops = FP32_FLOPS_PER_CYCLE if variant.dtype == "fp32" else targets.get(device.target).flops_per_cycle
    rate = Rate(flops * CYCLES_PER_SECOND, device.compute_units)
    counted = None if gpu is None or PLATFORM.has_kfd else submissions.of(gpu, seconds)
    return WatchedKernel(kernel, variant, rate, seconds, counted)
