"""Fetches what tests take from Debian and Maven Central, while other checks compute."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import wine

from amdgpu_simulator.debian import UnavailableError
from amdgpu_simulator.hip import process
from amdgpu_simulator.isa import disassembly

if __name__ == "__main__":
    with contextlib.suppress(UnavailableError):
        process.fetch("6.4")
        disassembly.objdump()
    if not wine.missing():
        wine.directory_of(wine.PYTHON)
