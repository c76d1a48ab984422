"""What the check found in a kernel, and the text with what is missing put in."""

from __future__ import annotations

from typing import NamedTuple

from rocm_wheels.compile.check.instructions import Kernel

NOP = "s_nop"


class Finding(NamedTuple):
    """An instruction that breaks a rule.

    place: its number in the kernel. missing: how many units it comes too early. cure: the line that goes before it, NOP
    for so many wait states, "" where there is none.
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
    """The text with what is missing put in before each instruction. Raises ValueError where nothing helps."""
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
    """The lines before one instruction: each other cure once, then the longest wait, in steps that every target has."""
    longest = max((finding.missing for finding in findings if finding.cure == NOP), default=0)
    steps = [f"{NOP} {min(8, longest - start) - 1}" for start in range(0, longest, 8)]
    return [*dict.fromkeys(finding.cure for finding in findings if finding.cure != NOP), *steps]
