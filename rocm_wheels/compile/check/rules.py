"""The hazard rules: instructions that must not follow another instruction too closely, with distances and sources.

A rule names an instruction (the producer), a later one (the consumer) that shares registers with it, and the distance
that the hardware needs between the two because it does not wait by itself. The distances are from LLVM
(GCNHazardRecognizer.cpp and the named pull requests) and from AMD ("Manually Inserted Wait States" in the instruction
set guides).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rocm_wheels.compile.check import hazards
from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.instructions import Instruction
from rocm_wheels.compile.check.matrix import distance, reads_accumulator

# The unit of a distance: wait states (an instruction is one, `s_nop N` is N + 1), or vector instructions. A rule with
# the unit BREAK has no distance: its hazard lasts until an instruction that `ends` it.
STATES, VECTORS, BREAK = "wait states", "vector instructions", "instruction"

Registers = Callable[[Instruction], int]
Need = Callable[[Instruction, Instruction, str], int]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One hazard.

    hazards: the groups that the rule belongs to, see `Target.hazards`. producer, consumer: the registers with which an
    instruction takes part, 0 if it does not. most: the largest distance; need: the distance for a producer, a consumer
    and a target. unit: the unit of the distance. ends: instructions that end the hazard. cure: the line that adds one
    unit, or that `ends` the hazard; with "" the kernel is refused.
    """

    name: str
    source: str
    hazards: tuple[str, ...]
    producer: Registers
    consumer: Registers
    most: int
    need: Need | None = None
    unit: str = STATES
    ends: Callable[[Instruction], bool] | None = None
    cure: str = "s_nop"


def _writes(kinds: int, registers: int, *, but: int = 0) -> Registers:
    return lambda op: op.writes & registers if op.kinds & kinds and not op.kinds & but else 0


def _reads(kinds: int, registers: int, *, but: int = 0) -> Registers:
    return lambda op: op.reads & registers if op.kinds & kinds and not op.kinds & but else 0


def _named(pattern: str, registers: Registers) -> Registers:
    regex = re.compile(pattern)
    return lambda op: registers(op) if regex.match(op.mnemonic) else 0


def _source(index: int) -> Registers:
    return lambda op: op.sources[index] if index < len(op.sources) else 0


def _dpp(registers: Registers) -> Registers:
    return lambda op: registers(op) if op.kinds & isa.VALU and op.is_dpp else 0


def _wide_store(op: Instruction) -> int:
    """The data registers of a store of more than 64 bits without a scalar offset."""
    if not re.match(r"(global|flat|scratch|buffer)_store_(dwordx[34]|b96|b128)", op.mnemonic):
        return 0
    data = op.sources[0 if op.mnemonic.startswith("buffer") else 1]
    return 0 if op.mnemonic.startswith("buffer") and op.sources[3:] and op.sources[3] & isa.SGPRS else data


def _wide_store_with_offset(op: Instruction) -> int:
    """The data registers of a buffer store of more than 64 bits with a scalar offset."""
    return op.sources[0] if op.mnemonic.startswith("buffer_store_dwordx") and op.mnemonic[-1] in "34" else 0


def _selects_bits(op: Instruction) -> int:
    """The destination of an instruction that shifts its result into a part of a register."""
    shifted = "dst_sel:" in op.text and "dst_sel:DWORD" not in op.text
    part = shifted or isa.writes_half(op.text, len(op.sources))
    return op.writes & isa.VGPRS if op.kinds == isa.VALU and part else 0


def _outside(kind: int) -> Callable[[Instruction], bool]:
    return lambda op: not op.kinds & kind


def _clause(kind: int) -> Registers:
    return lambda op: int(bool(op.kinds & kind))


def _stores(op: Instruction) -> bool:
    return re.search(r"_store_|_atomic_", op.mnemonic) is not None


def _in_clause(first: Instruction, second: Instruction, _target: str) -> int:
    """1 if two instructions must not share a clause: a load of the clause writes what one of the two reads, or a store
    follows a load.
    """
    if not first.writes:
        return 0
    return int(_stores(second) or bool((first.writes | second.writes) & (first.reads | second.reads)))


def _waits_for_vectors(op: Instruction) -> bool:
    """Whether an instruction waits for all results of vector instructions before it is issued. A wait for all but some
    of them is none: `va_vdst(1)`, or a number whose highest four bits are not 0.
    """
    if op.kinds & _MEMORY:
        return True
    if op.mnemonic != "s_waitcnt_depctr":
        return False
    number = re.fullmatch(r"\S+\s+(0x[0-9a-f]+|\d+)", op.text)
    return int(number[1], 0) >> 12 == 0 if number else "va_vdst(0)" in op.text


_MEMORY = isa.VMEM | isa.LDS


def _operands(op: Instruction) -> int:
    """The registers of the first two source operands of an instruction."""
    return (op.sources[0] | op.sources[1]) & isa.VGPRS if len(op.sources) > 1 else 0


def _uses_vgprs(op: Instruction) -> int:
    return (op.reads | op.writes) & isa.VGPRS if op.kinds & (isa.VALU | _MEMORY) else 0


def _vector_uses(op: Instruction) -> int:
    return (op.reads | op.writes) & isa.VGPRS if op.kinds & isa.VALU else 0


def _after_dot_product(dot: Instruction, other: Instruction, _target: str) -> int:
    """The registers to protect after a dot product. The same instruction may accumulate on the result at once."""
    return 0 if dot.mnemonic == other.mnemonic and not dot.writes & _operands(other) else 3


def _coexecution(first: Instruction, second: Instruction, _target: str) -> int:
    """The vector instructions between a WMMA of gfx1250 and an instruction that shares registers with it, by the
    latency of the WMMA: 4, 8 or 16 cycles; sparse WMMA of 8 and 16 cycles. Another WMMA needs one more.
    """
    name = first.mnemonic
    if "iu8" in name:
        between = 8
    elif re.search(r"_16x16x64_(fp8|bf8)", name) and "swmmac" not in name:
        between = 1
    else:
        between = 2 if "swmmac" in name else 4
    return between + bool(second.kinds & isa.WMMA)


def _many_addresses(op: Instruction) -> int:
    """1 for an image access whose separate address registers take 16 bytes of code."""
    match = re.search(r"\[(v\d+(?:, ?v\d+){5,})\]", op.text)
    return int(op.mnemonic.startswith("image_") and match is not None)


def _offset_bits(op: Instruction) -> int:
    match = re.match(r"t?buffer_.*\boffset:(\d+)", op.text)
    return int(match is not None and int(match[1]) & 6 != 0)


def _plain_vector(registers: Registers) -> Registers:
    return lambda op: registers(op) & isa.VGPRS if op.kinds & isa.VALU and not op.kinds & isa.WMMA else 0


def _index(op: Instruction) -> int:
    """The register of the indices of a sparse WMMA, its third source."""
    return op.sources[2] & isa.VGPRS if "swmmac" in op.mnemonic and len(op.sources) > 2 else 0


def _product_sources(op: Instruction) -> int:
    """A, B and the indices of a WMMA."""
    return _operands(op) | _index(op) if op.kinds & isa.WMMA else 0


RULES = (
    Rule(
        name="loads of a clause that XNACK replays", source="LLVM checkSoftClauseHazards", hazards=("gfx9",),
        producer=_clause(isa.VMEM), consumer=_clause(isa.VMEM), most=1, need=_in_clause, unit=BREAK,
        ends=_outside(isa.VMEM),
    ),
    Rule(
        name="scalar loads of a clause that XNACK replays", source="LLVM checkSoftClauseHazards",
        hazards=("gfx9", "gfx101"),
        producer=_clause(isa.SMEM), consumer=_clause(isa.SMEM), most=1, need=_in_clause, unit=BREAK,
        ends=_outside(isa.SMEM),
    ),
    Rule(
        name="VALU writes SGPR, VMEM reads it", source="LLVM checkVMEMHazards; guides, 4.5", hazards=("gfx9",),
        producer=_writes(isa.VALU, isa.SGPRS), consumer=_reads(isa.VMEM, isa.SGPRS), most=5,
    ),
    Rule(
        name="VALU writes SGPR, v_readlane or v_writelane selects the lane by it",
        source="LLVM checkRWLaneHazards; guides, 4.5", hazards=("gfx9",),
        producer=_writes(isa.VALU, isa.SGPRS),
        consumer=_named(r"v_(read|write)lane", lambda one: one.sources[1] & isa.SGPRS), most=4,
    ),
    Rule(
        name="VALU writes VCC, v_div_fmas reads it", source="LLVM checkDivFMasHazards; guides, 4.5", hazards=("gfx9",),
        producer=_writes(isa.VALU, isa.VCC), consumer=_named("v_div_fmas", lambda _: isa.VCC), most=4,
    ),
    Rule(
        name="VALU writes VGPR, DPP reads it", source="LLVM checkDPPHazards; guides, 4.5", hazards=("gfx9",),
        producer=_writes(isa.VALU, isa.VGPRS), consumer=_dpp(_source(0)), most=2,
    ),
    Rule(
        name="VALU writes EXEC, DPP", source="LLVM checkDPPHazards; guides, 4.5", hazards=("gfx9",),
        producer=_writes(isa.VALU, isa.EXEC), consumer=_dpp(lambda _: isa.EXEC), most=5,
    ),
    Rule(
        name="SALU writes M0, a load to LDS or a relative move reads it",
        source="LLVM checkReadM0Hazards; guides, 4.5", hazards=("gfx9",),
        producer=_writes(isa.SALU, isa.M0),
        consumer=_named(r"buffer_|global_|ds_|[sv]_movrel", lambda one: one.reads & isa.M0), most=1,
    ),
    Rule(
        name="s_setreg, s_getreg", source="LLVM checkGetRegHazards; guides, 4.5", hazards=("gfx9",),
        producer=_named("s_setreg", lambda _: 1), consumer=_named("s_[gs]etreg", lambda _: 1), most=2,
    ),
    Rule(
        name="store of more than 64 bits, VALU overwrites its data",
        source="LLVM checkVALUHazards, pull requests 197267 and 203770; guides, 4.5", hazards=("gfx9",),
        producer=_wide_store, consumer=_writes(isa.VALU, isa.VGPRS), most=2,
        need=lambda _store, _valu, target: 2 if "gfx940" in hazards.of(target) else 1,
    ),
    Rule(
        name="buffer store of more than 64 bits with scalar offset, VALU overwrites its data",
        source="LLVM pull request 197267, May 2026", hazards=("gfx940",),
        producer=_wide_store_with_offset, consumer=_writes(isa.VALU, isa.VGPRS), most=1,
    ),
    Rule(
        name="transcendental writes VGPR, another VALU reads it",
        source="LLVM hasTransForwardingHazard; MI300 guide, 4.5", hazards=("gfx940",),
        producer=_writes(isa.TRANSCENDENTAL, isa.VGPRS),
        consumer=lambda one: one.reads & isa.VGPRS if one.kinds == isa.VALU else 0, most=1,
    ),
    Rule(
        name="VALU writes a part of a VGPR, VALU reads or overwrites it", source="LLVM hasDstSelForwardingHazard",
        hazards=("gfx940",), producer=_selects_bits, consumer=_vector_uses, most=1,
    ),
    Rule(
        name="conversion to FP8 or FP4 writes VGPR, VALU reads or overwrites it",
        source="LLVM hasCvtScaleForwardingHazard, pull requests 117844, 118589 and 140218", hazards=("gfx950",),
        producer=_named(r"v_cvt_scalef32_(sr_)?pk_(fp8|bf8|fp4)_|v_cvt_scalef32_sr_(fp8|bf8)_", lambda one: one.writes),
        consumer=_vector_uses, most=1,
    ),
    Rule(
        name="VALU writes SGPR or VCC, VALU reads it", source="LLVM hasVDecCoExecHazard; MI300 guide, 4.5",
        hazards=("gfx940",), producer=_writes(isa.VALU, isa.SGPRS), consumer=_reads(isa.VALU, isa.SGPRS), most=2,
    ),
    Rule(
        name="VALU writes VGPR, v_readlane reads it", source="LLVM hasVDecCoExecHazard; MI300 guide, 4.5",
        hazards=("gfx940",), producer=_writes(isa.VALU, isa.VGPRS, but=isa.MFMA),
        consumer=_named("v_read(first)?lane", _source(0)), most=1,
    ),
    Rule(
        name="VALU writes EXEC, v_readlane, v_writelane or MFMA",
        source="LLVM hasVDecCoExecHazard, checkMAIHazards90A; MI300 guide, 4.5", hazards=("mfma",),
        producer=_writes(isa.VALU, isa.EXEC),
        consumer=_named(r"v_(readlane|readfirstlane|writelane|s?mfmac?)", lambda _: isa.EXEC), most=4,
    ),
    Rule(
        name="VALU writes VGPR, lanes of permlane swap", source="LLVM checkPermlaneHazards, pull request 117286",
        hazards=("gfx950",), producer=_writes(isa.VALU, isa.VGPRS), most=2,
        consumer=_named(r"v_permlane(16|32)_swap", lambda one: one.reads & isa.VGPRS),
    ),
    Rule(
        name="v_cmpx, permlane swap", source="LLVM checkPermlaneHazards, pull request 117286",
        hazards=("gfx950",), producer=_named("v_cmpx", lambda _: isa.EXEC), most=4,
        consumer=_named(r"v_permlane(16|32)_swap", lambda _: isa.EXEC),
    ),
    Rule(
        name="VALU writes VGPR, MFMA reads it", source="LLVM checkMAIHazards90A; guides, 4.5", hazards=("mfma",),
        producer=_writes(isa.VALU, isa.VGPRS, but=isa.MFMA), consumer=_reads(isa.MFMA, isa.VGPRS), most=2,
    ),
    Rule(
        name="dot product writes VGPR, another VALU uses it", source="LLVM checkMAIVALUHazards", hazards=("mfma",),
        producer=_named(r"v_dot\d", lambda one: one.writes),
        consumer=_uses_vgprs, most=3, need=_after_dot_product,
    ),
    Rule(
        name="MFMA writes, MFMA reads as A or B", source="LLVM checkMAIHazards90A, pull request 222040",
        hazards=("mfma",), producer=_writes(isa.MFMA, isa.VGPRS), most=20, need=distance("source"),
        consumer=lambda one: _operands(one) if one.kinds & isa.MFMA else 0,
    ),
    Rule(
        name="MFMA writes, another MFMA accumulates on it", source="LLVM checkMAIHazards90A, pull request 218363",
        hazards=("mfma",), producer=_writes(isa.MFMA, isa.VGPRS), consumer=reads_accumulator, most=18,
        need=distance("accumulator"),
    ),
    Rule(
        name="MFMA writes, VALU, memory or LDS reads", source="LLVM checkMAIVALUHazards", hazards=("mfma",),
        producer=_writes(isa.MFMA, isa.VGPRS), most=20, need=distance("use"),
        consumer=lambda one: 0 if one.kinds & isa.MFMA else _reads(isa.VALU | _MEMORY, isa.VGPRS)(one),
    ),
    Rule(
        name="MFMA writes, VALU, memory or LDS overwrites", source="LLVM checkMAIVALUHazards, pull request 126132",
        hazards=("mfma",), producer=_writes(isa.MFMA, isa.VGPRS), most=20, need=distance("use"),
        consumer=_writes(isa.VALU | _MEMORY, isa.VGPRS, but=isa.MFMA),
    ),
    Rule(
        name="MFMA accumulates on VGPR, VALU, memory or LDS overwrites it", source="LLVM checkMAIVALUHazards",
        hazards=("mfma",), producer=reads_accumulator, most=15, need=distance("overwrite"),
        consumer=_writes(isa.VALU | _MEMORY, isa.VGPRS, but=isa.MFMA),
    ),
    Rule(
        name="MFMA writes, v_accvgpr_read reads", source="LLVM checkMAIHazards908", hazards=("mfma_gfx908",),
        producer=_writes(isa.MFMA, isa.VGPRS), most=18, need=distance("read of gfx908"),
        consumer=_named("v_accvgpr_read", lambda one: one.reads & isa.VGPRS),
    ),
    Rule(
        name="MFMA writes, another MFMA accumulates on a part of it", source="LLVM checkMAIHazards908",
        hazards=("mfma_gfx908",), producer=_writes(isa.MFMA, isa.VGPRS), consumer=reads_accumulator, most=16,
        need=distance("accumulator"),
    ),
    Rule(
        name="MFMA writes, v_accvgpr_write overwrites", source="LLVM checkMAIHazards908", hazards=("mfma_gfx908",),
        producer=_writes(isa.MFMA, isa.VGPRS), most=15, need=distance("write of gfx908"),
        consumer=_named("v_accvgpr_write", lambda one: one.writes),
    ),
    Rule(
        name="MFMA accumulates on AGPR, v_accvgpr_write overwrites it", source="LLVM checkMAIHazards908",
        hazards=("mfma_gfx908",), producer=reads_accumulator, most=13, need=distance("overwrite of gfx908"),
        consumer=_named("v_accvgpr_write", lambda one: one.writes),
    ),
    Rule(
        name="v_accvgpr_write, MFMA reads", source="LLVM checkMAIHazards908", hazards=("mfma_gfx908",),
        producer=_named("v_accvgpr_write", lambda one: one.writes), consumer=_reads(isa.MFMA, isa.VGPRS), most=3,
        need=lambda write, mfma, _target: 3 if write.writes & _operands(mfma) else 1,
    ),
    Rule(
        name="v_accvgpr_read, memory or LDS reads", source="LLVM checkMAILdStHazards", hazards=("mfma_gfx908",),
        producer=_named("v_accvgpr_read", lambda one: one.writes), consumer=_reads(_MEMORY, isa.VGPRS), most=2,
    ),
    Rule(
        name="v_cmpx, v_permlane", source="LLVM fixVcmpxPermlaneHazards", hazards=("vcmpx_permlane",),
        producer=_named("v_cmpx", lambda _: isa.EXEC), consumer=_named("v_permlane", lambda _: isa.EXEC),
        most=1, unit=VECTORS, cure="",
    ),
    Rule(
        name="image access by six or more addresses, buffer access with offset", source="LLVM checkNSAtoVMEMHazard",
        hazards=("gfx101",), producer=_many_addresses, consumer=_offset_bits, most=1,
    ),
    Rule(
        name="floating point atomic, s_denorm_mode", source="LLVM checkFPAtomicToDenormModeHazard", hazards=("gfx10",),
        producer=_named(r"(buffer|global|flat|image)_atomic_f(add|min|max|cmpswap)", lambda _: 1),
        consumer=_named("s_denorm_mode", lambda _: 1), most=3,
        ends=lambda one: bool(one.kinds & isa.VALU) or one.mnemonic.startswith("s_waitcnt"),
    ),
    Rule(
        name="transcendental writes VGPR, VALU reads it", source="LLVM fixVALUTransUseHazard",
        hazards=("transcendental",), producer=_writes(isa.TRANSCENDENTAL, isa.VGPRS),
        consumer=_reads(isa.VALU, isa.VGPRS), most=6, unit=VECTORS,
        ends=_waits_for_vectors, cure="s_waitcnt_depctr depctr_va_vdst(0)",
    ),
    Rule(
        name="WMMA writes, WMMA reads as A or B", source="LLVM fixWMMAHazards, pull request 76143",
        hazards=("wmma",),
        producer=_writes(isa.WMMA, isa.VGPRS), most=1, unit=VECTORS, cure="v_nop",
        consumer=lambda one: _operands(one) if one.kinds & isa.WMMA else 0,
    ),
    Rule(
        name="WMMA writes, WMMA reads as A, B or indices", source="LLVM checkWMMACoexecutionHazards",
        hazards=("wmma_coexecution",), producer=_writes(isa.WMMA, isa.VGPRS), consumer=_product_sources,
        most=9, need=_coexecution, unit=VECTORS, cure="v_nop",
    ),
    Rule(
        name="WMMA writes, VALU reads or overwrites", source="LLVM checkWMMACoexecutionHazards",
        hazards=("wmma_coexecution",), producer=_writes(isa.WMMA, isa.VGPRS),
        consumer=_plain_vector(lambda one: one.reads | one.writes), most=8, need=_coexecution, unit=VECTORS,
        cure="v_nop",
    ),
    Rule(
        name="WMMA reads, VALU overwrites", source="LLVM checkWMMACoexecutionHazards",
        hazards=("wmma_coexecution",), producer=_reads(isa.WMMA, isa.VGPRS),
        consumer=_plain_vector(lambda one: one.writes), most=8, need=_coexecution, unit=VECTORS, cure="v_nop",
    ),
    Rule(
        name="transcendental writes VGPR, another VALU reads it at once", source="LLVM fixVALUTransCoexecutionHazards",
        hazards=("wmma_coexecution",), producer=_writes(isa.TRANSCENDENTAL, isa.VGPRS),
        consumer=_reads(isa.VALU, isa.VGPRS, but=isa.TRANSCENDENTAL),
        most=1, unit=VECTORS, cure="v_nop",
    ),
    Rule(
        name="transcendental reads VGPR, another VALU overwrites it at once",
        source="LLVM fixVALUTransCoexecutionHazards", hazards=("wmma_coexecution",),
        producer=_reads(isa.TRANSCENDENTAL, isa.VGPRS),
        consumer=_writes(isa.VALU, isa.VGPRS, but=isa.TRANSCENDENTAL),
        most=1, unit=VECTORS, cure="v_nop",
    ),
)  # fmt: skip


def for_target(target: str) -> tuple[Rule, ...]:
    """The rules of a target of AMD. Raises ValueError for an unknown target and for one without hazards."""
    groups = hazards.of(target)
    return tuple(rule for rule in RULES if not groups.isdisjoint(rule.hazards))
