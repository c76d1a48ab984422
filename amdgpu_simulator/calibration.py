"""Compares simulated cycles with published figures of kernels that can run on the simulator.

MfmaUtil, a hardware counter, is the share of cycles in which the matrix units are busy, in percent. It is compared
directly. TFLOP/s are not, because power limits an MI300X under these loads to 1.1 to 1.6 GHz. They rank kernels, and
simulated cycles must give the same ranking.

Sources: midiareshadi/attn-dsl-bench (counters on an MI300X, ROCm 7.2.2, batch 16, 16 heads, causal forward); AITER,
op_tests/cpp/mha/README.md (MI300X, batch 8, 32 heads, 8192 tokens, head dim 128); moonmath.ai/cdna3attention (MI300X,
131072 tokens); HipKittens (MI355X, batch 16, 16 heads, 16384 tokens). Composable Kernel in AITER's wheels rounds to
bf16 by truncation, mode 2, and is a newer revision than the one here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from amdgpu_simulator.clock import cost
from amdgpu_simulator.measure import Line, line
from amdgpu_simulator.workloads import Workload, assembly, composable

# Compute units of an MI300X and of an MI355X.
_UNITS = {"gfx942": 304, "gfx950": 256}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A published figure. kernel: a key of `KERNELS`. figure: MfmaUtil in %, or TFLOP/s.

    order: the name of a ranking, whose points all come from one machine and one source.
    """

    kernel: str
    seqlen: int
    batch: int
    heads: int
    causal: bool
    figure: float
    order: str = ""


def _rounding(name: str, sha256: str) -> Workload:
    file = f"fmha_v3_fwd/MI300/fwd_hd128_bf16_{name}.co"
    image = assembly.another("gfx942", "asm-fwd-bf16-d128-plain", file, sha256)
    return assembly.workload("gfx942", "asm-fwd-bf16-d128-plain", image=image)


KERNELS: dict[str, Callable[[], Workload]] = {
    "AITER fwd d128 causal": partial(assembly.workload, "gfx942", "asm-fwd-bf16-d128-causal"),
    "AITER fwd d128": partial(assembly.workload, "gfx942", "asm-fwd-bf16-d128-plain"),
    "AITER fwd d128, towards zero": partial(
        _rounding, "rtz", "e8a95e49ba20afa3f81d71b0141cadc46cae33684c5ee89389d29040f4178b75"
    ),
    "AITER fwd d128, ties to even": partial(
        _rounding, "rtne", "074f06acd281efa21ccaa231daff109162861c5d91d3b095ea00c80bd3e68b9e"
    ),
    "AITER bwd d128": partial(assembly.workload, "gfx942", "asm-bwd-bf16-d128-plain"),
    "AITER bwd d128 causal": partial(assembly.workload, "gfx942", "asm-bwd-bf16-d128-causal"),
    "CK fwd d64 causal, mode 2": partial(composable.workload, "gfx942", "fwd-bf16-d64-batch-mask", rounding=2),
    "AITER fwd d128, gfx950": partial(assembly.workload, "gfx950", "asm-fwd-bf16-d128-plain"),
    "AITER bwd d128, gfx950": partial(assembly.workload, "gfx950", "asm-bwd-bf16-d128-plain"),
    "CK fwd d128, mode 2, gfx950": partial(composable.workload, "gfx950", "fwd-bf16-d128-batch", rounding=2),
}
COUNTERS = (
    Point(kernel="AITER fwd d128 causal", seqlen=4096, batch=16, heads=16, causal=True, figure=64.5),
    Point(kernel="AITER fwd d128 causal", seqlen=8192, batch=16, heads=16, causal=True, figure=67.7),
    Point(kernel="AITER fwd d128 causal", seqlen=16384, batch=16, heads=16, causal=True, figure=72.1),
    Point(kernel="CK fwd d64 causal, mode 2", seqlen=4096, batch=16, heads=16, causal=True, figure=35.5),
    Point(kernel="CK fwd d64 causal, mode 2", seqlen=16384, batch=16, heads=16, causal=True, figure=42.3),
)
_LONG = partial(Point, seqlen=131072, batch=1, heads=16, causal=False, order="roundings of P, MI300X")
_MHA = partial(Point, seqlen=8192, batch=8, heads=32, order="forward and backward, MI300X")
_KITTENS = partial(Point, seqlen=16384, batch=16, heads=16, causal=False, order="forward and backward, MI355X")
ORDERS = (
    _LONG(kernel="AITER fwd d128, towards zero", figure=587),
    _LONG(kernel="AITER fwd d128", figure=545),
    _LONG(kernel="AITER fwd d128, ties to even", figure=522),
    _MHA(kernel="AITER fwd d128", causal=False, figure=585),
    _MHA(kernel="AITER fwd d128 causal", causal=True, figure=537),
    _MHA(kernel="AITER bwd d128", causal=False, figure=476),
    _MHA(kernel="AITER bwd d128 causal", causal=True, figure=441),
    _KITTENS(kernel="AITER fwd d128, gfx950", figure=1283),
    _KITTENS(kernel="AITER bwd d128, gfx950", figure=1056),
    _KITTENS(kernel="CK fwd d128, mode 2, gfx950", figure=908),
)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The simulated cycles of a whole call.

    busy: the share of cycles in which the matrix units are busy. useful: the same without products that the mask
    discards.
    """

    busy: float
    useful: float


@cache
def _line(kernel: str) -> tuple[Workload, Line]:
    workload = KERNELS[kernel]()
    return workload, line(workload)


def whole(point: Point) -> Whole:
    """Simulates a whole call: each work group runs on the first free compute unit, for as long as its number of keys
    needs. Work groups begin in the order of Composable Kernel's grid: the heads of a tile, the tiles of a batch entry,
    then the next batch entry.
    """
    workload, fit = _line(point.kernel)
    units, rates = _UNITS[workload.target], cost.rates(workload.target)
    lengths = workload.programs(point.seqlen, point.causal)
    free = [0.0] * (units * fit.groups)
    # A work group shares its compute unit with others, so it takes as many times longer.
    times = [fit.at(length)[0] * fit.groups for length in lengths for _ in range(point.heads)]
    for taken in times * point.batch:
        heapq.heapreplace(free, free[0] + taken)
    heads = point.batch * point.heads
    matrix = heads * sum(fit.at(length)[1] for length in lengths)
    operations = heads * point.seqlen**2 * workload.operations / (2 if point.causal else 1)
    cycles = max(free) * units
    return Whole(busy=matrix / cycles, useful=operations / (rates.by_16 * rates.simds) / cycles)


def report() -> Iterator[str]:
    """Yields the lines of the tables of docs/notes/clock.md."""
    yield "| kernel | tokens | MfmaUtil, counter | clock | error |"
    yield "|-|-|-|-|-|"
    errors = []
    for point in COUNTERS:
        percent = 100 * whole(point).busy
        errors.append(percent / point.figure - 1)
        yield f"| {point.kernel} | {point.seqlen} | {point.figure} | {percent:.1f} | {100 * errors[-1]:+.0f} % |"
    yield ""
    yield f"Mean of the absolute errors: {100 * sum(map(abs, errors)) / len(errors):.1f} %."
    for order in dict.fromkeys(point.order for point in ORDERS):
        points = [point for point in ORDERS if point.order == order]
        yield ""
        yield f"| {order} | tokens | TFLOP/s | clock, useful matrix cycles in % |"
        yield "|-|-|-|-|"
        for point in points:
            yield f"| {point.kernel} | {point.seqlen} | {point.figure:.0f} | {100 * whole(point).useful:.1f} |"
