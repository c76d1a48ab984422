"""The state of a wave, and how instructions read and write it.

Operands are resolved once, when a program is decoded, to functions of the wave. Vector values are numpy arrays with an
element for each lane, or with one element if all lanes have the same value. Scalars are Python integers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from amdgpu_simulator.isa.assembly import Array as Array
from amdgpu_simulator.isa.global_memory import Memory
from amdgpu_simulator.isa.lds import Shared
from amdgpu_simulator.isa.queues import Queues

Read = Callable[["Wave"], Array]
Write = Callable[["Wave", Array], None]

WORD = 0xFFFFFFFF
VCC, TTMP, M0, NULL, EXEC = 106, 108, 124, 125, 126
_NAMES = {"vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "m0": M0, "null": NULL, "off": NULL, "exec": EXEC}
_NAMES |= {"exec_lo": EXEC, "exec_hi": EXEC + 1} | {f"ttmp{index}": TTMP + index for index in range(16)}
_REGISTER = re.compile(r"([vas])(?:(\d+)|\[(\d+)(?::(\d+))?\])(?:\.([lh]))?$")
_ACCUMULATORS = 256
_DTYPES = {
    "u": np.uint32,
    "i": np.int32,
    "f": np.float32,
    "U": np.uint64,
    "I": np.int64,
    "h": np.float16,
    "w": np.uint16,
    "s": np.int16,
    "F": np.float64,
}
# Inline constants: these integers and numbers need no literal.
_INLINE_INTEGERS = range(-16, 65)
_INLINE_FLOATS = {"0.5", "1.0", "2.0", "4.0", "0.15915494", "0.15915494309189532", "0.15915494309189535", "0.1592"}


class Wave:
    """The registers of one wave.

    v, f and i are the vector registers as uint32, float32 and int32, (512, lanes), with the accumulators from 256 on.
    s: the scalar registers. lanes: which lanes are active. full: whether all lanes are active. index: the number of the
    wave in its work group. queues: what the wave waits for. mode: the MODE register, a `mode.Mode`, whose module
    imports this one.
    """

    def __init__(self, lanes: int, memory: Memory, shared: Shared, index: int, queues: Queues, mode: Any) -> None:
        self.count = lanes
        self.v = np.full((512, lanes), 0x7FC0DEAD, np.uint32)
        self.f = self.v.view(np.float32)
        self.i = self.v.view(np.int32)
        self.s = [0xDEADBEEF] * 128
        self.s[NULL] = 0
        self.scc = 0
        self.pc = 0
        self.memory = memory
        self.shared = shared
        self.index = index
        self.private: Array = np.zeros((lanes, 0), np.uint8)
        self.queues = queues
        self.mode = mode
        # For `arrivals`: the number of loads so far, and the newest outstanding load of each register and of its upper
        # half.
        self.loads = 0
        self.newest_load: Array = np.zeros((2, 512, lanes), np.int32)
        self.set_exec((1 << lanes) - 1)

    def set_exec(self, value: int) -> None:
        self.s[EXEC], self.s[EXEC + 1] = value & WORD, value >> 32
        self.lanes = bits(value, self.count)
        self.full = not ~value & (1 << self.count) - 1

    def active(self) -> Array:
        """The numbers of the active lanes."""
        return _places(self.exec(), self.count)

    def exec(self) -> int:
        return self.s[EXEC] | self.s[EXEC + 1] << 32 if self.count == 64 else self.s[EXEC]

    def set_scalar(self, index: int, value: int, words: int = 1) -> None:
        for word in range(words):
            self.s[index + word] = value >> 32 * word & WORD
        if index + words > EXEC:
            self.set_exec(self.exec())
        self.s[NULL] = 0

    def scalar(self, index: int, words: int = 1) -> int:
        if words == 1:
            return self.s[index]
        if words == 2 and index != NULL:
            return self.s[index] | self.s[index + 1] << 32
        return sum(self.s[index + word] << 32 * word for word in range(words)) if index != NULL else 0


@lru_cache(4096)
def bits(value: int, lanes: int) -> Array:
    """A lane mask as booleans."""
    booleans = np.unpackbits(np.array([value], np.uint64).view(np.uint8), bitorder="little")[:lanes].astype(bool)
    booleans.flags.writeable = False
    return booleans


@lru_cache(4096)
def _places(value: int, lanes: int) -> Array:
    indices = np.flatnonzero(bits(value, lanes))
    indices.flags.writeable = False
    return indices


def mask(lanes: Array) -> int:
    """Booleans as a lane mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


@lru_cache(1 << 13)
def register(text: str) -> tuple[str, int, int] | None:
    """Parses a register: ("v", first, count), with "a" for accumulators and "s" for scalar registers. None for other
    text.
    """
    if text in _NAMES:
        return "s", _NAMES[text], 2 if text in ("vcc", "exec") else 1
    if (match := _REGISTER.match(text)) is None:
        return None
    first = int(match[2] or match[3])
    return match[1], first, int(match[4] or first) - first + 1


def place(text: str) -> int:
    """The row of a vector register in `Wave.v`. Raises NotImplementedError for other text."""
    span = register(text)
    if span is None or span[0] == "s":
        raise NotImplementedError(f"{text} is no vector register")
    return span[1] + (_ACCUMULATORS if span[0] == "a" else 0)


def scalar_place(text: str) -> int:
    """The number of a scalar register. Raises NotImplementedError for other text."""
    span = register(text)
    if span is None or span[0] != "s":
        raise NotImplementedError(f"{text} is no scalar register")
    return span[1]


def number(text: str, kind: str = "u") -> int:
    """The bits of a constant operand, for an instruction on values of `kind`.

    A 64-bit operand takes a 32-bit literal: fp64 as the upper half, signed integers sign-extended. Raises
    NotImplementedError if LLVM's text is ambiguous.
    """
    try:
        value = int(text, 0)
    except ValueError:
        if kind in "ws" or text.lstrip("-") not in _INLINE_FLOATS:
            raise NotImplementedError(f"the constant {text} is not implemented for operands of kind {kind}") from None
        form = {"h": "<e", "F": "<d", "U": "<d", "I": "<d"}.get(kind, "<f")
        return int.from_bytes(struct.pack(form, float(text)), "little")
    if kind not in "UIF":
        return value & WORD
    if value not in _INLINE_INTEGERS:
        if not 0 <= value <= WORD:
            raise NotImplementedError(f"the literal {text} is not implemented for 64-bit operands")
        if kind == "F":
            value <<= 32
        elif kind == "I" and value >> 31:
            value -= 1 << 32
    return value & 0xFFFFFFFFFFFFFFFF


def scalar(text: str, words: int = 1) -> Callable[[Wave], int]:
    """Reads a scalar register or constant of 32 or 64 bits."""
    if text == "scc":
        return lambda wave: wave.scc
    if span := register(text):
        index = span[1]
        if span[0] != "s":
            raise NotImplementedError(f"{text} is no scalar")
        if words == 1:
            return lambda wave: wave.s[index]
        return lambda wave: wave.scalar(index, words)
    value = number(text, "U" if words == 2 else "u")
    return lambda _wave: value


def source(text: str, kind: str, half: int = 0) -> Read:
    """Reads an operand of a vector instruction as a `kind`: u, i, f (32 bits), U, I, F (64 bits), h (fp16), w, s
    (unsigned and signed, 16 bits).

    `half` is 1 for the upper half of a register. Signs and absolute values apply to floating-point kinds.
    """
    signed = kind in "fhF" and not re.fullmatch(r"-[\d.ex]+", text)
    read = _plain(text.lstrip("-").strip("|") if signed else text, kind, half)
    return signs(read, text) if signed else read


def signs(read: Read, text: str) -> Read:
    """Applies the sign modifiers in the operand's text: -v0, |v0|, -|v0|."""
    absolute, negative = "|" in text, text.startswith("-")
    if absolute and negative:
        return lambda wave: -np.abs(read(wave))
    if absolute:
        return lambda wave: np.abs(read(wave))
    return (lambda wave: -read(wave)) if negative else read


def _plain(text: str, kind: str, half: int) -> Read:
    span = register(text)
    if (half and kind not in "hws") or (text.endswith((".l", ".h")) and (half or kind not in "hws")):
        raise NotImplementedError(f"{text}: a half of a register cannot be an operand of kind {kind}")
    if span and span[0] in "va":
        index = place(text)
        if text.endswith(".h"):
            half = 1
        if kind == "u":
            return lambda wave: wave.v[index]
        if kind == "f":
            return lambda wave: wave.f[index]
        if kind == "i":
            return lambda wave: wave.i[index]
        dtype = _DTYPES[kind]
        if kind in "hws":
            return lambda wave: (wave.v[index] >> np.uint32(16 * half)).astype(np.uint16).view(dtype)
        return lambda wave: (wave.v[index] | wave.v[index + 1].astype(np.uint64) << np.uint64(32)).view(dtype)
    wide = kind in "UIF"
    take = scalar(text, 2 if wide else 1) if span else None
    if take is None:
        constant = _value(number(text, kind), kind, half)
        return lambda _wave: constant
    return lambda wave: _value(take(wave), kind, half)


def _value(content: int, kind: str, half: int = 0) -> Array:
    """Bits as an array of one element."""
    if kind in "UIF":
        return np.array([content], np.uint64).view(_DTYPES[kind])
    if kind in "hws":
        return np.array([content >> 16 * half & 0xFFFF], np.uint16).view(_DTYPES[kind])
    return np.array([content & WORD], np.uint32).view(_DTYPES[kind])


def target(text: str, kind: str, keep: bool = False) -> Write:
    """A function that writes the active lanes of a vector register. keep: a 16-bit result keeps the other half."""
    index = place(text)
    high = text.endswith(".h")
    if text.endswith((".l", ".h")) and kind not in "hws":
        raise NotImplementedError(f"{text}: a half of a register cannot be a result of kind {kind}")

    def write(wave: Wave, value: Array) -> None:
        if kind in "UIF":
            whole = np.broadcast_to(value, wave.count).astype(_DTYPES[kind]).view(np.uint64)
            put(wave, index, (whole & np.uint64(WORD)).astype(np.uint32))
            put(wave, index + 1, (whole >> np.uint64(32)).astype(np.uint32))
            return
        if kind in "hws":
            content = np.ascontiguousarray(value.astype(_DTYPES[kind])).view(np.uint16).astype(np.uint32)
            if keep or high:
                other = wave.v[index] & np.uint32(0xFFFF if high else 0xFFFF0000)
                content = other | (content << np.uint32(16) if high else content)
            value = content
        rows = wave.f if kind == "f" else wave.i if kind == "i" else wave.v
        if wave.full:
            rows[index] = value
        else:
            np.copyto(rows[index], value, where=wave.lanes, casting="unsafe")

    return write


def put(wave: Wave, index: int, value: Array) -> None:
    """Writes the active lanes of row `index` of the vector registers, as uint32."""
    if wave.full:
        wave.v[index] = value
    else:
        np.copyto(wave.v[index], value, where=wave.lanes)
