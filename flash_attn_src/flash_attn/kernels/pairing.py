"""Rewrites an assembly text so that no dual instruction meets GFX11's VOPD hazard (`vopd`).

In this order: the pair stays together in another spelling; or one half is paired with a single instruction near it; or
the pair and another pair near it exchange halves; or the pair becomes two instructions, which alone makes the text
longer.

An instruction only ever moves down, over instructions that neither read nor write its destination and do not write
what it reads. It never moves over a wait, a branch, or a change of EXEC. `s_delay_alu` keeps its operands. It is a hint
that saves cycles: the hardware waits for results of vector instructions by itself (LLVM's AMDGPUInsertDelayAlu is an
optional pass).
"""

from __future__ import annotations

import re

from flash_attn.kernels import vopd
from flash_attn.kernels.vopd import Half

# Lines between which halves look for each other.
_REACH = 40
_PASSABLE = re.compile(r"\s+(v_(?!cmpx|swap|movrel|wmma)|ds_load_|global_load_|buffer_load_|s_delay_alu)")
_REGISTERS = re.compile(r"\bv(\d+)\b|\bv\[(\d+):(\d+)\]")


def repair(assembly: str) -> str:
    """The text with no pair that breaks the rule. Raises ValueError for a pair that cannot be split."""
    lines = assembly.split("\n")
    index = 0
    while index < len(lines):
        pair = vopd.parse(lines[index])
        if pair is None or not vopd.conflict(*pair):
            index += 1
            continue
        joined = vopd.together(*pair)
        if joined is not None:
            lines[index] = f"\t{joined}"
        elif not any(attempt(lines, index, pair) for attempt in (_join_later, _join_earlier, _exchange)):
            lines[index : index + 1] = [f"\t{code}" for code in vopd.split(*pair)]
    return "\n".join(lines)


def _join_later(lines: list[str], index: int, pair: tuple[Half, Half]) -> bool:
    """Moves one half of a pair down into a pair with a single instruction. Returns whether it found one."""
    for stays, moves in (pair, pair[::-1]):
        if stays.destination in moves.registers() or not _is_plain(moves):
            continue
        for place in range(index + 1, min(index + 1 + _REACH, len(lines))):
            single = vopd.parse_single(lines[place])
            if single is not None and _is_plain(single) and moves.destination not in single.registers():
                joined = vopd.together(moves, single)
                if joined is not None:
                    lines[index], lines[place] = f"\t{stays.single()}", f"\t{joined}"
                    return True
            if not _passes(moves, lines[place]):
                break
    return False


def _join_earlier(lines: list[str], index: int, pair: tuple[Half, Half]) -> bool:
    """Moves a single instruction down into a pair with one half. Returns whether it found one."""
    for place in range(index - 1, max(index - 1 - _REACH, -1), -1):
        if not _PASSABLE.match(lines[place]):
            return False
        single = vopd.parse_single(lines[place])
        if single is None or not _is_plain(single):
            continue
        if not all(_passes(single, line) for line in lines[place + 1 : index]):
            continue
        for stays, other in (pair, pair[::-1]):
            if stays.destination in other.registers() or single.destination in stays.registers():
                continue
            joined = vopd.together(single, stays) if _is_plain(stays) else None
            if joined is not None:
                lines[index : index + 1] = [f"\t{joined}", f"\t{other.single()}"]
                del lines[place]
                return True
    return False


def _exchange(lines: list[str], index: int, pair: tuple[Half, Half]) -> bool:
    """Moves the pair down to another one, where the two exchange halves. Returns whether that saves an instruction."""
    if not all(map(_is_plain, pair)):
        return False
    for place in range(index + 1, min(index + 1 + _REACH, len(lines))):
        other = vopd.parse(lines[place])
        if other is not None and _are_independent(*pair, *other):
            most = 3 if vopd.conflict(*other) else 2  # two pairs that both break the rule may leave two singles
            codes = min((_both(pair, other), _both(pair, other[::-1])), key=len)
            if len(codes) <= most:
                lines[place : place + 1] = [f"\t{code}" for code in codes]
                del lines[index]
                return True
        if not all(_passes(half, lines[place]) for half in pair):
            return False
    return False


def _both(first: tuple[Half, Half], second: tuple[Half, Half]) -> list[str]:
    """The X of two pairs in one instruction and the Y of both in another one, as far as the rule allows."""
    codes: list[str] = []
    for one, other in zip(first, second, strict=True):
        joined = vopd.together(one, other)
        codes += [one.single(), other.single()] if joined is None else [joined]
    return codes


def _are_independent(*halves: Half) -> bool:
    """Whether these halves have one result in any order, and fit into one instruction."""
    return all(map(_is_plain, halves)) and all(
        one.destination not in {other.destination} | other.registers()
        for one in halves
        for other in halves
        if one is not other
    )


def _is_plain(half: Half) -> bool:
    """Whether a half reads VGPRs and inline constants alone: any two such halves fit into one instruction."""
    return half.name != "cndmask_b32" and all(vopd.is_plain(operand) for operand in half.operands)


def _passes(half: Half, line: str) -> bool:
    """Whether a half may be executed after an instruction that stands behind it."""
    if not _PASSABLE.match(line):
        return False
    pair = vopd.parse(line)
    written = {one.destination for one in pair} if pair else _registers(line.partition(",")[0])
    return half.destination not in _registers(line) and not written & half.registers()


def _registers(code: str) -> set[str]:
    """The VGPRs that a text names."""
    ranges = ((int(first or one), int(last or one)) for one, first, last in _REGISTERS.findall(code.partition(";")[0]))
    return {f"v{number}" for first, last in ranges for number in range(first, last + 1)}
