"""GFX11's VOPD hazard: finds dual instructions that may read a register too early, and rewrites them.

A dual instruction (VOPD) issues two vector operations, X and Y. On GFX11, where X and Y read VGPRs of the same parity
in the same source slot, the hardware may not wait for the last write to one of the two registers (LLVM pull request
220348; AOTriton issue 183 measured it on gfx1150). The rule here is LLVM's: the VGPRs of X and Y in a slot must be one
even and one odd. The slots are the read ports of the register file: SRC0, SRC1, and SRC2 for the accumulator of fmac
and dot2acc and for the addend of fmamk (RDNA 3 instruction set guide, "Dual Issue VALU").

LLVM inside Triton 3.7.1 pairs operations by the older rule, four banks instead of two. So the assembly is rewritten:
the pair stays one instruction where another spelling of its halves obeys the rule, and is split otherwise.

The text is the assembly that LLVM prints. Standard library only: the compile stage has no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

SLOTS = ("SRC0", "SRC1", "SRC2")
RULE = "VOPD: X and Y read VGPRs of the same parity in one source slot (LLVM pull request 220348)"


class Operation(NamedTuple):
    """How a half is written as an instruction of its own, and where it reads.

    operands: what each operand is: d destination, a destination and accumulator, 0 to 2 a source slot, k a literal.
    commuted: the operation with its operands of slots 0 and 1 exchanged, "" where there is none.
    """

    single: str
    operands: str
    commuted: str = ""
    only_y: bool = False


OPERATIONS = {
    "add_f32": Operation("v_add_f32_e32", "d01", "add_f32"),
    "add_nc_u32": Operation("v_add_nc_u32_e32", "d01", "add_nc_u32", only_y=True),
    "and_b32": Operation("v_and_b32_e32", "d01", "and_b32", only_y=True),
    "cndmask_b32": Operation("v_cndmask_b32_e32", "d01"),
    "dot2acc_f32_bf16": Operation("v_dot2_f32_bf16", "a01", "dot2acc_f32_bf16"),
    "dot2acc_f32_f16": Operation("v_dot2acc_f32_f16_e32", "a01", "dot2acc_f32_f16"),
    "fmaak_f32": Operation("v_fmaak_f32", "d01k", "fmaak_f32"),
    "fmac_f32": Operation("v_fmac_f32_e32", "a01", "fmac_f32"),
    "fmamk_f32": Operation("v_fmamk_f32", "d0k2"),
    "lshlrev_b32": Operation("v_lshlrev_b32_e32", "d01", only_y=True),
    "max_f32": Operation("v_max_f32_e32", "d01", "max_f32"),
    "min_f32": Operation("v_min_f32_e32", "d01", "min_f32"),
    "mov_b32": Operation("v_mov_b32_e32", "d0"),
    "mul_dx9_zero_f32": Operation("v_mul_dx9_zero_f32_e32", "d01", "mul_dx9_zero_f32"),
    "mul_f32": Operation("v_mul_f32_e32", "d01", "mul_f32"),
    "sub_f32": Operation("v_sub_f32_e32", "d01", "subrev_f32"),
    "subrev_f32": Operation("v_subrev_f32_e32", "d01", "sub_f32"),
}
# Operands that a half has as an instruction of its own and not in a pair: the mask, and the accumulator of VOP3P.
_IMPLICIT = {"cndmask_b32": "vcc_lo", "dot2acc_f32_bf16": "{0}"}

# The halves that instructions of their own could be.
_SINGLES = {row.single: name for name, row in OPERATIONS.items() if name not in _IMPLICIT}
# 32-bit inline constants of the instruction set.
_INLINE = re.compile(r"-?(0\.5|[124]\.0|0\.15915494|[0-9]|[1-5][0-9]|6[0-4])")


@dataclass(frozen=True)
class Half:
    """One operation of a pair: `mul_f32` with the operands v0, v1, v2."""

    name: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"v_dual_{self.name} {', '.join(self.operands)}"

    @property
    def destination(self) -> str:
        return self.operands[0]

    def reads(self) -> dict[int, int]:
        """The number of the VGPR in each source slot that has one."""
        kinds = OPERATIONS[self.name].operands.replace("a", "2")
        slots = {int(kind): operand for kind, operand in zip(kinds, self.operands, strict=True) if kind.isdigit()}
        return {slot: int(operand[1:]) for slot, operand in slots.items() if _is_vgpr(operand)}

    def registers(self) -> set[str]:
        """The VGPRs that the half reads."""
        return {f"v{number}" for number in self.reads().values()}

    def single(self) -> str:
        """The half as an instruction of its own."""
        more = [_IMPLICIT[self.name].format(*self.operands)] if self.name in _IMPLICIT else []
        return f"{OPERATIONS[self.name].single} {', '.join([*self.operands, *more])}"

    def spellings(self, *, is_y: bool) -> Iterator[Half]:
        """Halves with the same result, for the place X or Y. The half itself comes first, if the place takes it."""
        operation = OPERATIONS[self.name]
        if operation.only_y and not is_y:
            return
        yield self
        if operation.commuted and _is_vgpr(self.operands[1]):
            destination, first, second, *literal = self.operands
            yield Half(operation.commuted, (destination, second, first, *literal))
        if self.name == "mov_b32" and is_y:
            yield Half("lshlrev_b32", (self.destination, "0", self.operands[1]))  # reads in slot 1


def parse(line: str) -> tuple[Half, Half] | None:
    """The halves of a dual instruction, None for another line. Raises ValueError for one that GFX11 lacks."""
    if "::" not in line or "::" not in (code := line.partition(";")[0]):
        return None
    x, y = (_half(part) for part in code.split("::"))
    return x, y


def parse_single(line: str) -> Half | None:
    """An instruction as the half of a pair that it could be, None where it could be none."""
    mnemonic, _, rest = line.partition(";")[0].strip().partition(" ")
    if mnemonic not in _SINGLES:
        return None
    return Half(_SINGLES[mnemonic], tuple(operand.strip() for operand in rest.split(",")))


def conflict(x: Half, y: Half) -> str | None:
    """The first source slot in which a pair breaks the rule, None where it obeys."""
    first, second = x.reads(), y.reads()
    return next((SLOTS[slot] for slot in first if slot in second and (first[slot] - second[slot]) % 2 == 0), None)


def conflicts(assembly: str) -> list[str]:
    """The dual instructions of a text that break the rule."""
    pairs = ((line, parse(line)) for line in assembly.splitlines())
    return [line.strip() for line, pair in pairs if pair is not None and conflict(*pair)]


def together(x: Half, y: Half) -> str | None:
    """Two independent halves as one instruction that obeys the rule; None where no spelling does."""
    if (int(x.destination[1:]) - int(y.destination[1:])) % 2 == 0:
        return None
    for first, second in ((x, y), (y, x)):
        for other in second.spellings(is_y=True):
            for one in first.spellings(is_y=False):
                if not conflict(one, other):
                    return f"{one} :: {other}"
    return None


def split(x: Half, y: Half) -> tuple[str, str]:
    """A pair as two instructions. Both halves read before either writes, so a half that reads what the other one writes
    goes first. Raises ValueError where each half reads what the other one writes."""
    if x.destination not in y.registers():
        return x.single(), y.single()
    if y.destination not in x.registers():
        return y.single(), x.single()
    raise ValueError(f"{x} :: {y}: each half reads what the other one writes")


def _half(text: str) -> Half:
    mnemonic, _, rest = text.strip().partition(" ")
    half = Half(mnemonic.removeprefix("v_dual_"), tuple(operand.strip() for operand in rest.split(",")))
    operation = OPERATIONS.get(half.name)
    if operation is None or len(operation.operands) != len(half.operands):
        raise ValueError(f"{text.strip()}: no half of a dual instruction of GFX11")
    return half


def is_plain(operand: str) -> bool:
    """Whether an operand is a VGPR or an inline constant."""
    return _is_vgpr(operand) or _INLINE.fullmatch(operand) is not None


def _is_vgpr(operand: str) -> bool:
    return re.fullmatch(r"v\d+", operand) is not None
