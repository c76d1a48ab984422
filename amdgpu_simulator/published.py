"""Compares the clock with published speeds of kernels whose code is public.

    python -m amdgpu_simulator published DIR

DIR holds the assembly texts that published.toml names; kernels without a text are left out, and said so. A text is
compiled for the target by whoever has the source. The model of a whole GPU:
- A launch spreads evenly over the compute units, and a work group begins when another one has ended.
- The frequency is the boost clock of the data sheet.
- If the keys and values that the resident work groups read do not fit into the caches, each work group reads them from
  memory, at the bandwidth of the data sheet.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from amdgpu_simulator import published_kernels
from amdgpu_simulator.clock import timeline
from amdgpu_simulator.decoding import GPUS
from amdgpu_simulator.published_kernels import Run
from rocm_wheels import tables

# Pairs that differ by less than this on the GPU have no order.
_APART = 1.15


class Figure(NamedTuple):
    """A published speed, in TFLOP/s; a loop of exponentials: 10**12 per second."""

    batch: int
    heads: int
    tokens: int
    speed: float


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A published figure beside the clock's."""

    kernel: str
    family: str
    target: str
    fit: bool
    figure: Figure
    clock: float

    @property
    def error(self) -> float:
        return self.clock / self.figure.speed - 1


def table(directory: Path, names: Sequence[str] = ()) -> Iterator[str]:
    """Yields a Markdown table of all figures, then the errors and the ranks of each family.

    names: beginnings of the names of the kernels (default: all). Raises ValueError if no kernel has a text.
    """
    yield "| kernel | batch, heads, tokens | published | clock | error, % | |"
    yield "|-|-|-|-|-|-|"
    everything: list[Compared] = []
    missing = []
    for row in _rows(names):
        try:
            points = compare(row, directory)
        except FileNotFoundError:
            missing.append(row["name"])
            continue
        for point in points:
            shape = ", ".join(map(str, point.figure[:3]))
            yield (
                f"| {point.kernel} | {shape} | {point.figure.speed} | {point.clock:.3g} | {100 * point.error:+.0f} "
                f"| {'fit' if point.fit else 'held out'} |"
            )
        everything += points
    if not everything:
        raise ValueError(f"{directory} has none of the files of published.toml, such as {_rows(names)[0]['file']}")
    yield ""
    yield from summary(everything)
    if missing:
        yield ""
        yield f"Without a text: {', '.join(missing)}."


def summary(compared: Sequence[Compared]) -> Iterator[str]:
    """The lines of a table: errors and ranks by family, apart for kernels that were fitted and held out."""
    yield "| family | figures | median error, % | worst, % | pairs ranked as on the GPU |"
    yield "|-|-|-|-|-|"
    for family in (*dict.fromkeys(point.family for point in compared), ""):
        for fit in (True, False):
            chosen = [point for point in compared if point.fit == fit and family in ("", point.family)]
            if chosen:
                errors = [abs(point.error) for point in chosen]
                right, pairs = ranks([point for point in compared if family in ("", point.family)], fit=fit)
                name = f"{family or 'all'}, {'fit' if fit else 'held out'}"
                yield (
                    f"| {name} | {len(chosen)} | {100 * statistics.median(errors):.0f} | {100 * max(errors):.0f} "
                    f"| {right} of {pairs} |"
                )


def ranks(compared: Sequence[Compared], *, fit: bool) -> tuple[int, int]:
    """(pairs that the clock ranks as the GPU did, pairs): of kernels of a family, for one GPU and shape.

    fit: pairs whose figures were both fitted, or the other ones.
    """
    right = pairs = 0
    for point, other in combinations(compared, 2):
        if (point.family, point.target, point.figure[:3]) != (other.family, other.target, other.figure[:3]):
            continue
        if (point.fit and other.fit) != fit:
            continue
        slow, fast = sorted((point, other), key=lambda each: each.figure.speed)
        if fast.figure.speed > _APART * slow.figure.speed:
            pairs += 1
            right += fast.clock > slow.clock
    return right, pairs


def compare(row: dict[str, Any], directory: Path) -> list[Compared]:
    """The figures of a kernel. Raises FileNotFoundError without its text."""
    runs = [published_kernels.run(row, directory, length) for length in row["lengths"]]
    figures = [Figure(*figure) for figure in row["figures"]]
    return [
        Compared(
            kernel=row["name"], family=row["family"], target=row["target"], fit=row["fit"], figure=figure,
            clock=_speed(row, runs, figure),
        )
        for figure in figures
    ]  # fmt: skip


def _speed(row: dict[str, Any], runs: Sequence[Run], figure: Figure) -> float:
    """The clock's figure for a kernel that was run with fewer and with more keys."""
    gpu, target, units = GPUS[row["target"]], row["target"], runs[0].units
    start, end = (int(length) for length in row["lengths"])
    if row["family"] == "loops":
        less, more = (run.steady(target) for run in runs)
        cycles = (more - less) / (end - start) / len(runs[0].group)
        return float(row["operations"]) / cycles * gpu.units * gpu.clock / 1e3
    rows = int(row["rows"])
    blocks = -(-figure.tokens // rows)
    groups = figure.batch * figure.heads * blocks * (1 if "head_dim" in row else blocks)
    places = gpu.units * (2 if units == 1 else 1)
    most = -(-groups // places)
    resident = runs[0].resident
    if most > resident:
        less, more = (run.steady(target) * most for run in runs)
    else:
        less, more = (timeline.play(run.group, most, target, apart=_START, units=units) for run in runs)
    seconds = float((less + (more - less) * (figure.tokens - start) / (end - start)) / gpu.clock / 1e9)
    if "head_dim" not in row:
        return 2 * figure.tokens**3 / seconds / 1e12
    head_dim = int(row["head_dim"])
    read = 4 * head_dim * figure.tokens  # bytes of the keys and values of a head
    if _heads(row, figure, min(groups, places * resident)) * read > row["cache"] << 20:
        seconds = max(seconds, groups * read / gpu.bandwidth / 1e9)
    return 4 * figure.batch * figure.heads * figure.tokens**2 * head_dim / seconds / 1e12


# Cycles between the starts of two work groups of a launch.
_START = 20


def _heads(row: dict[str, Any], figure: Figure, resident: int) -> int:
    """Over how many heads the work groups of a GPU spread."""
    if row["order"] == "heads":
        return min(figure.batch * figure.heads, resident)
    return -(-resident * int(row["rows"]) // figure.tokens)


def _rows(names: Sequence[str]) -> list[dict[str, Any]]:
    """The kernels of published.toml with the settings of their family."""
    file = Path(__file__).with_name("published.toml")
    data: dict[str, Any] = tables.parse(file.read_text(encoding="utf-8"), file.name)
    rows = []
    for kernel in data["kernels"]:
        row = {**data["families"][kernel["family"]], **kernel}
        row["cache"] = data["caches"][row["target"]]
        if not names or row["name"].startswith(tuple(names)):
            rows.append(row)
    if not rows:
        raise ValueError(f"no kernel of published.toml begins with {', '.join(names)}")
    return rows
