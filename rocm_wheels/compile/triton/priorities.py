"""Inserts `s_setprio` into the loops of a forward. Triton does not emit it.

insert(assembly, "fwd-bf16-d128 for gfx950")

If a wave doing softmax is issued ahead of a wave doing matrix products, the matrix cores idle. So a wave has priority
from the scaling of its output until its next scores are complete, and none while it computes softmax weights. An
instruction may be inserted anywhere here: a wait between two instructions only becomes longer, CDNA has no clauses, and
the assembler computes branch distances.
"""

from __future__ import annotations

import re

from rocm_wheels.errors import CompileFailed

_LABEL = re.compile(r"(\.L\w+):")
_BRANCH = re.compile(r"\s+s_c?branch\w*\s+(\.L\w+)")
# The parts of a forward step, in this order: scores, row maxima, weights, scaling of the output, products of the
# output. Scaling begins at the first packed multiplication after an exponential.
_STEP = ("v_mfma_", "v_max", "v_exp_", "v_pk_mul_", "v_mfma_")
_MAXIMA, _SCALING = 1, 3


def insert(assembly: str, where: str) -> str:
    """The assembly with `s_setprio` in each loop that has products. Raises CompileFailed for a loop of another form.

    where: name of the assembly in the error.
    """
    lines = assembly.split("\n")
    loops = [(start, end) for start, end in _loops(lines) if any(_is(line, _STEP[0]) for line in lines[start:end])]
    if not loops:
        raise CompileFailed(f"{where} has no loop with products for wave_priorities: leave the option out")
    added: dict[int, int] = {}  # line number -> priority to set before that line
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
    """The line numbers of the label and of the branch of each loop without another label or branch."""
    loops, label, head = [], "", 0
    for index, line in enumerate(lines):
        if match := _LABEL.match(line):
            label, head = match[1], index
        elif match := _BRANCH.match(line):
            if match[1] == label:
                loops.append((head, index))
            label = ""
    return loops


def _find(lines: list[str], start: int, end: int) -> list[int]:
    """The first line of each part of a step that is present. Exponentials and multiplications count only after the last
    maximum, because softcap uses some in the scores.
    """
    places: list[int] = []
    last = max((index for index in range(start, end) if _is(lines[index], _STEP[_MAXIMA])), default=end)
    for number, name in enumerate(_STEP):
        at = max(last if number > _MAXIMA else start, places[-1] if places else start)
        index = next((index for index in range(at, end) if _is(lines[index], name)), None)
        if index is None:
            break
        places.append(index)
    return places


def _is(line: str, name: str) -> bool:
    return line.lstrip().startswith(name)
