"""How far apart the simulated cycles of two kernels must be before the difference says something about hardware."""

from __future__ import annotations

from amdgpu_simulator.isa import targets

# Relative error of a ratio of cycles between kernels of different authors, for each generation, by figures that no
# constant was fitted to. CDNA: the worst of five counters of MI300X (`python -m amdgpu_simulator calibrate`). RDNA 3
# and 4: two of three figures of `python -m amdgpu_simulator published` are closer than 30 %; a few kernels, whose
# authors had other compilers, are 2 times too fast. RDNA 1 and 2 have no published figure.
_ERRORS = {"CDNA": 0.26, "RDNA1": 0.3, "RDNA2": 0.3, "RDNA3": 0.3, "RDNA4": 0.3}
# Targets with an error of their own: all six figures of gfx1151 are too fast, by 36 to 88 %.
_OF_TARGET = {"gfx1151": 0.88}


def error(target: str) -> float:
    """The relative error of a ratio of cycles on a target."""
    return _OF_TARGET.get(target) or _ERRORS[targets.get(target).generation.name]


def judge(ratio: float, target: str) -> str:
    """Whether a kernel is "faster" or "slower" than another one, or "no difference".

    ratio: the other kernel's cycles / its own.
    """
    margin = 1 + error(target)
    return "faster" if ratio > margin else "slower" if ratio < 1 / margin else "no difference"
