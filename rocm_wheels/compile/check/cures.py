"""The hazards that the check finds in a kernel, and the text with the missing instructions inserted."""

from __future__ import annotations

from typing import NamedTuple

from rocm_wheels.compile.check.instructions import Kernel

NOP, VECTOR_NOP = "s_nop", "v_nop"


class Finding(NamedTuple):
    """An instruction that breaks a rule.

    place: its index in the kernel. missing: the number of units that are missing before it. cure: the line to insert
    before it, NOP for wait states, "" if no instruction helps.
    """

    kernel: str
    place: int
    rule: str
    problem: str
    missing: int
    cure: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.problem} ({self.rule})"


def cured(assembly: str, found: list[tuple[Kernel, list[Finding]]]) -> str:
    """The text with the missing instructions inserted. Raises ValueError if no instruction helps."""
    lines = assembly.split("\n")
    added: dict[int, list[Finding]] = {}
    for kernel, findings in found:
        for finding in findings:
            if not finding.cure:
                raise ValueError(str(finding))
            added.setdefault(kernel.lines[finding.place], []).append(finding)
    for number in sorted(added, reverse=True):
        lines[number:number] = [f"\t{code}" for code in _codes(added[number])]
    return "\n".join(lines)


def _codes(findings: list[Finding]) -> list[str]:
    """The lines to insert before one instruction: first every other cure, as often as a finding lacks it (a wait for a
    counter once), then the longest s_nop, in steps that every target has.
    """
    longest = max((finding.missing for finding in findings if finding.cure == NOP), default=0)
    steps = [f"{NOP} {min(8, longest - start) - 1}" for start in range(0, longest, 8)]
    times: dict[str, int] = {}
    for finding in findings:
        if finding.cure != NOP:
            times[finding.cure] = max(times.get(finding.cure, 1), finding.missing if finding.cure == VECTOR_NOP else 1)
    return [*(cure for cure, count in times.items() for _ in range(count)), *steps]
