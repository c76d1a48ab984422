"""Checks AMD's assembly kernels for hazards. Their text comes from a disassembler, because AMD publishes none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from amdgpu_simulator import assembly_kernels
from amdgpu_simulator.isa import disassembly
from rocm_wheels.compile.asm import package
from rocm_wheels.compile.check import habits, instructions


def counts(one: package.CodeObject) -> dict[str, int]:
    """The habits of a code object (`rocm_wheels.compile.check.habits`).

    Raises ValueError for a hazard that no habit explains, MissingTool and debian.UnavailableError as
    `assembly_kernels.program`.
    """
    return habits.counts(read(one), one.target)


def read(one: package.CodeObject) -> instructions.Kernel:
    """The instructions of a code object. Raises the errors of `counts`, except ValueError."""
    kernel = disassembly.kernel(assembly_kernels.image(one.target, one.kernel), target=one.target)
    labels: dict[int, list[str]] = {}
    for label, index in kernel.labels.items():
        labels.setdefault(index, []).append(f"{label}:")
    lines = []
    for index, parts in enumerate(kernel.instructions):
        text = " :: ".join(part.text for part in parts)
        lines += [*labels.get(index, ()), re.sub(r"<([^>]+)>", r"\1", text)]
    return instructions.kernel(one.kernel, list(enumerate(lines)), {})


def table() -> Iterator[str]:
    """Yields a line for each code object with its habits, then the sums for each target.

    Raises ValueError for a hazard that no habit explains, and for counts that differ from the data file.
    """
    totals: dict[str, Counter[str]] = {}
    for code in package.load().objects:
        places = counts(code)
        yield f"{code.target} {code.kernel:36} {_written(places)}"
        if places != code.places:
            raise ValueError(
                f"{code.kernel} of {code.target}: {package.DATA_FILE.name} has places {_written(code.places)}"
            )
        totals.setdefault(code.target, Counter()).update(places)
    for target, places in totals.items():
        yield f"{target} {'all':36} {_written(places)}"


def _written(places: dict[str, int]) -> str:
    inside = ", ".join(f"{name} = {number}" for name, number in places.items())
    return f"{{ {inside} }}" if inside else "{}"
