"""Long launches in pieces, for systems that reset a GPU whose kernel runs too long, as Windows does after two seconds.

A piece is a range of the programs of one grid, so the results are the same bit for bit. Kernels without a first program
take a part of the sequences, heads or rows instead (`slices`). Each piece is submitted alone (`submissions`). The time
of a launch is estimated from the shapes of the call and from the GPU: see `Gpu.programs`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from flash_attn.kernels import targets
from flash_attn.kernels.flags import CHUNK_BITS
from flash_attn.kernels.variants import Variant
from flash_attn.runtime import environment, slices, submissions
from flash_attn.runtime.platform import PLATFORM
from flash_attn.runtime.protocol import Device, Grid, Kernel, Tensors
from flash_attn.runtime.submissions import Submissions

# Cycles of full speed that every compute unit is supposed to reach in a second: a quarter of 2 GHz, because small GPUs
# are slowed down by heat and memory.
CYCLES_PER_SECOND = 0.5e9
FP32_FLOPS_PER_CYCLE = 128  # of one compute unit without a matrix unit for the type

_SHAPE = ("seqlen_q", "seqlen_k", "head_dim", "window_left", "window_right")
# Products of a tile of scores: 2 * queries * keys * head_dim operations each.
_PRODUCTS = {"attn_fwd": 2, "attn_bwd_dq": 3, "attn_bwd_dkdv": 4, "fp8_fwd": 2, "int8_fwd": 2}
_MAX_PROGRAMS = 1 << (31 - CHUNK_BITS)


@dataclass(frozen=True)
class Gpu:
    """The facts for the estimate: operations per second of a compute unit, and the number of compute units."""

    flops: float
    compute_units: int

    def programs(self, seconds: float, flops: int) -> int:
        """How many programs of so many operations end within so many seconds.

        It is a multiple of the compute units, which run side by side: fewer programs would end no earlier.
        """
        return self.compute_units * max(int(seconds * self.flops / flops), 1)


class ProgramRangeKernel:
    """Launches a kernel over ranges of its programs; a range takes at most about `submitted.seconds`.

    Tiles and results are the kernel's own.
    """

    def __init__(self, kernel: Kernel, variant: Variant, gpu: Gpu, submitted: Submissions) -> None:
        self._kernel, self._gpu, self._submitted = kernel, gpu, submitted
        self._function = variant.operation.function
        self._unit = 16 // {"fp32": 4, "fp16": 2, "bf16": 2}.get(variant.dtype, 1)  # elements in 16 bytes
        self.arguments = kernel.arguments
        self._places = {name: place for place, name in enumerate(self.arguments.numbers)}
        self.block_m, self.block_n = kernel.block_m, kernel.block_n
        self.num_xcds = kernel.num_xcds

    def launch(self, grid: Grid, tensors: Tensors, numbers: Sequence[int | float]) -> None:
        """See `protocol.Kernel.launch`."""
        programs, size = grid[0], self.programs_within(numbers)
        seconds = self._submitted.seconds
        if programs <= size:
            self._submitted.launch(self._kernel, (grid, tensors, numbers), seconds * programs / size)
            return
        if programs > _MAX_PROGRAMS:
            raise ValueError(
                f"{self._function}: {programs} programs are too many for pieces of {seconds} s, which take up to "
                f"{_MAX_PROGRAMS}: pass fewer sequences or heads at once"
            )
        pieces = (
            ((min(size, programs - first), *grid[1:]), tensors, self._beginning(first, numbers))
            for first in range(0, programs, size)
        )
        self._submitted.launch_apart(self._kernel, self._function, pieces)

    def _beginning(self, first: int, numbers: Sequence[int | float]) -> tuple[int | float, ...]:
        """The numbers of a piece that begins with this program."""
        place = self._places["chunk"]
        return (*numbers[:place], int(numbers[place]) | first << CHUNK_BITS, *numbers[place + 1 :])

    def programs_within(self, numbers: Sequence[int | float]) -> int:
        """How many programs a launch may have. Their time is estimated as if every program had the longest sequence."""
        seqlen_q, seqlen_k, head_dim, left, right = (int(numbers[self._places[name]]) for name in _SHAPE)
        if self._function == "attn_bwd_dkdv":
            rows = min(seqlen_q, left + right + self.block_n) * int(numbers[self._places["group"]])
            pairs = self.block_n * rows
        else:
            pairs = self.block_m * min(seqlen_k, left + right + self.block_m)
        flops = 2 * _PRODUCTS[self._function] * max(pairs, 1) * head_dim * self._unit
        return self._gpu.programs(self._submitted.seconds, flops)


def watched(kernel: Kernel, variant: Variant, device: Device) -> Kernel:
    """The kernel itself where nothing limits a launch, or where its launches are short whatever the call.

    Otherwise the same kernel with its launches in pieces. Raises RuntimeError for a limit that is no number of seconds.
    """
    function = variant.operation.function
    if function not in _PRODUCTS and function not in slices.FUNCTIONS:
        return kernel
    try:
        limit = environment.seconds(os.environ, environment.MAX_LAUNCH_SECONDS)
    except ValueError as error:
        raise RuntimeError(f"{error}: set it to a number of seconds, or to 0 for no limit") from None
    seconds = PLATFORM.launch_seconds if limit is None else limit
    if not seconds:
        return kernel
    rate = FP32_FLOPS_PER_CYCLE if variant.dtype == "fp32" else targets.get(device.target).flops_per_cycle
    gpu = Gpu(rate * CYCLES_PER_SECOND, device.compute_units)
    submitted = submissions.of(device, seconds)
    if function in slices.FUNCTIONS:
        return slices.SubcallKernel(kernel, variant, lambda flops: gpu.programs(seconds, flops), submitted)
    return ProgramRangeKernel(kernel, variant, gpu, submitted)
