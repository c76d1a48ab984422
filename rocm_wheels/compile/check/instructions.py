"""The instructions of a kernel's assembly text: the registers that each reads and writes, and its possible successors.

A set of registers is a Python integer with a bit for each register, so that an overlap is `a & b`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from rocm_wheels.compile.assembly_text import code_of, kernel_texts

VGPRS = (1 << 1024) - 1  # v0 to v255, then a0 to a255; on gfx1250, which has no AGPRs, v0 to v1023
FIRST_AGPR = 256  # the bit of a0
AGPRS = (1 << 512) - (1 << FIRST_AGPR)
SCALARS = 1024  # the bit of s0
SGPRS = (1 << 108) - 1 << SCALARS  # s0 to s105, VCC
VCC = 0b11 << SCALARS + 106
M0 = 1 << SCALARS + 124
EXEC = 0b11 << SCALARS + 126

# Name -> (number of the first scalar register, number of registers).
_NAMED = {
    "vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "m0": (124, 1),
    "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1),
}  # fmt: skip
_REGISTER = re.compile(r"\b(?:([vas])(\d+)\b|([vas])\[(\d+):(\d+)\]|(vcc|exec)(_lo|_hi)?\b|(m0)\b)")
_FIRST = {"v": 0, "a": FIRST_AGPR, "s": SCALARS}
# gfx1250 has v256 to v1023. LLVM writes the lower eight bits, and the register in a comment: `v1 /*v257*/`.
_HIGH = re.compile(r"v(?:\d+|\[\d+:\d+\])\s*/\*(?P<register>[^*]+)\*/")

# The metadata of a kernel: its keys are sorted.
_THREADS = re.compile(r"\.max_flat_workgroup_size:\s+(\d+)\n(?:(?!  - \.).*\n)*?\s+\.symbol:\s+'?([^\s']+)\.kd")

# Instructions without a destination, by the beginning of the mnemonic.
_NO_DESTINATION = re.compile(
    r"ds_(write|store|nop|gws|barrier)|(global|flat|scratch|buffer|tbuffer)_store|buffer_(wb|inv|gl)|global_(wb|inv|load_lds)"
    r"|s_(cmp|bitcmp|cbranch|branch|wait|nop|barrier|endpgm|setprio|sleep|sendmsg|delay|clause|setreg|inst|set_|icache|dcache"
    r"|trap|round|denorm|code_end|setpc|ttrace)|v_nop"
)
_ATOMIC = re.compile(
    r"(global|flat|buffer|scratch)_atomic|ds_(add|sub|rsub|inc|dec|min|max|and|or|xor|cmpst|cmpstore|pk_add)"
)
_TWO_DESTINATIONS = re.compile(
    r"v_((add|sub|subrev|addc|subb|subbrev)_co|div_scale|mad_[iu]64|swap|permlane(16|32)_swap)"
)
_READS_DESTINATION = re.compile(
    r"v_(dual_)?(fmac|mac|pk_fmac|dot\w*[0-9]c_|dot2acc|smfmac|swmmac|swap|permlane\d+_swap|writelane)"
    # These instructions write a part of a register.
    r"|v_(fma|mad)_mix(lo|hi)|v_cvt_(scalef32_)?(sr_)?(pk_)?(fp8|bf8|fp4)_|\w+_(load|read)\w*_d16"
)
_OP_SEL = re.compile(r"\bop_sel:\[([01,]+)\]")
_SUFFIX = re.compile(r"_e(32|64)(?=_dpp|$)")

VALU, TRANSCENDENTAL, MFMA, WMMA, SALU, SMEM, VMEM, LDS = (1 << bit for bit in range(8))
_KINDS = (
    (re.compile(r"v_s?mfmac?_"), VALU | MFMA),
    (re.compile(r"v_s?wmmac?_"), VALU | WMMA),
    (re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos|rcp_iflag)_"), VALU | TRANSCENDENTAL),
    (re.compile(r"v_"), VALU),
    (re.compile(r"s_(load|buffer_load|store|scratch|atomic|dcache|prefetch)"), SMEM),
    (re.compile(r"s_"), SALU),
    (re.compile(r"(buffer|tbuffer|global|flat|scratch|image)_"), VMEM),
    (re.compile(r"ds_"), LDS),
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, or the two operations of a dual instruction.

    kinds: bits of the constants above. sources: the registers of each operand that is read. states: the wait states
    that pass while it is issued.
    """

    text: str
    mnemonic: str
    kinds: int
    writes: int
    reads: int
    sources: tuple[int, ...]
    states: int

    @property
    def is_dpp(self) -> bool:
        return "_dpp" in self.mnemonic or "quad_perm:" in self.text or " row_" in self.text or "dpp8:" in self.text


@dataclass(frozen=True)
class Kernel:
    """The instructions of a kernel. lines: the line of each instruction in the text. followers: the indices of its
    possible successors. threads: the most threads of a work group, None if the text does not say it.
    """

    symbol: str
    instructions: tuple[Instruction, ...]
    lines: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]
    descriptor: dict[str, int]
    threads: int | None = None


def kernels(assembly: str) -> Iterator[Kernel]:
    """The kernels of an assembly text as LLVM prints it. Raises ValueError for a branch to an unknown label."""
    threads = {symbol: int(number) for number, symbol in _THREADS.findall(assembly)}
    for symbol, lines, descriptor in kernel_texts(assembly):
        yield replace(kernel(symbol, lines, descriptor), threads=threads.get(symbol))


def kernel(symbol: str, lines: list[tuple[int, str]], descriptor: dict[str, int]) -> Kernel:
    """A kernel from its numbered lines: instructions, and labels that end with a colon."""
    instructions: list[Instruction] = []
    numbers: list[int] = []
    labels: dict[str, int] = {}
    for number, line in lines:
        code = code_of(line)
        if code.endswith(":"):
            labels[code[:-1]] = len(instructions)
        elif code and code[0] != ".":
            instructions.append(instruction(code))
            numbers.append(number)
    followers = []
    for index, op in enumerate(instructions):
        after = [index + 1] if index + 1 < len(instructions) else []
        if op.mnemonic.startswith(("s_endpgm", "s_setpc")):
            after = []
        elif op.mnemonic == "s_branch" or op.mnemonic.startswith("s_cbranch"):
            goal = op.text.split()[-1]
            if goal not in labels:
                raise ValueError(f"{op.text}: the label is not in the kernel")
            after = [labels[goal]] if op.mnemonic == "s_branch" else [*after, labels[goal]]
        followers.append(tuple(at for at in after if at < len(instructions)))
    return Kernel(symbol, tuple(instructions), tuple(numbers), tuple(followers), descriptor)


@lru_cache(1 << 16)
def instruction(code: str) -> Instruction:
    """The instruction of a line without comment."""
    if "::" in code:
        x, y = (instruction(half.strip()) for half in code.split("::"))
        return Instruction(code, x.mnemonic, VALU, x.writes | y.writes, x.reads | y.reads, x.sources + y.sources, 1)
    mnemonic, _, rest = code.replace("\t", " ").partition(" ")
    name = _SUFFIX.sub("", mnemonic)
    operands = [registers(operand) for operand in re.split(r",(?![^\[]*\])", rest)] if rest else []
    destinations = _destinations(name, code)
    kinds = next((kinds for pattern, kinds in _KINDS if pattern.match(name)), 0)
    writes = _union(operands[:destinations])
    reads = _union(operands[destinations:])
    if _READS_DESTINATION.match(name) or "UNUSED_PRESERVE" in code or writes_half(code, len(operands) - destinations):
        reads |= writes
    if name.startswith("v_cmpx"):
        writes |= EXEC
    if "saveexec" in name or "wrexec" in name:
        writes, reads = writes | EXEC, reads | EXEC
    if name.startswith(("v_div_fmas", "s_cbranch_vcc")) or (name == "v_dual_cndmask_b32"):
        reads |= VCC
    if is_lds_dma(name, code) or name.startswith(("s_movrel", "v_movrel", "ds_gws", "s_ttrace")):
        reads |= M0
    states = int(rest, 0) + 1 if name == "s_nop" else 1
    return Instruction(code, name, kinds, writes, reads, tuple(operands[destinations:]), states)


def writes_half(code: str, sources: int) -> bool:
    """Whether `op_sel` puts the result into the upper half, or another byte, of a register: the bits that follow those
    of the sources.
    """
    match = _OP_SEL.search(code)
    return match is not None and "1" in match[1].split(",")[sources:]


def _destinations(name: str, code: str) -> int:
    """The number of leading operands that an instruction writes."""
    if _NO_DESTINATION.match(name) or is_lds_dma(name, code):
        return 0
    if _ATOMIC.match(name):
        return int(re.search(r"_rtn|\b(sc0|glc)\b|TH_ATOMIC_RETURN", code) is not None)
    if name.startswith("v_cmpx") and not re.match(r"\S+\s+(vcc|exec|s\d|s\[)", code):
        return 0
    return 2 if _TWO_DESTINATIONS.match(name) else 1


def is_lds_dma(name: str, code: str) -> bool:
    """Whether a load from global memory writes to LDS instead of registers."""
    return name.startswith("global_load_lds") or (name.startswith("buffer_load") and code.endswith(" lds"))


@lru_cache(1 << 14)
def registers(operand: str) -> int:
    """The registers that an operand names."""
    bits = 0
    for kind, number, ranged, first, last, named, half, m0 in _REGISTER.findall(_HIGH.sub(r"\g<register>", operand)):
        if kind:
            bits |= 1 << _FIRST[kind] + int(number)
        elif ranged:
            bits |= (1 << int(last) + 1) - (1 << int(first)) << _FIRST[ranged]
        else:
            place, words = _NAMED[m0 or named + half]
            bits |= (1 << words) - 1 << SCALARS + place
    return bits


def _union(sets: list[int]) -> int:
    union = 0
    for bits in sets:
        union |= bits
    return union
