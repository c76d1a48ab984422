"""What is to be compiled: units, each with the digest of everything that its code object depends on."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rocm_wheels.compile import codeobject, isa, sources
from rocm_wheels.compile.ck import compiler as ck_compiler
from rocm_wheels.compile.ck import instances as ck_instances
from rocm_wheels.compile.ck import sources as ck_sources
from rocm_wheels.compile.ck import toolchain as ck_toolchain
from rocm_wheels.compile.triton import compiler as triton_compiler
from rocm_wheels.errors import CompileFailed
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.targets import has_kernels, wavefront
from rocm_wheels.packages import version_of


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One run of a compiler for one GPU target: one code object with some kernels, and the digest of everything
    that it depends on.

    `content` is the compiler's: a Triton variant and, where it is not the table's, its launch configuration, each as
    its fields, since a worker process cannot unpickle a class of a package it has not found yet; or instances of
    Composable Kernel.
    """

    target: str
    name: str
    compiler: str
    kernels: tuple[str, ...]
    content: tuple[Any, ...]
    toolchain: str
    key: str

    def path(self, cache: Path) -> Path:
        """Where the cache keeps the code object; the manifest entries of its kernels lie beside it as .json."""
        return cache / "kernels" / self.key[:2] / f"{self.key}.co"


def compiler(backend: str = "triton", toolchain: str = "pypi") -> tuple[str, str]:
    """Name and version of what compiles the kernels of a backend's store. Raises MissingTool."""
    if backend == "ck":
        name, _, rest = ck_toolchain.find(toolchain).version.partition(" ")
        return name, rest
    return "triton", version_of("triton")


@cache
def _recipe(*modules: ModuleType) -> str:
    """Digest of the code that turns a kernel into an object and its manifest entry."""
    files = (Path(str(module.__file__)) for module in modules)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def find(
    targets: Sequence[str],
    *,
    shard: tuple[int, int] = (1, 1),
    only: str | None = None,
    backend: str = "triton",
    toolchain: str = "pypi",
    tiles: bool = False,
) -> list[Unit]:
    """What to compile, in a fixed order. The shards 1/n to n/n have no unit in common and all of them together.

    A store of the ck backend holds the Triton kernels too: what Composable Kernel cannot do goes to them. tiles: of
    Triton's, each configuration that a search on a GPU compares, as `<variant>@<configuration>`.
    """
    if tiles and backend != "triton":
        raise CompileFailed(f"the tiles of {backend} cannot be searched", remedy="--tiles is for --backend triton")
    index, count = shard
    found = [*_ck_units(targets, only, toolchain)] if backend == "ck" else []
    return [*found, *_triton_units(targets, only, tiles)][index - 1 :: count]


def _triton_units(targets: Sequence[str], only: str | None, tiles: bool) -> Iterator[Unit]:
    variants = sources.module("runtime.variants")
    launches = sources.module("kernels.launches")
    data, made_by = versions.load(), compiler()
    for target in targets:
        for variant in variants.table(target):
            if only is not None and not fnmatch.fnmatch(variant.name, only):
                continue
            for config in launches.candidates(variant, target) if tiles else [None]:
                specification = launches.specification(variant, target, config)
                name = variant.name if config is None else f"{variant.name}@{_spelled(config)}"
                ingredients = {
                    "variant": list(variant),
                    "target": target,
                    "wavefront": wavefront(data, target),
                    "constants": specification.constants,
                    "options": specification.options,
                    "arguments": variants.TYPES | dict.fromkeys(variants.FP32_ARGUMENTS.get(variant.op, ()), "*fp32"),
                    "aligned": variants.ALIGNED,
                    "compiler": made_by,
                    "sources": sources.digest(*sources.kernel_files(specification.module)),
                    "recipe": _recipe(triton_compiler, isa, codeobject),
                }
                yield Unit(
                    target=target,
                    name=name,
                    compiler="triton",
                    kernels=(name,),
                    content=(tuple(variant), None if config is None else tuple(config)),
                    toolchain="pypi",
                    key=_key(ingredients),
                )


def _spelled(config: Any) -> str:
    """A launch configuration as part of a name: "128x64-w4-s2-waves_per_eu2"."""
    options = "".join(f"-{name}{value}" for name, value in config.options)
    return f"{config.block_m}x{config.block_n}-w{config.num_warps}-s{config.num_stages}{options}"


def _ck_units(targets: Sequence[str], only: str | None, toolchain: str) -> Iterator[Unit]:
    data = versions.load()
    served = [target for target in targets if has_kernels(data, target, "ck")]
    made_by, headers = ck_toolchain.find(toolchain).version, ck_sources.load().key
    for name, instances in ck_instances.units(only):
        for target in served:
            ingredients = {
                "unit": ck_compiler.source(instances),
                "target": target,
                "compiler": made_by,
                "headers": headers,
                "sources": sources.digest(*ck_compiler.SOURCES),
                "recipe": _recipe(ck_compiler, ck_toolchain, isa, codeobject),
            }
            yield Unit(
                target=target,
                name=name,
                compiler="ck",
                kernels=tuple(instance.name for instance in instances),
                content=instances,
                toolchain=toolchain,
                key=_key(ingredients),
            )


def _key(ingredients: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
