"""How far apart the simulated cycles of two kernels must be before the difference says something about hardware."""

from __future__ import annotations

from amdgpu_simulator.isa import targets

# Relative error of a ratio of cycles between kernels of different authors, for each generation. CDNA: the worst error
# of a utilisation against hardware counters of MI300X is 16 % (`python -m amdgpu_simulator calibrate`). RDNA: two of
# three figures of `python -m amdgpu_simulator published` are closer than 30 %; a few kernels, whose authors had other
# compilers, are 2 times too fast. RDNA 1 and 2 have no published figure.
_ERRORS = {"CDNA": 0.16, "RDNA1": 0.3, "RDNA2": 0.3, "RDNA3": 0.3, "RDNA4": 0.3}


def error(target: str) -> float:
    """The relative error of a ratio of cycles on a target."""
    return _ERRORS[targets.get(target).generation.name]


def judge(ratio: float, target: str) -> str:
    """Whether a kernel is "faster" or "slower" than another one, or "no difference".

    ratio: the other kernel's cycles / its own.
    """
    margin = 1 + error(target)
    return "faster" if ratio > margin else "slower" if ratio < 1 / margin else "no difference"
