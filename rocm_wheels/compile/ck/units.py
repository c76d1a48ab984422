"""Composable Kernel's kernels as units: one translation unit of several instances each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rocm_wheels.compile import codeobject, isa, sources
from rocm_wheels.compile.check import stage
from rocm_wheels.compile.ck import compiler, instances
from rocm_wheels.compile.ck import sources as headers
from rocm_wheels.compile.ck import toolchain as toolchains
from rocm_wheels.compile.compiler import Compiled, Compiler, Unit, key, recipe
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.targets import has_kernels


class ComposableKernel(Compiler):
    """AMD's Composable Kernel, compiled by clang. The content of a unit is its instances."""

    name = "ck"

    def version(self, toolchain: str) -> str:
        return toolchains.find(toolchain).version

    def units(self, target: str, *, only: str | None = None, toolchain: str = "pypi") -> Iterator[Unit]:
        if not has_kernels(versions.load(), target, self.name):
            return
        made_by = self.version(toolchain)
        row = sources.module("kernels.targets").get(target)
        for name, some in instances.units(only):
            if row.loses_range(some[0].dtype):  # all of a unit have one dtype; Triton's kernels serve it
                continue
            ingredients = {
                "unit": compiler.source(some),
                "target": target,
                "compiler": made_by,
                "headers": headers.load().key,
                "sources": sources.digest(*compiler.SOURCES),
                "recipe": recipe(compiler, toolchains, isa, codeobject, *stage.modules()),
            }
            yield Unit(
                target=target,
                name=name,
                compiler=self.name,
                kernels=tuple(instance.name for instance in some),
                content=some,
                toolchain=toolchain,
                key=key(ingredients),
            )

    def prepare(self, cache: Path) -> None:
        headers.headers(cache)

    def compile(self, unit: Unit, cache: Path) -> Compiled:
        return compiler.compile_unit(unit.target, unit.name, unit.content, cache=cache, toolchain=unit.toolchain)
