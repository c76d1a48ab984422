"""Triton's kernels as units, one kernel variant each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rocm_wheels.compile import codeobject, isa, sources
from rocm_wheels.compile.check import stage
from rocm_wheels.compile.compiler import Compiled, Compiler, Unit, key, matches, recipe
from rocm_wheels.compile.triton import barriers, compiler, priorities, retarget
from rocm_wheels.packages import version_of


class Triton(Compiler):
    """Triton. It contains its own LLVM, so its code objects are the same on a machine with and without ROCm.

    The content of a unit is the fields of the variant and of its launch configuration; None selects the tuning table's.
    """

    name = "triton"

    def version(self, toolchain: str = "pypi") -> str:  # noqa: ARG002
        return f"triton {version_of('triton')}"

    def units(self, target: str, *, only: str | None = None, toolchain: str = "pypi") -> Iterator[Unit]:  # noqa: ARG002
        return self._units(target, only, lambda variant: [None])  # noqa: ARG005

    def tiles(self, target: str, *, only: str | None = None) -> Iterator[Unit]:
        """A unit for each launch configuration that a search on a GPU compares: `<variant>@<configuration>`."""
        launches = sources.module("kernels.launches")
        return self._units(target, only, lambda variant: launches.candidates(variant, target))

    def start(self, scratch: str) -> None:
        compiler.prepare(scratch)

    def compile(self, unit: Unit, cache: Path) -> Compiled:  # noqa: ARG002
        image, entry = compiler.compile_variant(unit.target, *unit.content)
        return Compiled(image, {unit.name: entry})

    def _units(self, target: str, only: str | None, configurations: Callable[[Any], list[Any]]) -> Iterator[Unit]:
        variants = sources.module("kernels.variants")
        launches = sources.module("kernels.launches")
        wavefront = sources.module("kernels.targets").get(target).wavefront
        made_by = self.version()
        for variant in variants.table(target):
            if not matches(variant.name, only):
                continue
            for config in configurations(variant):
                specification = launches.specification(variant, target, config)
                name = variant.name if config is None else f"{variant.name}@{_spelled(config)}"
                ingredients = {
                    "variant": list(variant),
                    "target": target,
                    "wavefront": wavefront,
                    "constants": specification.constants,
                    "options": specification.options,
                    "operation": variant.operation.digest(variant.dtype),
                    "compiler": made_by,
                    "sources": sources.digest(*sources.kernel_files(specification.module)),
                    "recipe": recipe(compiler, barriers, priorities, retarget, isa, codeobject, *stage.modules()),
                }
                yield Unit(
                    target=target,
                    name=name,
                    compiler=self.name,
                    kernels=(name,),
                    content=(tuple(variant), None if config is None else tuple(config)),
                    toolchain="pypi",
                    key=key(ingredients),
                )


def _spelled(config: Any) -> str:
    """A launch configuration as part of a name: "128x64-w4-s2-waves_per_eu2"."""
    options = "".join(f"-{name}{value}" for name, value in config.options)
    return f"{config.block_m}x{config.block_n}-w{config.num_warps}-s{config.num_stages}{options}"
