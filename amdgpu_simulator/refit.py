"""The clock's latencies from a report of `python -m flash_attn.firstlight`.

    python -m amdgpu_simulator refit flash-attn-firstlight-gfx1100.json [--merge]

The clock plays the kernels that the report timed. The time of a vector instruction that needs the previous one gives
the frequency; then each latency is set so that its loop takes as many cycles on the clock as on the GPU. `--merge`
writes the latencies to clock/measured.json, from which the clock takes them for this GPU target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flash_attn.core import protocol
from flash_attn.diagnosis.firstlight.probes import PROBES, Probe
from flash_attn.kernels.variants import Variant

from amdgpu_simulator import gpu
from amdgpu_simulator.clock import latencies as table
from amdgpu_simulator.clock import timeline
from amdgpu_simulator.clock.latencies import Latencies
from amdgpu_simulator.clock.record import Executed, Record
from amdgpu_simulator.isa import machine

# Loops whose time depends on one latency. The loads of `cached` are in the cache after its first turns.
LATENCIES = {"trans": (2, 6), "shared": (2, 6), "cached": (24, 40), "memory": (4, 12), "barrier": (2, 6)}
_REFERENCE, _TURNS = "vector", (2, 6)
_LARGEST = 1 << 14  # cycles of a latency
_TABLE = 1 << 20  # bytes of a table on the simulator: more than its caches hold
_PROBES = {probe.name: probe for probe in PROBES}

Waves = list[list[Executed]]


class Fitted(NamedTuple):
    """A latency: what its loop takes on the GPU and on the clock, in cycles of an instruction, and the constant. new:
    None if no constant explains the GPU.
    """

    name: str
    gpu: float
    clock: float
    old: int
    new: int | None


class Player:
    """Plays the probes of a target. code: the origin of kernels, as in `gpu.SimulatedGpu`."""

    def __init__(self, target: str, code: gpu.Code = gpu.compiled_code) -> None:
        self.target = target
        self._code = code
        self._played: dict[tuple[str, int], Waves] = {}

    def cycles(self, name: str, latencies: Latencies) -> float:
        """Cycles of an instruction of a probe."""
        less, more = LATENCIES.get(name, _TURNS)
        start, end = (timeline.play(self._waves(name, turns), 1, self.target, latencies) for turns in (less, more))
        return (end - start) / (more - less) / _PROBES[name].instructions

    def _waves(self, name: str, turns: int) -> Waves:
        key = name, turns
        if key not in self._played:
            self._played[key] = self._run(_PROBES[name], turns)
        return self._played[key]

    def _run(self, probe: Probe, turns: int) -> Waves:
        records: list[Record] = []

        def program(kernel: Any) -> machine.Program:
            records.append(Record(kernel))
            return machine.Program(kernel, records[-1])

        kernel = gpu.SimulatedGpu(self.target, program=program, code=self._code).kernel(
            Variant("probe", "fp16", 64, probe.kind)
        )
        size = min(probe.table, _TABLE) // 4
        values: dict[str, Any] = {
            "x": torch.full((1024,), 0.5, dtype=torch.float16),
            "table": torch.arange(size, dtype=torch.int32).add_(probe.stride).remainder_(size),
            "out": torch.zeros(32),
        }
        protocol.launch(kernel, (1, 1, 1), values | probe.numbers(turns))
        (group,) = records[0].groups
        return group


def fit(report: dict[str, Any], player: Player) -> tuple[float, list[Fitted]]:
    """GHz, and each latency. Raises ValueError for a report without the time of a vector instruction."""
    times = {line["probe"]: line["ns"] for line in report["probes"] if line.get("ns")}
    if _REFERENCE not in times:
        raise ValueError("the report has no time of a vector instruction: run `python -m flash_attn.firstlight` again")
    now = table.latencies(player.target)
    ghz = player.cycles(_REFERENCE, now) / times[_REFERENCE]
    rows = []
    for name in LATENCIES:
        if name in times:
            cycles = partial(_with, player, now, name)
            old, measured = getattr(now, name), times[name] * ghz
            rows.append(Fitted(name, measured, cycles(old), old, _solve(cycles, measured)))
    return ghz, rows


def _with(player: Player, now: Latencies, name: str, value: int) -> float:
    return player.cycles(name, replace(now, **{name: value}))


def _solve(cycles: Callable[[int], float], measured: float) -> int | None:
    """The smallest latency with which a loop takes as long as measured, None if none does or the loop has none."""
    low, high = 0, _LARGEST
    if not cycles(low) <= measured <= cycles(high) or cycles(low) == cycles(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cycles(middle) <= measured * (1 + 1e-9) else (low, middle)
    return low


def lines(path: Path, *, merge: bool, player: Callable[[str], Player] = Player) -> Iterator[str]:
    """The table of a report. merge: writes what changes. Raises ValueError for a file that is no report."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        target, device, _ = report["machine"]["target"], report["machine"]["device"], report["firstlight"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no report of `python -m flash_attn.firstlight`: {error!r}") from None
    ghz, rows = fit(report, player(target))
    yield f"{device} ({target}), {ghz:.2f} GHz by its vector instructions"
    yield ""
    yield "| constant | GPU, cycles of the loop | clock | constant now | constant by the GPU |"
    yield "|-|-|-|-|-|"
    for row in rows:
        new = "no value explains it" if row.new is None else f"{row.new}"
        yield f"| {row.name} | {row.gpu:.1f} | {row.clock:.1f} | {row.old} | {new} |"
    for line in report["probes"]:
        for unit, name in (("tflops", "TFLOP/s"), ("gbps", "GB/s")):
            if line.get(unit):
                yield f"\n{line['probe']}: {line[unit]:.1f} {name}"
    if merge:
        if before := table.measured().get(target):
            yield f"\nreplaced: the latencies of {before['gpu']}, {before['date']}"
        values = {row.name: row.new for row in rows if row.new is not None}
        origin = {name: report["machine"][name] for name in ("hip", "driver")} | {"wheel": report["wheel"]["version"]}
        entry = {"gpu": device, "date": report["date"], "ghz": round(ghz, 2), **origin, "latencies": values}
        table.merge(target, entry)
        yield f"\nwritten: {table.MEASURED}"
        if not report["ok"]:
            yield "The report says that something is wrong on this machine: read it before you commit."
