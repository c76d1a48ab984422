"""Reads thread traces of GPUs: at which cycle each instruction of a wave was issued.

A trace is a pickle of tinygrad's profiler, in a directory that bears the name of the target. It holds the packets of
the traced SIMD and the code object. The package tinygrad decodes the packets and follows the program counter of a wave.
"""

from __future__ import annotations

import importlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from amdgpu_simulator.clock import registers
from amdgpu_simulator.isa import targets
from amdgpu_simulator.isa.assembly import parse_line

_OPERANDS = re.compile(r"[vs]\[\d+(?::\d+)?\]|VCC_LO|EXEC_LO|[^,() ]+")
# Loads write a register, and the wave waits for it. In `registers` they write none.
_LOADS = re.compile(r"(ds|global|buffer)_load_")


class Issue(NamedTuple):
    """An instruction that a wave issued. reads, writes: rows of registers. taken: whether it is a branch that jumps."""

    time: int
    name: str
    reads: frozenset[int]
    writes: frozenset[int]
    taken: bool = False


class _Unpickler(pickle.Unpickler):
    """Reads plain data. Every class becomes a `_Record`, so that no code of the file runs."""

    def find_class(self, _module: str, name: str) -> Any:
        return type(name, (_Record,), {})


class _Record:
    def __init__(self, *_arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def __call__(self, *_arguments: Any) -> _Record:
        return _Record()


def files(directory: Path) -> list[Path]:
    """The traces below a directory. Raises ValueError if it has none, or one of a target that the simulator does not
    know.
    """
    paths = sorted(directory.rglob("gfx*/*.pkl"))
    if not paths:
        raise ValueError(
            f"{directory} has no thread traces (gfx1100/*.pkl): copy extra/sqtt/examples of tinygrad's repository there"
        )
    for path in paths:
        targets.get(path.parent.name)
    return paths


def waves(path: Path) -> Iterator[list[list[Issue]]]:
    """For each traced launch of a file of RDNA, the waves of the traced SIMD. Launches without a wave there are left
    out.

    Raises ValueError without tinygrad, and for a file that is no trace.
    """
    sqtt, traced, programs = _events(path)
    for event in traced:
        issued: dict[tuple[int, int], list[Issue]] = {}
        starts: dict[int, int] = {}
        for packet, where in sqtt.map_insts(event.blob, programs[event.kern].lib, path.parent.name):
            if "WAVESTART" in type(packet).__name__:
                starts[packet.wave] = starts.get(packet.wave, 0) + 1
            elif where is not None:
                jumps = getattr(getattr(packet, "op", None), "name", "") == "JUMP"
                wave = where.wave, starts.get(where.wave, 0)
                issued.setdefault(wave, []).append(issue(packet._time, str(where.inst), taken=jumps))
        if issued:
            yield list(issued.values())


def operations(path: Path) -> Iterator[list[tuple[int, str]]]:
    """For each wave of a file of CDNA, (time, kind) of the instructions that it issued: "LDS", "VALU_32", "SMEM_RD".

    tinygrad does not follow the program counter of CDNA, so a trace says no more of an instruction. Raises as `waves`.
    """
    sqtt, traced, _ = _events(path)
    for event in traced:
        issued: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for packet in sqtt.decode(event.blob):
            if type(packet).__name__ == "CDNA_INST":
                issued.setdefault((packet.simd, packet.wave), []).append((packet._time, packet.op.name))
        yield from issued.values()


def _events(path: Path) -> tuple[Any, list[Any], dict[Any, Any]]:
    """tinygrad's decoder, the traced launches of a file, and its programs."""
    try:
        sqtt = importlib.import_module("tinygrad.renderer.amd.sqtt")
    except ImportError as error:
        raise ValueError(f"thread traces need the package tinygrad ({error}): pip install 'tinygrad>=0.14'") from None
    try:
        with path.open("rb") as file:
            events = _Unpickler(file).load()
        programs = {event.tag: event for event in events if type(event).__name__ == "ProfileProgramEvent"}
        traced = [event for event in events if type(event).__name__ == "ProfileSQTTEvent" and event.itrace]
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no thread trace of tinygrad: {error}") from None
    return sqtt, traced, programs


def issue(time: int, text: str, *, taken: bool = False) -> Issue:
    """An instruction in tinygrad's spelling, such as v_add_f32_e32(v[1], s[0], v[2])."""
    name, _, rest = text.partition("(")
    operands = [operand.lower() for operand in _OPERANDS.findall(rest)]
    (instruction,) = parse_line(f"{name.lower()} {', '.join(operands)}")
    reads, writes = (frozenset(rows) for rows in registers.all_rows(instruction))
    if _LOADS.match(instruction.mnemonic) and operands:
        writes = frozenset(registers.rows_of(operands[0]))
        reads -= writes
    return Issue(time, instruction.mnemonic, reads, writes, taken)
