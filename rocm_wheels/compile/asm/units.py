"""AMD's assembly kernels as units, one code object each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rocm_wheels.compile import codeobject
from rocm_wheels.compile.asm import package
from rocm_wheels.compile.compiler import Compiled, Compiler, Unit, key, matches, recipe
from rocm_wheels.errors import CompileFailed


class AssemblyKernels(Compiler):
    """AMD's package of assembly kernels. The content of a unit is the path of its code object in the package."""

    name = "asm"

    def version(self, toolchain: str) -> str:  # noqa: ARG002 - no tool is used
        bundle = package.load()
        return f"{bundle.name} {bundle.version}"

    def units(self, target: str, *, only: str | None = None, toolchain: str = "pypi") -> Iterator[Unit]:
        for code in package.load().objects:
            if code.target == target and matches(code.kernel, only):
                yield Unit(
                    target=target,
                    name=code.kernel,
                    compiler=self.name,
                    kernels=(code.kernel,),
                    content=(code.place,),
                    toolchain=toolchain,
                    key=key({"target": target, "object": code.sha256, "recipe": recipe(package, codeobject)}),
                )

    def prepare(self, cache: Path) -> None:
        package.directory(cache)

    def compile(self, unit: Unit, cache: Path) -> Compiled:
        image = package.version_5((package.directory(cache) / unit.content[0]).read_bytes())
        kernel = codeobject.read(image)
        if kernel.target != unit.target or kernel.private:
            raise CompileFailed(
                f"{unit.name} for {unit.target} is for {kernel.target} with {kernel.private} bytes of private memory"
            )
        entry = {
            "symbol": kernel.symbol,
            "threads": kernel.threads,
            "shared": 0,
            "params": f"K{kernel.argument_bytes}",
            "constants": {},
            "options": {},
            "resources": kernel.resources(),
            "isa": {},
        }
        return Compiled(image, {unit.name: entry})
