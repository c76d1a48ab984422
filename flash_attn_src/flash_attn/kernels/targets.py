"""GPU targets: one row each, with everything that the kernels, their tuning and a launch need to know about a GPU.

A generic target of LLVM is a target too. Every GPU of its family loads its code objects, where HIP knows generic
targets. A kernel store carries the row of its target (`facts`) for readers that do not import this module.

`rocm_wheels/versions.toml` holds the products, the ROCm versions and the backends of the targets that a wheel serves.
A test holds that every target there has a row here. Standard library only: the compile stage has no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

KIB = 1024
# Columns of `Target` for hardware errata.
ERRATA = ("flushes_subnormals", "vopd_hazard")
# Groups of instruction hazards. Each group is a set of rules in rocm_wheels/compile/check.
Hazard = Literal[
    "gfx9", "gfx940", "mfma", "mfma_gfx908", "gfx950",  # CDNA
    "gfx10", "gfx101", "vcmpx_permlane", "transcendental", "wmma", "sgpr_rewrite",  # RDNA
    "wmma_coexecution", "vopd3", "xcnt", "entry",  # gfx1250
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Target:
    """One GPU target.

    elf_machine: its number in the flags of a code object, EF_AMDGPU_MACH. 0 for NVIDIA GPUs.
    family: the file of `tuning/` with its tiles.
    wavefront: threads that run in step.
    matrix_unit: the kind of its matrix instructions, None where it has none.
    scalar_registers: scalar registers of every wave, before VCC. None where the descriptor of a kernel says it.
    fp8: Triton's name for the FP8 format of the matrix unit, None where the unit takes no FP8.
    num_xcds: compute dies with a level-2 cache each. The hardware deals consecutive programs to them in turn.
    half_up: whether kernels round fp32 to bf16 by integer arithmetic, because the GPU has no instruction for it.
    flops_per_cycle: 16-bit operations of a compute unit in a cycle, by its maker's tables of peak rates. Without a
    matrix unit, fp32 ones.
    dropout_bits: the bits of a column number in which the columns of one thread differ, by the layout of the matrix
    unit's results. See `dropout.keep_mask`.
    shared_memory: bytes that one program can have.
    registers: vector registers of a SIMD for each lane, which its waves share. 0 for NVIDIA GPUs.
    descriptor_granule: vector registers for each step of GRANULATED_WORKITEM_VGPR_COUNT in a kernel descriptor. LLVM,
    "User Guide for AMDGPU Backend". 0 for NVIDIA GPUs.
    flushes_subnormals: whether the matrix unit takes subnormal fp16 and bf16 inputs as zero. fp16 loses what lies below
    6.1e-5, bf16 only what lies below 1.2e-38.
    vopd_hazard: whether the GPU has the erratum of dual instructions that `vopd` rewrites.
    hazards: the groups of hazard rules that its code is checked against. No row inherits them: the check refuses a
    target of AMD without any.
    partial_sums: the head dims whose plain 16-bit forwards are faster with four partial sums of weights:
    docs/notes/clock.md. Others were not measured, or gain nothing.
    generic: the generic target whose code objects the GPU loads too.
    made_for: the GPU of its family whose assembly is assembled for this target. Triton does not compile for a generic
    target. For gfx1031 to gfx1036 and gfx1200 it makes the same code as for the GPU that is named, and for GPUs of
    gfx11 with 1024 registers it spills more (docs/notes/clock.md).
    runs_as: the GPU of its family whose kernels it runs under HSA_OVERRIDE_GFX_VERSION, where HIP loads no generic
    code objects (ROCm 6.1 to 6.3).
    """

    name: str
    elf_machine: int = 0
    family: Literal["nvidia", "cdna", "rdna2", "rdna3", "rdna4"]
    wavefront: Literal[32, 64]
    matrix_unit: Literal["mma", "wgmma", "mfma", "wmma"] | None
    fp8: Literal["fp8e4nv", "fp8e4b8"] | None
    num_xcds: int = 1
    half_up: bool
    flops_per_cycle: int
    dropout_bits: int
    shared_memory: int
    registers: int
    descriptor_granule: int = 8
    scalar_registers: int | None = None
    flushes_subnormals: bool = False
    vopd_hazard: bool = False
    hazards: tuple[Hazard, ...] = ()
    partial_sums: tuple[int, ...] = ()
    generic: str | None = None
    made_for: str | None = None
    runs_as: str | None = None

    @property
    def vendor(self) -> Literal["amd", "nvidia"]:
        return "nvidia" if self.family == "nvidia" else "amd"

    @property
    def is_generic(self) -> bool:
        """Whether it is a generic target of LLVM, whose code objects every GPU of its family loads."""
        return self.made_for is not None and self.generic is None

    @property
    def multiprocessor_units(self) -> int:
        """Compute units that HIP and torch count as one multiprocessor: the two of a work group processor on RDNA."""
        return 2 if self.family.startswith("rdna") else 1

    def loses_range(self, dtype: str) -> bool:
        """Whether products of an element type ("fp16") need scaled operands, because the GPU flushes subnormals."""
        return self.flushes_subnormals and dtype == "fp16"

    @property
    def fnuz(self) -> bool:
        """Whether FP8 is e4m3fnuz: no infinities, one zero, largest value 240."""
        return self.fp8 == "fp8e4b8"


# MFMA of 32 x 32: a thread has four adjacent columns, and the columns 8 and 16 to the right of these.
_CDNA = Target(
    name="", family="cdna", wavefront=64, matrix_unit="mfma", fp8=None, half_up=True, flops_per_cycle=1024,
    dropout_bits=0b11011, shared_memory=64 * KIB, registers=512,
)  # fmt: skip
# No matrix unit: a thread has neighbouring columns.
_RDNA2 = Target(
    name="", family="rdna2", wavefront=32, matrix_unit=None, fp8=None, half_up=True, flops_per_cycle=128,
    dropout_bits=0b1111, shared_memory=64 * KIB, registers=1024, scalar_registers=106,
)  # fmt: skip
# WMMA of gfx11: a thread has every second column.
_RDNA3 = Target(
    name="", family="rdna3", wavefront=32, matrix_unit="wmma", fp8=None, half_up=True, flops_per_cycle=512,
    dropout_bits=0b11110, shared_memory=64 * KIB, registers=1536, scalar_registers=106, vopd_hazard=True,
)  # fmt: skip
# WMMA of gfx12: a thread has 8 columns, and the columns 16 to the right of these.
_RDNA4 = replace(_RDNA3, family="rdna4", fp8="fp8e4nv", flops_per_cycle=1024, dropout_bits=0b10111, vopd_hazard=False)
# mma (from sm_80 on): a thread holds columns 8 apart, and rows.
_NVIDIA = Target(
    name="", family="nvidia", wavefront=32, matrix_unit="mma", fp8=None, half_up=False, flops_per_cycle=4096,
    dropout_bits=0b111000, shared_memory=227 * KIB, registers=0,
    descriptor_granule=0,
)  # fmt: skip


# EF_AMDGPU_MACH: LLVM, "User Guide for AMDGPU Backend".
_ELF_MACHINES = {
    "gfx900": 0x2C, "gfx906": 0x2F, "gfx908": 0x30, "gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F,
    "gfx1010": 0x33, "gfx1011": 0x34, "gfx1012": 0x35, "gfx10-1-generic": 0x52,
    "gfx1030": 0x36, "gfx1031": 0x37, "gfx1032": 0x38, "gfx1033": 0x39, "gfx1034": 0x3E, "gfx1035": 0x3D,
    "gfx1036": 0x45, "gfx10-3-generic": 0x53,
    "gfx1100": 0x41, "gfx1101": 0x46, "gfx1102": 0x47, "gfx1103": 0x44,
    "gfx1150": 0x43, "gfx1151": 0x4A, "gfx1152": 0x55, "gfx1153": 0x58, "gfx11-generic": 0x54,
    "gfx1200": 0x48, "gfx1201": 0x4E, "gfx12-generic": 0x59, "gfx1250": 0x49,
}  # fmt: skip


def _rows(like: Target, *names: str, hazards: tuple[Hazard, ...] = (), **facts: object) -> dict[str, Target]:
    return {
        name: replace(like, name=name, hazards=hazards, **{"elf_machine": _ELF_MACHINES.get(name, 0), **facts})  # type: ignore[arg-type]
        for name in names
    }


_GFX90A: tuple[Hazard, ...] = ("gfx9", "mfma")
_GFX942: tuple[Hazard, ...] = (*_GFX90A, "gfx940")
_GFX103: tuple[Hazard, ...] = ("gfx10", "vcmpx_permlane")
_GFX101: tuple[Hazard, ...] = (*_GFX103, "gfx101")
_GFX115: tuple[Hazard, ...] = ("vcmpx_permlane", "wmma")
_GFX110: tuple[Hazard, ...] = (*_GFX115, "transcendental")
_GFX120: tuple[Hazard, ...] = ("wmma", "sgpr_rewrite")

# For targets that versions.toml does not have, Triton compiles kernels when they are first called.
TARGETS: dict[str, Target] = {
    **_rows(
        _CDNA, "gfx900", "gfx906", hazards=("gfx9",), matrix_unit=None, flops_per_cycle=128, registers=256,
        descriptor_granule=4,
    ),
    **_rows(_CDNA, "gfx908", hazards=("gfx9", "mfma_gfx908"), registers=256, descriptor_granule=4),
    # MI200 alone flushes: ROCm, "MI200 MFMA behavior specifics"; PyTorch, "Numerical accuracy". gfx908 does not.
    **_rows(_CDNA, "gfx90a", hazards=_GFX90A, flushes_subnormals=True),
    **_rows(
        _CDNA, "gfx942", hazards=_GFX942, fp8="fp8e4b8", num_xcds=8, flops_per_cycle=2048, partial_sums=(64, 128),
    ),
    **_rows(
        _CDNA, "gfx950", hazards=(*_GFX942, "gfx950"), fp8="fp8e4nv", num_xcds=8, half_up=False,
        flops_per_cycle=4096, shared_memory=160 * KIB, partial_sums=(64,),
    ),
    **_rows(_RDNA2, "gfx1010", "gfx1011", "gfx1012", hazards=_GFX101, generic="gfx10-1-generic"),
    **_rows(_RDNA2, "gfx1030", hazards=_GFX103, generic="gfx10-3-generic"),
    **_rows(
        _RDNA2, "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036",
        hazards=_GFX103, generic="gfx10-3-generic", made_for="gfx1030", runs_as="gfx1030",
    ),
    **_rows(_RDNA3, "gfx1100", hazards=_GFX110, generic="gfx11-generic"),
    **_rows(_RDNA3, "gfx1101", hazards=_GFX110, generic="gfx11-generic", runs_as="gfx1100"),
    **_rows(_RDNA3, "gfx1151", hazards=_GFX115, generic="gfx11-generic"),
    **_rows(
        _RDNA3, "gfx1102", "gfx1103", hazards=_GFX110, registers=1024, generic="gfx11-generic", made_for="gfx1100",
        runs_as="gfx1100",
    ),
    **_rows(
        _RDNA3, "gfx1150", "gfx1152", "gfx1153", hazards=_GFX115, registers=1024, generic="gfx11-generic",
        made_for="gfx1100",
    ),
    **_rows(_RDNA4, "gfx1200", hazards=_GFX120, generic="gfx12-generic", made_for="gfx1201"),
    **_rows(_RDNA4, "gfx1201", hazards=_GFX120, generic="gfx12-generic"),
    **_rows(_RDNA2, "gfx10-1-generic", hazards=_GFX101, made_for="gfx1010"),
    **_rows(_RDNA2, "gfx10-3-generic", hazards=_GFX103, made_for="gfx1030"),
    **_rows(_RDNA3, "gfx11-generic", hazards=_GFX110, made_for="gfx1100", registers=1024),
    **_rows(_RDNA4, "gfx12-generic", hazards=_GFX120, made_for="gfx1201"),
    **_rows(
        _RDNA4, "gfx1250", hazards=("wmma_coexecution", "vopd3", "xcnt", "entry"), shared_memory=320 * KIB,
        registers=1024, descriptor_granule=16,
    ),
    **_rows(_NVIDIA, "sm_90", fp8="fp8e4nv", matrix_unit="wgmma"),
}  # fmt: skip
# No wheel has kernels for these targets, because neither the simulator nor a GPU has executed any. Triton compiles them
# at their first call.
NOT_EXECUTED = ("gfx1250",)
_CUDA = re.compile(r"sm_[1-9]\d{1,2}")


@cache
def get(name: str) -> Target:
    """The row of a target, by its name. NVIDIA GPUs without a row of their own share one.

    Raises ValueError for an unknown target.
    """
    row = TARGETS.get(name)
    if row is None and _CUDA.fullmatch(name):
        row = replace(_NVIDIA, name=name)
    if row is None:
        raise ValueError(f"unknown GPU target {name!r}: add a row to flash_attn/kernels/targets.py")
    return row


# The first HIP that is known to load code objects of generic targets: tried with 6.4.3 and 7.2.4 (2026-11-24). Whether
# 6.1 to 6.3 load them is not known.
GENERIC_SINCE = (6, 4)


def serving_targets(device: str, hip: str | None) -> tuple[str, ...]:
    """The targets whose code objects a device loads, the best first: its own, then the generic one of its family.

    device: what the runtime calls it, with or without features: "gfx1103", "gfx90a:sramecc+:xnack-". Under
    HSA_OVERRIDE_GFX_VERSION the runtime reports the GPU that the variable names, so that GPU's targets serve.
    hip: the version of HIP, as torch.version.hip has it: "6.4.43482-0f2d60242", None where there is none. Never a
    target whose code objects this HIP refuses. An unknown device has only its own target.
    """
    name = device.partition(":")[0]
    row = TARGETS.get(name)
    version = re.match(r"(\d+)\.(\d+)", hip or "")
    if row is None or row.generic is None or version is None or (int(version[1]), int(version[2])) < GENERIC_SINCE:
        return (name,)
    return (name, row.generic)


def facts(name: str) -> dict[str, Any]:
    """The row of a target for the manifest of its kernel store: docs/notes/kernel-store.md. Raises ValueError as `get`.

    gpus: the GPUs that load the target's code objects. min_hip: the first HIP that does, None for any.
    """
    row = get(name)
    return {
        "elf_machine": row.elf_machine,
        "family": row.family,
        "wavefront": row.wavefront,
        "matrix_unit": row.matrix_unit,
        "fp8": row.fp8,
        "num_xcds": row.num_xcds,
        "multiprocessor_units": row.multiprocessor_units,
        "shared_memory": row.shared_memory,
        "registers": row.registers,
        "errata": [erratum for erratum in ERRATA if getattr(row, erratum)],
        "gpus": [gpu.name for gpu in TARGETS.values() if gpu.generic == name] if row.is_generic else [name],
        "min_hip": list(GENERIC_SINCE) if row.is_generic else None,
    }


def override(name: str) -> tuple[str, str] | None:
    """The GPU whose kernels a GPU runs where HIP loads no generic code objects, and the value of
    HSA_OVERRIDE_GFX_VERSION that makes HIP load them: ("gfx1030", "10.3.0"). None for a GPU without such a relative.
    """
    row = TARGETS.get(name)
    if row is None or row.runs_as is None:
        return None
    digits = row.runs_as.removeprefix("gfx")
    return row.runs_as, f"{digits[:-2]}.{digits[-2]}.{digits[-1]}"


def compiled(name: str, *, windows: bool = False) -> bool:
    """Whether Triton compiles kernels for a GPU of AMD. windows: in Windows, where torch serves Radeon GPUs.

    Triton compiles for no GPU of the Vega generation.
    """
    row = TARGETS.get(name)
    if row is None or row.family == "nvidia" or (row.family == "cdna" and row.matrix_unit is None):
        return False
    return not windows or (row.family.startswith("rdna") and name not in NOT_EXECUTED)


def by_elf_machine(number: int) -> str | None:
    """The name of the target with this number in the flags of its code objects. None for an unknown number."""
    return next((row.name for row in TARGETS.values() if row.elf_machine == number != 0), None)


def fp8_format(name: str) -> str | None:
    """Triton's name for a target's FP8 format. None without FP8 and for an unknown target."""
    return TARGETS[name].fp8 if name in TARGETS else None
