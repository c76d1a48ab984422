"""Decoding on a whole GPU: the splits of the keys, and the share of the memory bandwidth, by the clock.

python -m amdgpu_simulator decoding gfx1100
python -m amdgpu_simulator decoding gfx942 --fp8    # an FP8 cache beside one in bf16

One query in bf16 per sequence. `flash_attn.kernels.splits` splits the keys of each key head among programs. The model
is the launch of one kernel:
- Programs spread evenly over the GPU. The unit with the most programs decides the time. It runs as many at once as fit.
- A unit gets its share of the memory bandwidth, also while other units are idle. No line is in a cache before.
- The clock frequency is the boost clock of the data sheet. A launch costs nothing. The kernel that combines the splits
  is left out.
A unit is what HIP counts as one multiprocessor: a work group processor of RDNA, a compute unit of CDNA.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from flash_attn.kernels import targets
from flash_attn.kernels.splits import profitable_splits
from flash_attn.kernels.variants import Variant

from amdgpu_simulator import measure
from amdgpu_simulator.clock import cost, timeline
from amdgpu_simulator.clock.record import Executed
from amdgpu_simulator.workloads import Workload, triton

KEY_HEADS, HEAD_DIM, KEYS = 8, 128, 8192
# Sequences, and keys of each.
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (1024, KEYS, 32768, 131072)
_BF16 = "bf16"


class Gpu(NamedTuple):
    """A product: units, GB/s of its memory, GHz."""

    product: str
    units: int
    bandwidth: float
    clock: float


# Data sheets of AMD. The GPUs of processors: with the fastest memory that AMD names for them. The bandwidth of gfx1151
# is what rocm_bandwidth_test measures of 256 (llm-tracker.info, Strix Halo).
GPUS = {
    "gfx942": Gpu("MI300X", 304, 5300, 2.1),
    "gfx950": Gpu("MI355X", 256, 8000, 2.4),
    "gfx1030": Gpu("RX 6800 XT", 36, 512, 2.25),
    "gfx1100": Gpu("RX 7900 XTX", 48, 960, 2.5),
    "gfx1103": Gpu("Radeon 780M", 6, 120, 2.7),
    "gfx1150": Gpu("Radeon 890M", 8, 120, 2.9),
    "gfx1151": Gpu("Radeon 8060S", 20, 212, 2.9),
    "gfx1201": Gpu("RX 9070 XT", 32, 640, 2.97),
}


def table(target: str) -> Iterator[str]:
    """Yields the header, then a line for each batch and context. Raises ValueError for a GPU without a row."""
    _check(target)
    head = f"{'batch':>5}{'keys':>8}{'splits':>8}{'programs per unit':>19}"
    yield f"{head}{'MiB read':>10}{'cycles':>10}{'bandwidth, %':>14}"
    for batch in BATCHES:
        for keys in CONTEXTS:
            splits = chosen(target, batch, keys)
            most, cycles = launch(target, batch, splits, keys)
            percent = 100 * share(target, batch, splits, keys)
            yield f"{batch:5}{keys:8}{splits:8}{most:19}{read(batch, keys) / 2**20:10.0f}{cycles:10.0f}{percent:14.0f}"


def table_of_fp8(target: str) -> Iterator[str]:
    """Yields the header, then for each batch and context how much faster an FP8 cache is than one in bf16.

    Raises ValueError for a GPU without a row, and for one without FP8.
    """
    _check(target)
    fp8 = targets.get(target).fp8
    if fp8 is None:
        raise ValueError(f"{target}: it has no FP8: take gfx942, gfx950 or gfx1201")
    of_bf16, of_fp8 = f"{'bf16 cycles':>13}{'bandwidth, %':>14}", f"{'FP8 cycles':>12}{'bandwidth, %':>14}"
    yield f"{'batch':>5}{'keys':>8}{of_bf16}{of_fp8}{'ratio':>8}"
    for batch in BATCHES:
        for keys in CONTEXTS:
            cells, cycles = "", []
            for dtype, width in ((_BF16, 13), (fp8, 12)):
                splits = chosen(target, batch, keys, dtype)
                cycles.append(launch(target, batch, splits, keys, dtype)[1])
                cells += f"{cycles[-1]:{width}.0f}{100 * share(target, batch, splits, keys, dtype):14.0f}"
            yield f"{batch:5}{keys:8}{cells}{cycles[0] / cycles[1]:8.2f}"


def _check(target: str) -> None:
    if target not in GPUS:
        raise ValueError(
            f"{target}: decoding knows {', '.join(GPUS)}; add a row to GPUS in amdgpu_simulator/decoding.py"
        )


def read(batch: int, keys: int, dtype: str = _BF16) -> int:
    """Bytes of the keys and values of so many sequences."""
    return batch * KEY_HEADS * keys * HEAD_DIM * (4 if dtype == _BF16 else 2)


def chosen(target: str, batch: int, keys: int = KEYS, dtype: str = _BF16) -> int:
    """The number of splits that flash_attn chooses."""
    workload = _workload(target, dtype)
    blocks = -(-keys // workload.entry["constants"]["BLOCK_N"])
    units = GPUS[target].units * targets.get(target).multiprocessor_units
    return profitable_splits(batch * KEY_HEADS, blocks, units, workload.rows)


def share(target: str, batch: int, splits: int, keys: int = KEYS, dtype: str = _BF16) -> float:
    """The part of the memory bandwidth that a launch uses."""
    gpu = GPUS[target]
    return read(batch, keys, dtype) / (launch(target, batch, splits, keys, dtype)[1] / gpu.clock * gpu.bandwidth)


@cache
def launch(target: str, batch: int, splits: int, context: int = KEYS, dtype: str = _BF16) -> tuple[int, float]:
    """(programs of the busiest unit, cycles of the launch)."""
    workload, gpu = _workload(target, dtype), GPUS[target]
    most = -(-batch * KEY_HEADS * splits // gpu.units)
    fits = measure.resident(target, workload.entry)
    full, left = divmod(most, fits)
    keys = context / splits
    cycles = full * _cycles(target, fits, keys, dtype) + (_cycles(target, left, keys, dtype) if left else 0)
    return most, cycles


def _cycles(target: str, groups: int, keys: float, dtype: str) -> float:
    """The cycles of so many programs on one unit, each with so many keys."""
    start, end = _LENGTHS
    less, more = (_played(target, groups, length, dtype) for length in _LENGTHS)
    return less + (more - less) * (keys - start) / (end - start)


_LENGTHS = 256, 512


@cache
def _played(target: str, groups: int, length: int, dtype: str) -> float:
    gpu = GPUS[target]
    fill = gpu.bandwidth / gpu.units / gpu.clock / cost.rates(target).units
    return timeline.play(_trace(target, length, dtype), groups, target, fill=fill)


@cache
def _trace(target: str, length: int, dtype: str) -> list[list[Executed]]:
    return _workload(target, dtype).run(length).groups[0]


@cache
def _workload(target: str, dtype: str) -> Workload:
    variant = Variant("decode", dtype, HEAD_DIM, "plain")
    return triton.workload(target, variant, triton.tiles(target, variant)[0], has_values=True)
