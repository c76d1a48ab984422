"""Decodes the instructions of a kernel to functions of a wave."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from amdgpu_simulator.isa import (
    dual,
    fp8,
    integer_matrix,
    lanes,
    matrix,
    memory,
    mode,
    scalar,
    scalar_floats,
    shared,
    targets,
    vector,
    waits,
)
from amdgpu_simulator.isa.allocation import Allocation
from amdgpu_simulator.isa.assembly import Instruction, Kernel
from amdgpu_simulator.isa.mode import Mode
from amdgpu_simulator.isa.reading import Modifiers, Operands
from amdgpu_simulator.isa.scalar import Execute
from amdgpu_simulator.isa.wave import VCC, Wave, register

# Executes one instruction. Returns "end" or "barrier" if the wave stops there, else None.
Step = Callable[[Wave], str | None]

END, BARRIER = "end", "barrier"
_NOTHING = re.compile(
    r"v_nop$|s_(nop|waitcnt_depctr|delay_alu|clause|sleep|setprio|sendmsg|inst_prefetch|set_inst_prefetch_distance)$"
    r"|buffer_(gl[01]_inv|wbl2|inv\w*)$|global_(inv|wb\w*)$|s_barrier_signal$"
)


class Code(NamedTuple):
    """steps: a function for each of `Kernel.instructions`. refused: the instructions without an implementation, with
    the reason.
    """

    steps: list[Step]
    refused: list[str]


@lru_cache(32)
def decode(kernel: Kernel, *, ignore_hazards: bool = False) -> Code:
    """The code of a kernel, decoded once. ignore_hazards: accept dual instructions with the hazard of `dual`."""
    decoder = _Decoder(kernel, ignore_hazards=ignore_hazards)
    return Code([decoder.together(parts) for parts in kernel.instructions], decoder.refused)


class _Decoder:
    """Decodes the instructions of one kernel."""

    def __init__(self, kernel: Kernel, *, ignore_hazards: bool) -> None:
        self._kernel = kernel
        self._refuses_hazard = targets.get(kernel.target).vopd_hazard and not ignore_hazards
        self.refused: list[str] = []
        self._allocation = Allocation(kernel)
        target, at_start = targets.get(kernel.target), Mode(kernel.descriptor)
        of_target = (matrix.decode, integer_matrix.decode, fp8.decode, memory.decode, shared.decode)
        self._vector_decoders: tuple[Callable[[Instruction], Execute | None], ...] = (
            *(partial(_with_target, decode, target) for decode in of_target),
            partial(lanes.decode, target=target, mode=at_start),
            partial(vector.decode, gpu=target, mode=at_start),
        )

    def together(self, parts: tuple[Instruction, ...]) -> Step:
        """The function for an instruction, or for the two operations of a dual instruction."""
        functions = [self._decode(part) for part in parts]
        if len(functions) == 1:
            return functions[0]
        first, second = functions
        if self._refuses_hazard:
            try:
                slot = dual.conflict(parts)
            except NotImplementedError as error:
                self.refused.append(str(error))
                return _unknown(str(error))
            if slot:
                self.refused += [f"{part.text}: {slot} of a pair" for part in parts]
                return _unknown(f"{slot}: {dual.RULE}")
        span = register(parts[0].operands[0])
        index = span[1] if span else 0

        def both(wave: Wave) -> None:
            """The second operation reads registers as they were before the first one wrote."""
            old = wave.v[index].copy()
            first(wave)
            new = wave.v[index].copy()
            wave.v[index] = old
            second(wave)
            wave.v[index] = new

        return both

    def _decode(self, instruction: Instruction) -> Step:
        name = instruction.mnemonic
        if name == "s_endpgm":
            return lambda _wave: END
        if name in ("s_barrier", "s_barrier_wait"):
            return lambda _wave: BARRIER
        if _NOTHING.match(name):
            return lambda _wave: None
        if name == "s_getpc_b64":  # Data has absolute addresses: see `assembly`.
            instruction = Instruction(
                "s_mov_b64", Operands((instruction.operands[0], "0")), Modifiers({}), instruction.text
            )
        if name == "s_branch" or name.startswith("s_cbranch_"):
            return self._branch(instruction)
        try:
            self._allocation.check(instruction)
            step = self._find(instruction)
        except (NotImplementedError, KeyError, ValueError) as error:
            problem = str(error)
            step = None
        else:
            problem = "not known"
        if step is None:
            self.refused.append(f"{instruction.text}: {problem}")
        return step or _unknown(problem)

    def _find(self, instruction: Instruction) -> Execute | None:
        """The function for an instruction. Raises NotImplementedError if the implementation has not read a modifier or
        operand.
        """
        for decode in self._decoders(instruction.mnemonic):
            instruction.forget()
            if (execute := decode(instruction)) is not None:
                if left := instruction.unread():
                    raise NotImplementedError(left)
                return execute
        return None

    def _decoders(self, mnemonic: str) -> tuple[Callable[[Instruction], Execute | None], ...]:
        if mnemonic.startswith("s_wait"):
            return (waits.decode,)
        if mnemonic.startswith("s_") and not mnemonic.startswith(("s_load", "s_buffer_load")):
            return scalar.decode, scalar_floats.decode, mode.decode
        return self._vector_decoders

    def _branch(self, instruction: Instruction) -> Step:
        goal = self._kernel.labels.get(label := instruction.operands[-1])
        if goal is None:
            raise ValueError(
                f"{instruction.text}: the text has no label {label}: write a local label such as 1f as .L1"
            )
        condition = instruction.mnemonic.removeprefix("s_cbranch_")

        def execute(wave: Wave) -> None:
            vcc = wave.s[VCC] | (wave.s[VCC + 1] if wave.count == 64 else 0)
            taken = {
                "s_branch": True,
                "scc0": not wave.scc,
                "scc1": bool(wave.scc),
                "vccz": not vcc,
                "vccnz": bool(vcc),
                "execz": not wave.exec(),
                "execnz": bool(wave.exec()),
            }[condition]
            if taken:
                wave.pc = goal

        return execute


def _with_target(
    decode: Callable[[Instruction, targets.Target], Execute | None], target: targets.Target, instruction: Instruction
) -> Execute | None:
    return decode(instruction, target)


def _unknown(problem: str) -> Execute:
    def execute(_wave: Wave) -> None:
        raise NotImplementedError(problem)

    return execute
