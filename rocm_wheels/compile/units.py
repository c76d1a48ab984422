"""The units to compile for the store of a backend."""

from __future__ import annotations

from collections.abc import Sequence

from rocm_wheels.compile.asm.units import AssemblyKernels
from rocm_wheels.compile.ck.units import ComposableKernel
from rocm_wheels.compile.compiler import Compiler, Unit
from rocm_wheels.compile.triton.units import Triton
from rocm_wheels.errors import CompileFailed

TRITON = Triton()
COMPILERS: dict[str, Compiler] = {
    compiler.name: compiler for compiler in (ComposableKernel(), TRITON, AssemblyKernels())
}

# Backend -> its compilers. The store has the first compiler's name. Triton compiles calls that no other one supports.
_BACKENDS = {"ck": ("ck", "triton", "asm"), "triton": ("triton",)}


def compiler(backend: str = "triton", toolchain: str = "pypi") -> tuple[str, str]:
    """Name and version of the compiler that names the store of a backend. Raises MissingTool."""
    name, _, version = COMPILERS[_BACKENDS[backend][0]].version(toolchain).partition(" ")
    return name, version


def find(
    targets: Sequence[str],
    *,
    shard: tuple[int, int] = (1, 1),
    only: str | None = None,
    backend: str = "triton",
    toolchain: str = "pypi",
    tiles: bool = False,
    without: Sequence[str] = (),
) -> list[Unit]:
    """The units to compile, in a fixed order. The shards 1/n to n/n are disjoint and complete.

    tiles: include every launch configuration that benchmarks/tune.py compares on a GPU, instead of the one in the
    tuning table. Only Triton's kernels have several. without: names of compilers to leave out.
    """
    if tiles and backend != "triton":
        raise CompileFailed(f"the tiles of {backend} cannot be searched", remedy="--tiles is for --backend triton")
    if tiles:
        units = [unit for target in targets for unit in TRITON.tiles(target, only=only)]
    else:
        units = [
            unit
            for name in _BACKENDS[backend]
            if name not in without
            for target in targets
            for unit in COMPILERS[name].units(target, only=only, toolchain=toolchain)
        ]
    index, count = shard
    return units[index - 1 :: count]
