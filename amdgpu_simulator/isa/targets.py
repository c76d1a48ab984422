"""The GPUs whose instructions the simulator knows, and how their generations differ.

A target is here once somebody has taught its instructions. Every other name is refused, because a GPU that runs by the
rules of a relative gives wrong results in silence. What a compiler and a launch must know about a target is in
`flash_attn/kernels/targets.py`; a test compares the columns that both tables have.

Sources: the guides that `amdgpu_simulator` names; LLVM, "User Guide for AMDGPU Backend".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The differences between families of GPUs.

    wave: lanes of a wave. max_shared: largest count of the wave's counter for shared memory. counts_stores: whether
    stores share a counter with loads of global memory; otherwise they have a counter of their own. keeps_half: whether
    a result of 16 bits keeps the other half of its register. ids_in_ttmp: whether the number of the work group is in
    trap registers; otherwise it is in scalar registers. has_ieee_mode: whether MODE has the bits IEEE and DX10_CLAMP.
    vopd_hazard: whether a dual instruction may read a register too early (`dual`). matrix: the operand layout of matrix
    instructions, None without them. `mirrored` is WMMA in which both halves of a wave hold the same rows; `split` is
    WMMA in which each half holds half of a row.
    """

    name: str
    wave: Literal[32, 64]
    max_shared: int
    counts_stores: bool
    keeps_half: bool
    ids_in_ttmp: bool = False
    vopd_hazard: bool = False
    has_ieee_mode: bool = True
    matrix: Literal["mfma", "mirrored", "split"] | None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU target.

    fnuz: whether FP8 is e4m3fnuz instead of OCP's e4m3fn. flushes_subnormals: whether products of fp16 and bf16 flush
    subnormal inputs and results to zero: see `matrix`. shared_bytes: maximum shared memory of a work group; M0 has
    enough bits for it.
    """

    name: str
    generation: Generation
    fnuz: bool = False
    flushes_subnormals: bool = False
    shared_bytes: int = 64 << 10

    @property
    def wave(self) -> int:
        """Lanes of a wave."""
        return self.generation.wave


_CDNA = Generation(name="CDNA", wave=64, max_shared=15, counts_stores=True, keeps_half=False, matrix="mfma")
_RDNA2 = Generation(name="RDNA2", wave=32, max_shared=63, counts_stores=False, keeps_half=True, matrix=None)
_RDNA1 = replace(_RDNA2, name="RDNA1")
_RDNA3 = replace(_RDNA2, name="RDNA3", matrix="mirrored", vopd_hazard=True)
_RDNA4 = replace(_RDNA2, name="RDNA4", matrix="split", ids_in_ttmp=True, has_ieee_mode=False)

# Triton compiles the code of a generic target for one GPU of the family, so the rules of the family apply.
_NAMES: dict[Generation, tuple[str, ...]] = {
    _CDNA: ("gfx908", "gfx90a", "gfx942", "gfx950"),
    _RDNA1: ("gfx1010", "gfx1011", "gfx1012", "gfx10-1-generic"),
    _RDNA2: ("gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036", "gfx10-3-generic"),
    _RDNA3: (
        *("gfx1100", "gfx1101", "gfx1102", "gfx1103"),
        *("gfx1150", "gfx1151", "gfx1152", "gfx1153", "gfx11-generic"),
    ),
    _RDNA4: ("gfx1200", "gfx1201", "gfx12-generic"),
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "gfx90a": {"flushes_subnormals": True},
    "gfx942": {"fnuz": True},
    "gfx950": {"shared_bytes": 160 << 10},
}
TARGETS = {
    name: Target(name=name, generation=generation, **_SPECIAL.get(name, {}))
    for generation, names in _NAMES.items()
    for name in names
}


def get(name: str) -> Target:
    """The target with this name. Raises ValueError for a target whose instructions the simulator does not know."""
    if name not in TARGETS:
        raise ValueError(
            f"the simulator does not know the instructions of {name}, only those of {', '.join(TARGETS)}: teach it "
            "them, then add the name to amdgpu_simulator/isa/targets.py"
        )
    return TARGETS[name]
