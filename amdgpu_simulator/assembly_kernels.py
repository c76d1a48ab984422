"""Runs AMD's assembly kernels on the simulator: launches that flash_attn.attention.backends.asm plans, on the
memory of CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from amdgpu_simulator import through_hip
from amdgpu_simulator.hip import packets
from amdgpu_simulator.isa import disassembly, machine
from rocm_wheels.compile.asm import package
from rocm_wheels.compile.asm.units import AssemblyKernels
from rocm_wheels.paths import ROOT

CACHE = ROOT / "build" / "test-cache"


def relies_on_step(target: str, name: str) -> bool:
    """Whether a kernel orders accesses of shared memory without a barrier, only by the time that loads from global
    memory take on a GPU.

    Such a kernel runs with its waves in lockstep. For all others the race check is on.
    """
    if target == "gfx950" and ("-d128-causal" in name or "-v128-" in name):
        return True
    return name.startswith("asm-bwd-") and "-d64-" in name and name.endswith("-varlen")


def image(target: str, name: str) -> bytes:
    """The code object of a kernel. Raises MissingTool if pip cannot fetch the package."""
    (place,) = (code.place for code in package.load().objects if (code.target, code.kernel) == (target, name))
    return (package.directory(CACHE) / place).read_bytes()


@cache
def program(target: str, name: str) -> machine.Program:
    """The kernel as a program. Raises the errors of `image`, and debian.UnavailableError."""
    return machine.Program(disassembly.kernel(image(target, name), target=target))


@cache
def _entry(target: str, name: str) -> dict[str, object]:
    compiler = AssemblyKernels()
    (unit,) = compiler.units(target, only=name)
    return compiler.compile(unit, CACHE).entries[name]


@cache
def _through_hip(target: str, name: str) -> through_hip.Kernel:
    return through_hip.Kernel(name, image(target, name), _entry(target, name), program(target, name))


def run(target: str, name: str, grid: tuple[int, int, int], argument: bytes, ranges: Sequence[tuple[int, int]]) -> None:
    """Runs one launch. ranges: (address, bytes) of the memory that the kernel may access.

    In a process of `hip.process`, the launch goes through AMD's runtime first.
    """
    in_step = relies_on_step(target, name)
    if packets.running():
        _through_hip(target, name).launch(grid, (argument,), ranges, in_step=in_step)
        return
    threads = _entry(target, name)["threads"]
    assert isinstance(threads, int)
    machine.launch(program(target, name), grid, threads, argument, ranges, in_step=in_step)
