"""How far apart the simulated cycles of two kernels must be before the difference says something about hardware."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from amdgpu_simulator.isa import targets
from rocm_wheels import tables


def error(target: str) -> float:
    """The relative error of a ratio of cycles on a target: `accuracy.toml`."""
    rows = _rows()
    return float((rows.get(target) or rows[targets.get(target).generation.name])["error"])


@cache
def _rows() -> dict[str, Any]:
    file = Path(__file__).with_name("accuracy.toml")
    return tables.parse(file.read_text(encoding="utf-8"), file.name)


def judge(ratio: float, target: str) -> str:
    """Whether a kernel is "faster" or "slower" than another one, or "no difference".

    ratio: the other kernel's cycles / its own.
    """
    margin = 1 + error(target)
    return "faster" if ratio > margin else "slower" if ratio < 1 / margin else "no difference"
