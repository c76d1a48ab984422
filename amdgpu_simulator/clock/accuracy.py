"""How far apart the simulated cycles of two kernels must be before the difference says something about hardware."""

from __future__ import annotations

from amdgpu_simulator.isa import targets

# Relative error of a ratio of cycles between kernels of different authors, for each generation. CDNA: the worst error
# of a utilisation against hardware counters of MI300X is 16 % (`python -m amdgpu_simulator calibrate`). RDNA: no
# counters are published. A speed-up that its authors measured as 2.24 on gfx1100 is 1.46 in simulated cycles. AITER's
# forward reaches 41 to 50 % of the peak on hardware, and 37 to 61 % in the simulator.
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
