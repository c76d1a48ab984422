"""The simulated cycles of a kernel on a compute unit, as a table.

A kernel runs twice on the simulator, with fewer and with more keys. The difference is its loop without masks. The
values are cycles for KEYS more keys and 128 rows: of a compute unit with as many resident work groups as fit
(`clock.timeline`), and of each of its units alone (`clock.cost`). Matrix and vector units belong to a SIMD. `util %` is
the share of cycles in which the matrix units are busy (MfmaUtil among hardware counters). The values show which tiles
to try on a GPU and what limits a kernel. They do not show how long a call takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from flash_attn.kernels import targets

from amdgpu_simulator.clock import cost, timeline
from amdgpu_simulator.clock.latencies import Latencies
from amdgpu_simulator.clock.record import Executed
from amdgpu_simulator.workloads import Workload
from rocm_wheels.errors import CompileFailed

# The values are normalised to this many rows and keys.
ROWS, KEYS = 128, 128
# Offsets in cycles between the starts of two work groups. On CDNA the printed values are averages over these offsets.
_APART = 0, 300, 700


class Taken(NamedTuple):
    """Cycles in total and of each unit, and the resources of the kernel."""

    cycles: float
    matrix: float
    vector: float
    shared: float
    memory: float
    registers: int
    spills: int
    shared_bytes: int
    groups: int

    @property
    def utilisation(self) -> float:
        """The share of cycles in which the matrix units are busy, MfmaUtil."""
        return self.matrix / self.cycles


@dataclass(frozen=True, kw_only=True)
class Line:
    """Cycles of one work group as a linear function of the length: in total, then of each unit, as in `Taken`.

    groups: work groups that share a compute unit, or a work group processor.
    """

    lengths: tuple[int, int]
    start: tuple[float, ...]
    end: tuple[float, ...]
    groups: int

    def at(self, length: int) -> tuple[float, ...]:
        part = (length - self.lengths[0]) / (self.lengths[1] - self.lengths[0])
        return tuple(less + (more - less) * part for less, more in zip(self.start, self.end, strict=True))


def line(workload: Workload, latencies: Latencies | None = None) -> Line:
    """Runs a kernel with fewer and with more keys."""
    groups = resident(workload.target, workload.entry)
    start, end = (play(workload, length, groups, latencies) for length in workload.lengths)
    return Line(lengths=workload.lengths, start=start, end=end, groups=groups)


def measure(workload: Workload, latencies: Latencies | None = None) -> Taken:
    """The cycles and resources of a kernel. Raises CompileFailed."""
    fit = line(workload, latencies)
    start, end = fit.at(0), fit.at(KEYS)
    scale = ROWS / workload.rows
    played, matrix, vector, shared, memory = ((more - less) * scale for less, more in zip(start, end, strict=True))
    resources = workload.entry["resources"]
    return Taken(
        played, matrix, vector, shared, memory,
        resources["vgprs"], resources["vgpr_spills"], bytes_shared(workload.entry), fit.groups,
    )  # fmt: skip


def play(workload: Workload, length: int, groups: int, latencies: Latencies | None = None) -> tuple[float, ...]:
    """Cycles of one work group for a length: in total, then of each unit, as in `Taken`."""
    record = workload.run(length)
    traces, rates = record.groups, cost.rates(workload.target)
    if rates.rdna:
        played = steady(traces[0], groups, workload.target, latencies) * rates.units
    else:
        starts = _APART if groups > 1 else _APART[:1]
        ends = [timeline.play(traces[0], groups, workload.target, latencies, apart=apart) for apart in starts]
        played = sum(ends) / len(ends) / groups * rates.units
    busy = (record.cycles[unit] / (rates.simds if unit in (cost.MATRIX, cost.VECTOR) else 1) for unit in cost.UNITS)
    return played, *(cycles / len(traces) for cycles in busy)


def steady(
    group: Sequence[Sequence[Executed]],
    groups: int,
    target: str,
    latencies: Latencies | None = None,
    *,
    units: int | None = None,
) -> float:
    """Cycles for a work group on a busy GPU, where another work group begins as soon as one has ended.

    groups: resident work groups. units: as in `timeline.play`. It is the time of a second round of work groups divided
    by their number, because at the end of the last round too few waves are left to keep the units busy.
    """
    play = partial(timeline.play, group, groups, target, latencies, apart=_APART[1], units=units)
    return (play(rounds=2) - play(rounds=1)) / groups


def resident(target: str, entry: Mapping[str, Any], units: int | None = None) -> int:
    """Number of work groups that fit on a compute unit (or a work group processor), by shared memory and by
    the registers that the kernel descriptor reserves.

    units: as in `timeline.play`.
    """
    row, rates = targets.get(target), cost.rates(target)
    rates = rates if units is None else replace(rates, units=units)
    waves = entry["threads"] / row.wavefront / rates.simds / rates.units
    block = row.registers // 64  # a SIMD allocates its registers in 64 blocks
    registers = -(-max(entry["resources"]["reserved_vgprs"], 1) // block) * block
    if rates.rdna:  # a SIMD has at most 16 waves
        registers = max(registers, row.registers // 16)
    groups = int(row.registers // registers // waves)
    return min(groups, row.shared_memory * rates.units // max(bytes_shared(entry), 1))


def bytes_shared(entry: Mapping[str, Any]) -> int:
    """Shared memory of a work group in bytes: requested by the launch, plus static."""
    return int(entry["shared"]) + int(entry["resources"].get("lds", 0))


def table(workloads: Mapping[str, Callable[[], Workload]], latencies: Latencies | None = None) -> Iterator[str]:
    """Yields the header, then a line for each workload when it is measured, or the reason why it does not compile."""
    width = max(map(len, workloads))
    units = "".join(f"{unit:>8}" for unit in cost.UNITS)
    yield f"{'':{width}}  cycles  util %{units}  registers  spills  LDS KiB  groups"
    for name, make in workloads.items():
        yield f"{name:{width}}{_row(make, latencies)}"


def _row(make: Callable[[], Workload], latencies: Latencies | None) -> str:
    try:
        usage = measure(make(), latencies)
    except CompileFailed as error:
        return f" {str(error).splitlines()[0]}"
    busy = "".join(f"{number:8.0f}" for number in usage[1 : 1 + len(cost.UNITS)])
    return (
        f"{usage.cycles:8.0f}{100 * usage.utilisation:8.0f}{busy}  {usage.registers:9}"
        f"  {usage.spills:6}  {usage.shared_bytes / 1024:7.0f}  {usage.groups:6}"
    )
