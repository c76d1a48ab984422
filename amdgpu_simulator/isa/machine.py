"""Launches a kernel: its grid, work groups, waves and barriers."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

import numpy as np

from amdgpu_simulator.isa import decoding, forms, targets
from amdgpu_simulator.isa.assembly import Array, Kernel
from amdgpu_simulator.isa.events import Event, Observer
from amdgpu_simulator.isa.global_memory import Memory
from amdgpu_simulator.isa.lds import Shared
from amdgpu_simulator.isa.memory import PRIVATE
from amdgpu_simulator.isa.mode import Mode
from amdgpu_simulator.isa.order import Order
from amdgpu_simulator.isa.queues import Queues
from amdgpu_simulator.isa.wave import TTMP, Wave


class Program:
    """A kernel's instructions as functions. observer: receives the events of each launch.

    refused: the instructions without an implementation, with the reason. Executing one raises NotImplementedError.
    """

    def __init__(self, kernel: Kernel, observer: Observer | None = None, *, ignore_hazards: bool = False) -> None:
        """ignore_hazards: run code of other projects that has the hazard of `dual`, whose time is asked for.

        Raises ValueError for an unknown target, and for a kernel whose wave size is not the target's."""
        self.kernel = kernel
        self._target = targets.get(kernel.target)
        described = 32 if kernel.descriptor.get("wavefront_size32", self._target.wave == 32) else 64
        if described != self._target.wave:
            raise ValueError(
                f"{kernel.symbol} has waves of {described} lanes; on {kernel.target} the simulator runs waves of "
                f"{self._target.wave}: compile it for those"
            )
        self.observer = observer
        self.code, self.refused = decoding.decode(kernel, ignore_hazards=ignore_hazards)
        self._executed = forms.note(kernel) if forms.VARIABLE in os.environ else None

    def run(self, wave: Wave) -> str:
        """Executes a wave up to its next barrier or its end. Returns "barrier" or "end"."""
        if self.observer is not None or self._executed is not None:
            while not (status := self.step(wave)):
                pass
            return status
        code = self.code
        try:
            while True:
                execute = code[wave.pc]
                wave.pc += 1
                if status := execute(wave):
                    return status
        except NotImplementedError as error:
            raise self._refusal(wave.pc - 1, error) from None

    def step(self, wave: Wave) -> str | None:
        """Executes one instruction of a wave. Returns "barrier" or "end" if the wave stops there, else None."""
        index = wave.pc
        wave.pc += 1
        if self._executed is not None:
            self._executed[index] = 1
        shared: list[Array] = []
        memory: list[tuple[Array, int]] = []
        if self.observer is not None:
            wave.shared.accesses, wave.memory.accesses = shared, memory
        try:
            status = self.code[index](wave)
        except NotImplementedError as error:
            raise self._refusal(index, error) from None
        if self.observer is None:
            return status
        self.observer.step(Event(wave, index, status, shared, memory))
        return status

    def _refusal(self, index: int, error: NotImplementedError) -> NotImplementedError:
        """The error with the text of the refused instruction."""
        return NotImplementedError(f"{' :: '.join(part.text for part in self.kernel.instructions[index])}: {error}")


def launch(
    program: Program,
    grid: tuple[int, int, int],
    threads: int,
    argument: bytes,
    ranges: Iterable[tuple[int, int]],
    *,
    shared: int = 0,
    backwards: bool = False,
    complete: bool = False,
    in_step: bool = False,
) -> None:
    """Runs a kernel to its end.

    argument: the bytes of its explicit arguments (`arguments.pack`). ranges: (address, bytes) of the memory that its
    pointers refer to. shared: bytes of shared memory if the kernel does not state them. backwards: between barriers,
    run the last wave first. complete: the argument already has the bytes that the runtime adds. in_step: the waves of a
    group execute one instruction each in turn, without race checks, for kernels that rely on the time that a load from
    global memory takes.
    """
    kernel = program.kernel
    # Padded to whole cache lines, as the runtime does: scalar loads may read beyond the last argument.
    content = bytearray(-(-max(kernel.descriptor["kernarg_size"], len(argument)) // 64) * 64)
    content[: len(argument)] = argument
    for offset, size, kind in () if complete else kernel.arguments:
        if value := _hidden(kind, grid, threads):
            struct.pack_into({2: "<H", 4: "<I", 8: "<Q"}[size], content, offset, value)
    kernarg = np.frombuffer(bytes(content), np.uint8)
    sizes = (threads * grid[0], grid[1], grid[2])
    packet = np.frombuffer(struct.pack("<6H3I40x", 0, 3, threads, 1, 1, 0, *sizes), np.uint8)
    beside = [kernarg, packet, *kernel.constants.values()]
    there = Memory([*ranges, *((data.ctypes.data, data.nbytes) for data in beside)])
    room = max(shared, kernel.descriptor.get("group_segment_fixed_size", 0))
    if not in_step:
        there.order = Order()
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    local = Shared(room, looks_for_races=not in_step)
                    if there.order is not None:
                        there.order.begin((z * grid[1] + y) * grid[0] + x)
                    if program.observer is not None:
                        program.observer.begin()
                    waves = [
                        _wave(kernel, there, local, first, (x, y, z), kernarg.ctypes.data, packet.ctypes.data)
                        for first in range(0, threads, kernel.wave)
                    ]
                    run = _in_step if in_step else _group
                    run(program, local, waves[::-1] if backwards else waves)


def _group(program: Program, local: Shared, waves: list[Wave]) -> None:
    while waves:
        local.barrier()
        if (order := waves[0].memory.order) is not None:
            order.barrier()
        for wave in waves:
            wave.queues.touch()
        states = [program.run(wave) for wave in waves]
        waves = [wave for wave, state in zip(waves, states, strict=True) if state == decoding.BARRIER]


def _in_step(program: Program, _local: Shared, waves: list[Wave]) -> None:
    running, waiting = waves, list[Wave]()
    while running or waiting:
        if not running:
            running, waiting = waiting, []
        states = [(wave, program.step(wave)) for wave in running]
        running = [wave for wave, state in states if state is None]
        waiting += [wave for wave, state in states if state == decoding.BARRIER]


def _hidden(kind: str, grid: tuple[int, int, int], threads: int) -> int:
    """The value that the runtime writes into a hidden argument."""
    return {
        "hidden_block_count_x": grid[0],
        "hidden_block_count_y": grid[1],
        "hidden_block_count_z": grid[2],
        "hidden_group_size_x": threads,
        "hidden_group_size_y": 1,
        "hidden_group_size_z": 1,
        "hidden_grid_dims": 3,
    }.get(kind, 0)


def _wave(
    kernel: Kernel, there: Memory, local: Shared, first: int, group: tuple[int, int, int], kernarg: int, packet: int = 0
) -> Wave:
    """A wave as the hardware starts it: LLVM's guide, "Initial Kernel Execution State"."""
    generation = targets.get(kernel.target).generation
    queues = Queues(generation.max_shared, counts_stores=generation.counts_stores)
    wave = Wave(kernel.wave, there, local, first // kernel.wave, queues, Mode(kernel.descriptor))
    described = kernel.descriptor
    place = 0
    for name, words in (
        ("private_segment_buffer", 4),
        ("dispatch_ptr", 2),
        ("queue_ptr", 2),
        ("kernarg_segment_ptr", 2),
    ):
        if described.get(f"user_sgpr_{name}"):
            if name == "kernarg_segment_ptr":
                wave.set_scalar(place, kernarg, 2)
            if name == "dispatch_ptr":
                wave.set_scalar(place, packet, 2)
            if name == "private_segment_buffer":
                wave.set_scalar(place, PRIVATE << 48, 4)
            place += words
    place = described["user_sgpr_count"]
    if preloaded := described.get("user_sgpr_kernarg_preload_length", 0):
        words = there.load(np.uint64(kernarg) + 4 * np.arange(preloaded, dtype=np.uint64), 4).view(np.uint32)
        for index, word in enumerate(words[:, 0]):
            wave.s[place - preloaded + index] = int(word)
        # A kernel with preloaded arguments begins with a trap for firmware that does not preload.
        wave.pc = int(kernel.instructions[0][0].mnemonic == "s_trap")
    for axis, number in zip("xyz", group, strict=True):
        if described.get(f"system_sgpr_workgroup_id_{axis}"):
            if not generation.ids_in_ttmp:
                wave.s[place] = number
            place += 1
    if described.get("system_sgpr_private_segment_wavefront_offset"):
        wave.s[place] = 0
    if generation.ids_in_ttmp:
        wave.s[TTMP + 9] = group[0]
        wave.s[TTMP + 7] = group[1] | group[2] << 16
        wave.s[TTMP + 8] = first // kernel.wave << 25
    wave.v[0] = np.arange(first, first + kernel.wave)
    wave.private = np.full((kernel.wave, described.get("private_segment_fixed_size", 0)), 0xFF, np.uint8)
    return wave
