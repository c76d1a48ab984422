"""The GPUs whose instructions the simulator knows, and how their generations differ.

A target is here once somebody has taught its instructions. Every other name is refused, because a GPU that runs by the
rules of a relative gives wrong results in silence. `rows` has the other facts of a target: wavefront, FP8 format,
shared memory, errata. It is a link to `flash_attn/kernels/targets.py`, so that both packages have one table and the
simulator installs without flash_attn.

Sources: the guides that `amdgpu_simulator` names; LLVM, "User Guide for AMDGPU Backend".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from amdgpu_simulator.isa import rows


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The differences between families of GPUs.

    max_shared: largest count of the wave's counter for shared memory. counts_stores: whether
    stores share a counter with loads of global memory; otherwise they have a counter of their own. keeps_half: whether
    a result of 16 bits keeps the other half of its register. ids_in_ttmp: whether the number of the work group is in
    trap registers; otherwise it is in scalar registers. has_ieee_mode: whether MODE has the bits IEEE and DX10_CLAMP.
    matrix: the operand layout of matrix instructions, None without them. `mirrored` is WMMA in which both halves of a
    wave hold the same rows; `split` is WMMA in which each half holds half of a row.
    """

    name: str
    max_shared: int
    counts_stores: bool
    keeps_half: bool
    ids_in_ttmp: bool = False
    has_ieee_mode: bool = True
    matrix: Literal["mfma", "mirrored", "split"] | None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU target: how its instructions work, and its row of facts."""

    name: str
    generation: Generation
    row: rows.Target

    @property
    def wave(self) -> int:
        """Lanes of a wave."""
        return self.row.wavefront

    @property
    def fnuz(self) -> bool:
        """Whether FP8 is e4m3fnuz instead of OCP's e4m3fn."""
        return self.row.fnuz

    @property
    def flushes_subnormals(self) -> bool:
        """Whether products of fp16 and bf16 flush subnormal inputs and results to zero: see `matrix`."""
        return self.row.flushes_subnormals

    @property
    def vopd_hazard(self) -> bool:
        """Whether a dual instruction may read a register too early: see `dual`."""
        return self.row.vopd_hazard

    @property
    def shared_bytes(self) -> int:
        """Maximum shared memory of a work group; M0 has enough bits for it."""
        return self.row.shared_memory


_CDNA = Generation(name="CDNA", max_shared=15, counts_stores=True, keeps_half=False, matrix="mfma")
_RDNA2 = Generation(name="RDNA2", max_shared=63, counts_stores=False, keeps_half=True, matrix=None)
_RDNA1 = replace(_RDNA2, name="RDNA1")
_RDNA3 = replace(_RDNA2, name="RDNA3", matrix="mirrored")
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
TARGETS = {
    name: Target(name=name, generation=generation, row=rows.get(name))
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
