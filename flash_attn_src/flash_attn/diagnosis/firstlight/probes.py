"""The microbenchmarks: which loop of `kernels/probe.py` each runs, and what its time says. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOOPS = ("adds", "exps", "exchanges", "loads", "barriers", "products", "streams")
CHAIN, STREAM = 16, 4096  # as kernels/probe.py has them
BLOCK = {"plain": 16, "wide": 32}  # as kernels/tuning/fixed.py has them
_STRIDE = 1088  # elements from one load of a chain to the next: another line, and another page every few loads


@dataclass(frozen=True, kw_only=True)
class Probe:
    """name: a constant of the simulator's clock, or what it measures. kind: of the kernel. loop: which turns are
    counted. turns: of the two launches. instructions: of a turn that wait for each other. table: bytes that loads go
    through. fresh: whether caches are emptied before a launch. per_unit: programs for each compute unit, 0 for one
    program.
    """

    name: str
    kind: str
    loop: str
    turns: tuple[int, int]
    instructions: int = CHAIN
    table: int = 4096
    fresh: bool = False
    per_unit: int = 0

    def numbers(self, turns: int) -> dict[str, int]:
        """The turns of each loop in a launch."""
        return dict.fromkeys(LOOPS, 0) | {self.loop: turns}

    @property
    def stride(self) -> int:
        return _STRIDE if self.table > 4096 else 64


MEMORY = 1 << 30  # bytes that no cache holds
LOADED = "matrix rate under load"
PROBES = (
    Probe(name="vector", kind="plain", loop="adds", turns=(2000, 12000)),
    Probe(name="trans", kind="plain", loop="exps", turns=(1000, 6000)),
    Probe(name="shared", kind="plain", loop="exchanges", turns=(1000, 6000)),
    Probe(name="cached", kind="plain", loop="loads", turns=(4000, 24000), instructions=1),
    Probe(name="level 2", kind="plain", loop="loads", turns=(8192, 24576), instructions=1, table=1 << 20),
    Probe(name="memory", kind="plain", loop="loads", turns=(1000, 5000), instructions=1, table=MEMORY, fresh=True),
    Probe(name="barrier", kind="wide", loop="barriers", turns=(1000, 6000)),
    Probe(name="matrix rate", kind="wide", loop="products", turns=(4000, 44000), instructions=1, per_unit=4),
    Probe(
        name="bandwidth",
        kind="wide",
        loop="streams",
        turns=(0, 0),
        instructions=1,
        table=MEMORY,
        fresh=True,
        per_unit=8,
    ),
)
Launch = Callable[[Probe, int], float]


def run(launch: Launch, compute_units: int, table: int = MEMORY) -> list[dict[str, Any]]:
    """The line of each probe: {"probe", "ns"}, the time of an instruction; of a rate {"probe", "tflops"} or
    {"probe", "gbps"}.

    launch: the nanoseconds of a launch of a probe with so many turns. table: bytes of the largest table.
    """
    lines: list[dict[str, Any]] = []
    for probe in PROBES:
        programs = probe.per_unit * compute_units
        if probe.loop == "streams":
            turns = table // (4 * STREAM * programs)
            less = launch(probe, turns // 4)
            taken = launch(probe, turns) - less
            lines.append({"probe": probe.name, "gbps": _shown(4 * STREAM * programs * (turns - turns // 4), taken)})
            continue
        if probe.loop == "products":
            lines.append({"probe": probe.name, "tflops": matrix_rate(probe, launch, compute_units)})
            continue
        less, more = (launch(probe, turns) for turns in probe.turns)
        turns = probe.turns[1] - probe.turns[0]
        lines.append({"probe": probe.name, "ns": _shown(more - less, turns * probe.instructions)})
    return lines


def matrix_rate(probe: Probe, launch: Launch, compute_units: int) -> float | None:
    """TFLOP/s of the products of all compute units."""
    less, more = (launch(probe, turns) for turns in probe.turns)
    operations = 2 * BLOCK[probe.kind] ** 3 * probe.per_unit * compute_units * (probe.turns[1] - probe.turns[0])
    return _shown(operations / 1e3, more - less)


def _shown(amount: float, by: float) -> float | None:
    """A quotient with four digits, None where the difference of two times is no time."""
    return float(f"{amount / by:.4g}") if by > 0 and amount > 0 else None
