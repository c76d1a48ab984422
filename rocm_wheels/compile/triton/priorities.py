"""Priorities of waves in the loops of a forward, put into Triton's assembly: `s_setprio`, which Triton does not make.

    insert(assembly, "fwd-bf16-d128 for gfx950")

Waves of a SIMD take turns. One that computes weights has only vector instructions to issue, and where it goes before a
wave with products, the matrix unit idles. So a wave has priority from the scaling of its output until its next scores
are there, and none while it computes weights of them.

An added instruction may stand anywhere here: a wait between two instructions only becomes longer, CDNA has no clauses,
and the assembler counts the distances of branches.
"""

from __future__ import annotations

import re

from rocm_wheels.errors import CompileFailed

_LABEL = re.compile(r"(\.L\w+):")
_BRANCH = re.compile(r"\s+s_c?branch\w*\s+(\.L\w+)")
# What a step of a forward consists of, in this order: scores, the rows' maxima, weights, the scaling of the output, and
# the output's products. The scaling is the first multiplication of pairs after the exponentials have begun.
_STEP = ("v_mfma_", "v_max", "v_exp_", "v_pk_mul_", "v_mfma_")
_MAXIMA, _SCALING = 1, 3


def insert(assembly: str, where: str) -> str:
    """The assembly with priorities in each loop that has products. Raises CompileFailed where one has another form.

    where: what the assembly is of, for the error.
    """
    lines = assembly.split("\n")
    loops = [(start, end) for start, end in _loops(lines) if any(_is(line, _STEP[0]) for line in lines[start:end])]
    if not loops:
        raise CompileFailed(f"{where} has no loop with products for wave_priorities: leave the option out")
    added: dict[int, int] = {}  # before which line -> the priority
    for start, end in loops:
        step = _find(lines, start, end)
        if len(step) < len(_STEP):
            raise CompileFailed(
                f"{where}: the loop {lines[start]} has no {_STEP[len(step)]} after {', '.join(_STEP[: len(step)])}, "
                "which wave_priorities looks for: leave the option out"
            )
        added |= {step[_MAXIMA]: 0, step[_SCALING]: 1, end + 1: 0}
    for index in sorted(added, reverse=True):
        lines.insert(index, f"\ts_setprio {added[index]}")
    return "\n".join(lines)


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    """The lines of the label and of the branch of each loop that has no other label and no other branch."""
    loops, label, head = [], "", 0
    for index, line in enumerate(lines):
        if found := _LABEL.match(line):
            label, head = found[1], index
        elif found := _BRANCH.match(line):
            if found[1] == label:
                loops.append((head, index))
            label = ""
    return loops


def _find(lines: list[str], start: int, end: int) -> list[int]:
    """The first line of each part of a step, as far as they are there.

    Exponentials and multiplications count from the last maximum on: a softcap has some in its scores.
    """
    found: list[int] = []
    last = max((index for index in range(start, end) if _is(lines[index], _STEP[_MAXIMA])), default=end)
    for number, name in enumerate(_STEP):
        at = max(last if number > _MAXIMA else start, found[-1] if found else start)
        index = next((index for index in range(at, end) if _is(lines[index], name)), None)
        if index is None:
            break
        found.append(index)
    return found


def _is(line: str, name: str) -> bool:
    return line.lstrip().startswith(name)
