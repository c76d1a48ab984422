"""Instructions that a GPU executes wrongly wherever they stand. No wait cures them, so the kernel is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rocm_wheels.compile.check import hazards
from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.instructions import Instruction, Kernel

_GRANULE = 16  # gfx1250 allocates vector registers in groups of this number


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form. hazards: the groups that it belongs to, see `Target.hazards`."""

    problem: str
    source: str
    hazards: tuple[str, ...]
    matches: Callable[[Instruction, Kernel], bool]


def _pattern(pattern: str) -> Callable[[Instruction, Kernel], bool]:
    regex = re.compile(pattern)
    return lambda op, _kernel: regex.match(op.text) is not None


def _scratch_below(op: Instruction, _kernel: Kernel) -> bool:
    match = re.match(r"scratch_.*\boffset:-(\d+)", op.text)
    return match is not None and int(match[1]) % 4 != 0


def _reads_last_register(op: Instruction, kernel: Kernel) -> bool:
    if "_f64" not in op.mnemonic or "::" not in op.text:
        return False
    owned = -(-kernel.descriptor["next_free_vgpr"] // _GRANULE) * _GRANULE
    second = isa.instruction(op.text.partition("::")[2].strip())
    return bool(second.reads & isa.VGPRS & 1 << owned - 1)


FORMS = (
    Form(
        problem="the offset of a flat access is ignored", source="LLVM hasFlatSegmentOffsetBug", hazards=("gfx101",),
        matches=_pattern(r"flat_.*\boffset:"),
    ),
    Form(
        problem="a negative offset of scratch memory that is no multiple of 4",
        source="LLVM hasNegativeUnalignedScratchOffsetBug", hazards=("gfx101",), matches=_scratch_below,
    ),
    Form(
        problem="it hangs", source="LLVM FeatureInstFwdPrefetchBug", hazards=("gfx101",),
        matches=_pattern("s_inst_prefetch"),
    ),
    Form(
        problem="beside a 64-bit operation, the second one reads the last VGPR of the wave",
        source="LLVM pull request 224741", hazards=("vopd3",), matches=_reads_last_register,
    ),
)  # fmt: skip


def findings(kernel: Kernel, target: str) -> Iterator[str]:
    """The instructions of these forms. Raises ValueError for an unknown target, and for a target without rules."""
    groups = hazards.of(target)
    forms = [form for form in FORMS if not groups.isdisjoint(form.hazards)]
    for instruction in kernel.instructions:
        for form in forms:
            if form.matches(instruction, kernel):
                yield f"{kernel.symbol}: {instruction.text}: {form.problem} ({form.source})"
