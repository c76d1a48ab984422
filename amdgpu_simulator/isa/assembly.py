"""Parses the assembly text of a kernel, as LLVM prints it, into a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from amdgpu_simulator.isa import targets
from amdgpu_simulator.isa.reading import Modifiers, Operands
from amdgpu_simulator.isa.text import kernel_texts

# An array of numpy. A narrower type would be lost in every expression.
Array = Any


@dataclass(frozen=True)
class Instruction:
    """`v_add_f32_e64 v0, -v1, s2 clamp` has mnemonic v_add_f32, operands v0, -v1, s2 and the modifier clamp."""

    mnemonic: str
    operands: Operands
    modifiers: Modifiers
    text: str

    def forget(self) -> None:
        """Marks all operands and modifiers as unread: see `reading`."""
        self.operands.forget()
        self.modifiers.forget()

    def unread(self) -> str:
        """The operands and modifiers that no implementation has read since `forget`."""
        if left := self.modifiers.unread():
            return f"modifiers {', '.join(left)}"
        return f"operands {', '.join(left)}" if (left := self.operands.unread()) else ""


@dataclass(frozen=True, eq=False)
class Kernel:
    """The code of a kernel.

    labels: label -> index of the instruction after it. descriptor: the .amdhsa_ directives. arguments: (offset, bytes,
    kind) of each argument. constants: label -> data stored with the code.
    """

    symbol: str
    target: str
    instructions: list[tuple[Instruction, ...]]
    labels: dict[str, int]
    descriptor: dict[str, int]
    arguments: list[tuple[int, int, str]]
    constants: dict[str, Array]

    @property
    def wave(self) -> int:
        """Lanes of a wave. Raises ValueError for a target that the simulator does not know."""
        return targets.get(self.target).wave


_ENCODING = re.compile(r"(_e32|_e64|_sdwa|_dpp|_e64_dpp)$")
_ARGUMENT = re.compile(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)")
_DATA = re.compile(r"^([\w$.]+):.*\n((?:\s+\.(?:long|short|byte)\s+\w+.*\n)+)", re.MULTILINE)
_SIZES = {"long": 4, "short": 2, "byte": 1}
_BLANK = re.compile(r":\s+(?=\d)")  # assemblers accept `offset: 8`
_ADDRESS = re.compile(r"([\w$.]+)@rel32@(lo|hi)\+\d+$")


def parse(text: str) -> Kernel:
    """The kernel in an assembly text, which must be the only one. Raises ValueError if the text has no kernel."""
    texts = list(kernel_texts(text))
    target = re.search(r"\.amdgcn_target\s+\"amdg[\w.]+-amd-amdhsa-[\w-]*-(gfx[\w-]+)", text)
    if len(texts) != 1 or target is None:
        raise ValueError(f"the text holds {len(texts)} AMD kernels, expected one and its target")
    ((symbol, lines, descriptor),) = texts
    constants = {name: _data(directives) for name, directives in _DATA.findall(text)}
    instructions: list[tuple[Instruction, ...]] = []
    labels = {}
    for _, code in lines:
        if code.endswith(":"):
            labels[code[:-1]] = len(instructions)
        else:
            instructions.append(parse_line(code, constants))
    arguments = [(int(offset), int(size), kind) for offset, size, kind in _ARGUMENT.findall(text)]
    return Kernel(symbol, target[1], instructions, labels, descriptor, arguments, constants)


def parse_line(code: str, constants: dict[str, Array] | None = None) -> tuple[Instruction, ...]:
    """The instruction of a line, or the two operations of a dual instruction. constants: as in `Kernel`."""
    return tuple(_instruction(part.strip(), constants or {}) for part in code.split("::"))


def _data(lines: str) -> Array:
    """The bytes of data directives, as an array whose address a kernel can use."""
    directives = re.findall(r"\.(long|short|byte)\s+(\w+)", lines)
    content = b"".join(int(value, 0).to_bytes(_SIZES[size], "little") for size, value in directives)
    return np.frombuffer(content, np.uint8)


def _operand(text: str, constants: dict[str, Array]) -> str:
    """Code computes the address of data in two halves relative to the instruction. Here each half is a half of the
    absolute address.
    """
    if (match := _ADDRESS.match(text)) is None:
        return text
    address = constants[match[1]].ctypes.data
    return str(address >> 32 if match[2] == "hi" else address & 0xFFFFFFFF)


def _instruction(code: str, constants: dict[str, Array]) -> Instruction:
    mnemonic, _, rest = code.partition(" ")
    if "\t" in mnemonic:
        mnemonic, _, rest = code.partition("\t")
    modifiers: dict[str, str] = {}
    operands: list[str] = []
    if not mnemonic.startswith(("s_wait", "s_delay", "s_sendmsg")):
        pieces = _split(_BLANK.sub(":", rest))
        for piece in pieces:
            words = piece.split()
            for word in words[1:]:
                name, _, value = word.partition(":")
                modifiers[name] = value
            if words:
                operands.append(_operand(words[0], constants))
    encoding = _ENCODING.search(mnemonic)
    if encoding and encoding[1] in ("_sdwa", "_dpp", "_e64_dpp"):
        modifiers["dpp" if "dpp" in encoding[1] else "sdwa"] = ""
    return Instruction(_ENCODING.sub("", mnemonic), Operands(operands), Modifiers(modifiers), code)


def _split(rest: str) -> list[str]:
    """Splits the operands at commas outside of brackets; removes blanks in brackets."""
    pieces, depth = [""], 0
    for letter in rest.strip():
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            pieces.append("")
        elif letter != " " or depth == 0:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces]
