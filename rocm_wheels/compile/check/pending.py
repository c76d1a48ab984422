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
    return lambda op, pending: (0 if ends(op) else pending) | starts(op)


def _depctr(op: Instruction, counter: str, mask: int) -> bool:
    """Whether an instruction is s_waitcnt_depctr for all of a counter, whose bits of the number are `mask`."""
    if op.mnemonic != "s_waitcnt_depctr":
        return False
    number = re.fullmatch(r"\S+\s+(0x[0-9a-f]+|\d+)", op.text)
    return int(number[1], 0) & mask == 0 if number else f"{counter}(0)" in op.text


def _counts(op: Instruction) -> dict[str, int]:
    """The counters of s_waitcnt and their limits."""
    return {name: int(limit) for name, limit in re.findall(r"(\w+cnt)\((\d+)\)", op.text)}


def _waits_for_all(op: Instruction) -> bool:
    """Whether an instruction is s_waitcnt for every counter that it has."""
    return op.mnemonic == "s_waitcnt" and (
        _counts(op) == {"vmcnt": 0, "expcnt": 0, "lgkmcnt": 0} or op.text.split()[-1] in ("0", "0x0")
    )


def _scalar_sources(op: Instruction) -> int:
    """The scalar registers that VMEM and LDS read. They read EXEC too."""
    return op.reads & (isa.SGPRS | isa.M0) | isa.EXEC if op.kinds & _MEMORY else 0


def _has_read_sources(op: Instruction) -> bool:
    return bool(op.kinds & isa.VALU) or _waits_for_all(op) or _depctr(op, "depctr_vm_vsrc", 0b11100)


def _scalar_results(op: Instruction) -> int:
    return op.writes if op.kinds & (isa.SALU | isa.SMEM) else 0


def _scalar_load_is_over(op: Instruction) -> bool:
    if op.mnemonic in ("s_waitcnt", "s_waitcnt_lgkmcnt"):
        return _waits_for_all(op) or _counts(op).get("lgkmcnt") == 0 or op.text.split()[1:] == ["null,", "0x0"]
    return bool(op.kinds & isa.SALU) and not _SOPP.match(op.mnemonic)


def _reads_exec(op: Instruction) -> int:
    """EXEC for an instruction that reads it, except VALU."""
    if op.kinds & isa.VALU:
        return 0
    return isa.EXEC if op.kinds & _MEMORY or op.reads & isa.EXEC or op.mnemonic.startswith("s_cbranch_exec") else 0


def _writes_scalar_by_vector(op: Instruction) -> bool:
    return bool(op.kinds & isa.VALU and op.writes & (isa.SGPRS | isa.EXEC)) or _depctr(op, "depctr_sa_sdst", 1)


# Flags of the hazard of LDS, branch and VMEM: the last access to memory, without and with a branch after it.
_LDS, _VMEM, _LDS_BRANCH, _VMEM_BRANCH = 1, 2, 4, 8


def _kind_of_access(op: Instruction) -> int:
    to_lds = op.kinds & isa.LDS or op.text.endswith(" lds") or "_load_lds_" in op.mnemonic
    return _LDS if to_lds else _VMEM if op.kinds & isa.VMEM else 0


def _after_access(op: Instruction, pending: int) -> int:
    if op.mnemonic == "s_waitcnt_vscnt" and op.text.split()[-1] in ("0", "0x0"):
        return 0
    if op.mnemonic.startswith(("s_branch", "s_cbranch")):
        return pending | (pending & (_LDS | _VMEM)) << 2
    return _kind_of_access(op) or pending


def _other_access(op: Instruction) -> int:
    return {_LDS: _VMEM_BRANCH, _VMEM: _LDS_BRANCH}.get(_kind_of_access(op), 0)


# Two bits above the bits of registers: a scalar access, or a vector access, has an address that is not translated yet.
# The hardware waits by itself between a scalar and a vector access.
_SCALAR_KIND, _VECTOR_KIND = 1 << isa.SCALARS + 200, 1 << isa.SCALARS + 201


def _after_translation(op: Instruction, pending: int) -> int:
    """The registers of accesses that XNACK may replay. A wait for some of the accesses is taken for a wait for all."""
    if op.mnemonic.startswith("s_wait_xcnt") or op.mnemonic == "s_wait_idle":
        return 0
    if op.mnemonic.startswith("s_wait_loadcnt"):
        return pending if pending & _SCALAR_KIND else 0
    if op.mnemonic == "s_wait_kmcnt" and op.text.split()[-1] in ("0", "0x0"):
        return pending if pending & _VECTOR_KIND else 0
    if op.kinds & isa.SMEM:
        return (0 if pending & _VECTOR_KIND else pending) | op.reads | _SCALAR_KIND
    if op.kinds & isa.VMEM and op.reads:
        # Vector accesses are translated in order.
        older = 0 if pending & _SCALAR_KIND or op.writes & pending else pending
        return older | op.reads | isa.EXEC | _VECTOR_KIND
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

    def after(_: int, op: Instruction, state: flow.State) -> flow.State:
        return tuple(rule.after(op, pending) for rule, pending in zip(rules, state, strict=True))

    return [
        Finding(kernel.symbol, index, f"{rule.name}; {rule.source}", f"{op.text}: without {rule.cure}", 1, rule.cure)
        for index, state in flow.before(kernel, (0,) * len(rules), after).items()
        for rule, pending in zip(rules, state, strict=True)
        if (op := kernel.instructions[index]) and rule.breaks(op) & pending
    ]
