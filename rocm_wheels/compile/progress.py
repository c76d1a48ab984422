"""How long compiling will take, said before it starts, and how far it is, said while it runs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rocm_wheels.matrix import versions

if TYPE_CHECKING:
    from rocm_wheels.compile.compiler import Unit


class Progress:
    """Counts compiled kernels. A kernel weighs what versions.toml says about its compiler (kernel_seconds)."""

    def __init__(self, units: Sequence[Unit], jobs: int) -> None:
        self.each = {name: backend.kernel_seconds for name, backend in versions.load().backends.items()}
        self.kernels = sum(len(unit.kernels) for unit in units)
        self.seconds = sum(map(self._seconds, units))
        self.compiled = self.spent = 0
        self.left = len(units)
        self.jobs = min(jobs, len(units))
        self.started = time.monotonic()
        minutes = self.seconds / self.jobs / 60
        if minutes < 1:
            return
        line = f"  {self.kernels} to compile with {jobs} jobs: about {minutes:.0f} min"
        if slow := sum(self._seconds(unit) for unit in units if unit.compiler == "ck"):
            line += f", {slow / self.seconds:.0%} of it for Composable Kernel (--backend triton does without)"
        print(line, flush=True)

    def count(self, unit: Unit) -> None:
        """Prints a line, which rewrites itself on a terminal. A log gets ten lines in all."""
        before = self.spent
        self.compiled += len(unit.kernels)
        self.spent += self._seconds(unit)
        self.left -= 1
        elapsed = time.monotonic() - self.started
        # While one job has just ended, the others are on average halfway through their units.
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
        elif 10 * self.spent // self.seconds > 10 * before // self.seconds:
            print(line, flush=True)

    def _seconds(self, unit: Unit) -> int:
        """Roughly the seconds that a core needs for a unit."""
        return self.each.get(unit.compiler, 1) * len(unit.kernels)
