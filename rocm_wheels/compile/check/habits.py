"""What AMD's assembly kernels do sooner than the rules allow.

AMD's code objects cannot be rewritten: each finding is listed here as harmless, or the object is refused. An
explanation is a guess about the hardware: nobody has measured it. What speaks for each habit is that AMD's library
executes these places in every call that has them.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass

from rocm_wheels.compile.check import resources, scan
from rocm_wheels.compile.check.cures import Finding
from rocm_wheels.compile.check.instructions import Instruction, Kernel

# Assumed wait states of a barrier and of a branch: the smallest numbers for which no finding after a matrix instruction
# is left in the code objects of amd-aiter 0.1.7 (with 1 and 1, 222 are left; November 2026). CLRX measured 5 for a
# taken branch of GCN.
BARRIER_STATES, BRANCH_STATES = 3, 8


@dataclass(frozen=True, kw_only=True)
class Habit:
    """Findings of one rule that are accepted.

    rule: the beginning of its name. pair: a pattern for the texts of the second and the first instruction. missing: the
    most wait states that may be missing. reason: why it is accepted.
    """

    name: str
    rule: str
    pair: str
    missing: int
    reason: str


HABITS = (
    Habit(
        name="mask", rule="VALU writes SGPR or VCC, VALU reads it", missing=1,
        pair=r"v_cndmask_b32\S* .* too early after v_cmp_",
        reason="the lanes that v_cndmask selects come after one wait state; every mask and every rounding does this",
    ),
    Habit(
        name="lds", rule="SALU writes M0, a load to LDS or a relative move reads it", missing=1,
        pair=r"buffer_load_dword\S* .* lds: .* too early after s_(mov|add)_[bu]32 m0,",
        reason="M0 is set right before a load to LDS; every tile of keys is loaded so",
    ),
    Habit(
        name="swap", rule="VALU writes VGPR, lanes of permlane swap", missing=1,
        pair=r"v_permlane16_swap_b32\S* .* too early after v_permlane32_swap_b32",
        reason="the second swap comes after one wait state; the weights of every row pass through it",
    ),
)  # fmt: skip
AFTER_PRODUCT = "product"
NAMES = (*(habit.name for habit in HABITS), AFTER_PRODUCT)


def counts(kernel: Kernel, target: str) -> dict[str, int]:
    """How often a kernel has each habit; "product" counts uses of a matrix result after a barrier or a branch.

    Raises ValueError, which names kernel, instruction and rule, for a finding that no habit explains.
    """
    if problems := resources.findings(kernel, target):
        raise ValueError(problems[0])
    violations = scan.findings(kernel, target)
    names = [_habit(finding) for finding in violations]
    if AFTER_PRODUCT in names and (left := list(filter(_is_product, scan.findings(_slowed(kernel), target)))):
        raise ValueError(str(left[0]))
    counted = Counter(names)
    return {name: counted[name] for name in NAMES if counted[name]}


def _habit(finding: Finding) -> str:
    if _is_product(finding):
        return AFTER_PRODUCT
    for habit in HABITS:
        close = finding.rule.startswith(habit.rule) and finding.missing <= habit.missing
        if close and re.match(habit.pair, finding.problem):
            return habit.name
    raise ValueError(str(finding))


def _is_product(finding: Finding) -> bool:
    return finding.rule.startswith("MFMA ")


def _slowed(kernel: Kernel) -> Kernel:
    """The kernel, with barriers and branches that last their assumed wait states."""
    return dataclasses.replace(kernel, instructions=tuple(map(_slow, kernel.instructions)))


def _slow(op: Instruction) -> Instruction:
    if op.mnemonic == "s_barrier":
        return dataclasses.replace(op, states=BARRIER_STATES)
    if op.mnemonic.startswith(("s_branch", "s_cbranch")):
        return dataclasses.replace(op, states=BRANCH_STATES)
    return op
