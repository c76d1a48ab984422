"""The estimated time of a compilation, printed before it starts, and its progress."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rocm_wheels.matrix import versions
from rocm_wheels.package_modules import module

if TYPE_CHECKING:
    from rocm_wheels.compile.compiler import Unit


LOG_SECONDS = 60  # seconds between two lines in a log


# Core seconds to assemble a kernel that another target of the run compiles (gfx11-generic and gfx10-3-generic, November
# 2026), and to take a code object out of AMD's package.
_ASSEMBLED, _TAKEN = 0.05, 0.01


def core_seconds(units: Sequence[Unit]) -> float:
    """The estimated core seconds to compile units."""
    return sum(_weights(units))


def _weights(units: Sequence[Unit]) -> list[float]:
    """The core seconds of each unit. versions.toml has the time per kernel of each compiler. A kernel that takes the
    assembly of another target (`made_for`) takes little where that one is compiled in the same run.
    """
    backends, rows = versions.load().backends, module("kernels.targets")
    compiled = {(unit.compiler, unit.target, unit.name) for unit in units}
    weights = []
    for unit in units:
        row, seconds = rows.get(unit.target), _TAKEN
        if (unit.compiler, row.made_for, unit.name) in compiled:
            seconds = _ASSEMBLED
        elif unit.compiler in backends:
            seconds = backends[unit.compiler].seconds(row.family)
        weights.append(seconds * len(unit.kernels))
    return weights


class Progress:
    """Counts compiled kernels. The weight of a kernel is its estimated time."""

    def __init__(self, units: Sequence[Unit], jobs: int) -> None:
        self.kernels = sum(len(unit.kernels) for unit in units)
        self._weights = dict(zip((unit.key for unit in units), _weights(units), strict=True))
        self.seconds = sum(self._weights.values())
        self.compiled, self.spent = 0, 0.0
        self.left = len(units)
        self.jobs = min(jobs, len(units))
        self.started = self.printed = time.monotonic()
        minutes = self.seconds / self.jobs / 60
        if minutes < 1:
            return
        line = f"  {self.kernels} to compile with {jobs} jobs: about {minutes:.0f} min"
        if slow := core_seconds([unit for unit in units if unit.compiler == "ck"]):
            line += f", {slow / self.seconds:.0%} of it for Composable Kernel"
        print(line, flush=True)

    def count(self, unit: Unit) -> None:
        """Prints the progress. A terminal gets one line that is rewritten, a log gets a line for every tenth and every
        minute.
        """
        before = self.spent
        self.compiled += len(unit.kernels)
        self.spent += self._weights[unit.key]
        self.left -= 1
        now = time.monotonic()
        elapsed = now - self.started
        # When one job has just ended, the others are on average halfway through their units.
        ahead = self.seconds - self.spent
        halfway = ahead * min(self.jobs - 1, self.left) / (2 * self.left) if self.left else 0
        left = elapsed / (self.spent + halfway) * (ahead - halfway)
        line = f"  compiled {self.compiled}/{self.kernels}, {elapsed:.0f} s, about {left:.0f} s left"
        line += f": {unit.target} {unit.name}"
        whole = self.compiled == self.kernels
        if sys.stdout.isatty():
            # A line that wraps could not be erased.
            cut = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{cut}", end="\n" if whole else "", flush=True)
        elif 10 * self.spent // self.seconds > 10 * before // self.seconds or now - self.printed >= LOG_SECONDS:
            self.printed = now
            print(line, flush=True)

    def wait(self) -> None:
        """Prints that compiling goes on, if no kernel was ready for a while. A terminal shows the line of the last
        kernel.
        """
        if not sys.stdout.isatty():
            self.printed = time.monotonic()
            elapsed = self.printed - self.started
            print(f"  compiled {self.compiled}/{self.kernels}, {elapsed:.0f} s, {self.jobs} compilers run", flush=True)
