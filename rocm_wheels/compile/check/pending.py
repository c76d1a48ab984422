"""Hazards without a distance: an instruction must not come before a wait for what an earlier one still does.

Each rule follows a set of registers or flags over every path. Sources: LLVM's GCNHazardRecognizer.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rocm_wheels.compile.check import flow, hazards
from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.cures import Finding
from rocm_wheels.compile.check.instructions import Instruction, Kernel

_MEMORY = isa.VMEM | isa.LDS
# Scalar instructions without operands in registers, which the hardware does not issue as scalar arithmetic.
_SOPP = re.compile(
    r"s_(nop|branch|cbranch|wait|barrier|endpgm|clause|inst_prefetch|sleep|setprio|sendmsg|ttracedata|denorm_mode"
    r"|round_mode|code_end|icache_inv|trap|sethalt|setkill|incperf|decperf|version|setvskip)"
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One hazard.

    hazards: the groups that the rule belongs to, see `Target.hazards`. after: what is pending after an instruction,
    from what was pending before it. breaks: the part of it that an instruction must not meet, 0 for none. problem: the
    end of the message. cure: the line that ends the hazard.
    """

    name: str
    source: str
    hazards: tuple[str, ...]
    after: Callable[[Instruction, int], int]
    breaks: Callable[[Instruction], int]
    cure: str


def _until(
    ends: Callable[[Instruction], bool], starts: Callable[[Instruction], int]
) -> Callable[[Instruction, int], int]:
    return lambda one, pending: (0 if ends(one) else pending) | starts(one)


def _depctr(one: Instruction, counter: str, mask: int) -> bool:
    """Whether an instruction is s_waitcnt_depctr for all of a counter, whose bits of the number are `mask`."""
    if one.mnemonic != "s_waitcnt_depctr":
        return False
    number = re.fullmatch(r"\S+\s+(0x[0-9a-f]+|\d+)", one.text)
    return int(number[1], 0) & mask == 0 if number else f"{counter}(0)" in one.text


def _counts(one: Instruction) -> dict[str, int]:
    """The counters of s_waitcnt and their limits."""
    return {name: int(limit) for name, limit in re.findall(r"(\w+cnt)\((\d+)\)", one.text)}


def _waits_for_all(one: Instruction) -> bool:
    """Whether an instruction is s_waitcnt for every counter that it has."""
    return one.mnemonic == "s_waitcnt" and (
        _counts(one) == {"vmcnt": 0, "expcnt": 0, "lgkmcnt": 0} or one.text.split()[-1] in ("0", "0x0")
    )


def _scalar_sources(one: Instruction) -> int:
    """The scalar registers that VMEM and LDS read. They read EXEC too."""
    return one.reads & (isa.SGPRS | isa.M0) | isa.EXEC if one.kinds & _MEMORY else 0


def _has_read_sources(one: Instruction) -> bool:
    return bool(one.kinds & isa.VALU) or _waits_for_all(one) or _depctr(one, "depctr_vm_vsrc", 0b11100)


def _scalar_results(one: Instruction) -> int:
    return one.writes if one.kinds & (isa.SALU | isa.SMEM) else 0


def _scalar_load_is_over(one: Instruction) -> bool:
    if one.mnemonic in ("s_waitcnt", "s_waitcnt_lgkmcnt"):
        return _waits_for_all(one) or _counts(one).get("lgkmcnt") == 0 or one.text.split()[1:] == ["null,", "0x0"]
    return bool(one.kinds & isa.SALU) and not _SOPP.match(one.mnemonic)


def _reads_exec(one: Instruction) -> int:
    """EXEC for an instruction that reads it, except VALU."""
    if one.kinds & isa.VALU:
        return 0
    return isa.EXEC if one.kinds & _MEMORY or one.reads & isa.EXEC or one.mnemonic.startswith("s_cbranch_exec") else 0


def _writes_scalar_by_vector(one: Instruction) -> bool:
    return bool(one.kinds & isa.VALU and one.writes & (isa.SGPRS | isa.EXEC)) or _depctr(one, "depctr_sa_sdst", 1)


# Flags of the hazard of LDS, branch and VMEM: the last access to memory, without and with a branch after it.
_LDS, _VMEM, _LDS_BRANCH, _VMEM_BRANCH = 1, 2, 4, 8


def _kind_of_access(one: Instruction) -> int:
    to_lds = one.kinds & isa.LDS or one.text.endswith(" lds") or "_load_lds_" in one.mnemonic
    return _LDS if to_lds else _VMEM if one.kinds & isa.VMEM else 0


def _after_access(one: Instruction, pending: int) -> int:
    if one.mnemonic == "s_waitcnt_vscnt" and one.text.split()[-1] in ("0", "0x0"):
        return 0
    if one.mnemonic.startswith(("s_branch", "s_cbranch")):
        return pending | (pending & (_LDS | _VMEM)) << 2
    return _kind_of_access(one) or pending


def _other_access(one: Instruction) -> int:
    return {_LDS: _VMEM_BRANCH, _VMEM: _LDS_BRANCH}.get(_kind_of_access(one), 0)


# Two bits above the bits of registers: a scalar access, or a vector access, has an address that is not translated yet.
# The hardware waits by itself between a scalar and a vector access.
_SCALAR_KIND, _VECTOR_KIND = 1 << isa.SCALARS + 200, 1 << isa.SCALARS + 201


def _after_translation(one: Instruction, pending: int) -> int:
    """The registers of accesses that XNACK may replay. A wait for some of the accesses is taken for a wait for all."""
    if one.mnemonic.startswith("s_wait_xcnt") or one.mnemonic == "s_wait_idle":
        return 0
    if one.mnemonic.startswith("s_wait_loadcnt"):
        return pending if pending & _SCALAR_KIND else 0
    if one.mnemonic == "s_wait_kmcnt" and one.text.split()[-1] in ("0", "0x0"):
        return pending if pending & _VECTOR_KIND else 0
    if one.kinds & isa.SMEM:
        return (0 if pending & _VECTOR_KIND else pending) | one.reads | _SCALAR_KIND
    if one.kinds & isa.VMEM and one.reads:
        # Vector accesses are translated in order.
        older = 0 if pending & _SCALAR_KIND or one.writes & pending else pending
        return older | one.reads | isa.EXEC | _VECTOR_KIND
    return pending


RULES = (
    Rule(
        name="memory access reads register, overwritten before its address is translated",
        source="LLVM SIInsertWaitcnts, X_CNT", hazards=("xcnt",), after=_after_translation,
        breaks=lambda one: 0 if one.kinds & isa.VMEM else one.writes, cure="s_wait_xcnt 0x0",
    ),
    Rule(
        name="VMEM or LDS reads scalar register, SALU or SMEM overwrites it",
        source="LLVM fixVMEMtoScalarWriteHazards; EXEC by s_and_saveexec: Mesa aco_insert_NOPs",
        hazards=("gfx101",), after=_until(_has_read_sources, _scalar_sources), breaks=_scalar_results,
        cure="s_waitcnt_depctr depctr_vm_vsrc(0)",
    ),
    Rule(
        name="SMEM reads SGPR, VALU overwrites it", source="LLVM fixSMEMtoVectorWriteHazards", hazards=("gfx101",),
        after=_until(_scalar_load_is_over, lambda one: one.reads & isa.SGPRS if one.kinds & isa.SMEM else 0),
        breaks=lambda one: one.writes & isa.SGPRS if one.kinds & isa.VALU else 0,
        cure="s_mov_b32 null, 0",
    ),
    Rule(
        name="EXEC is read, v_cmpx overwrites it", source="LLVM fixVcmpxExecWARHazard", hazards=("gfx101",),
        after=_until(_writes_scalar_by_vector, _reads_exec),
        breaks=lambda one: one.writes & isa.EXEC if one.kinds & isa.VALU else 0,
        cure="s_waitcnt_depctr depctr_sa_sdst(0)",
    ),
    Rule(
        name="LDS and VMEM on two sides of a branch", source="LLVM fixLdsBranchVmemWARHazard", hazards=("gfx101",),
        after=_after_access, breaks=_other_access, cure="s_waitcnt_vscnt null, 0x0",
    ),
)  # fmt: skip


def findings(kernel: Kernel, target: str) -> list[Finding]:
    """The violations of the rules of a target, in the order of the instructions. Raises ValueError as `hazards.of`."""
    groups = hazards.of(target)
    rules = tuple(rule for rule in RULES if not groups.isdisjoint(rule.hazards))
    if not rules:
        return []

    def after(_: int, one: Instruction, state: flow.State) -> flow.State:
        return tuple(rule.after(one, pending) for rule, pending in zip(rules, state, strict=True))

    return [
        Finding(kernel.symbol, index, f"{rule.name}; {rule.source}", f"{one.text}: without {rule.cure}", 1, rule.cure)
        for index, state in flow.before(kernel, (0,) * len(rules), after).items()
        for rule, pending in zip(rules, state, strict=True)
        if (one := kernel.instructions[index]) and rule.breaks(one) & pending
    ]
