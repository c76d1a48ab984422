"""What the compile stage asks of a compiler, and the unit of work that it gives to one."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One run of a compiler for one GPU target. It makes one code object, which holds one or more kernels.

    `content` is what the compiler needs to know, as plain values: a worker process unpickles a unit before it can
    import flash_attn. `key` is a digest of everything that the code object depends on.
    """

    target: str
    name: str
    compiler: str
    kernels: tuple[str, ...]
    content: tuple[Any, ...]
    toolchain: str
    key: str

    def path(self, cache: Path) -> Path:
        """Where the cache keeps the code object. The manifest entries of its kernels lie beside it as .json."""
        return cache / "kernels" / self.key[:2] / f"{self.key}.co"


class Compiled(NamedTuple):
    """A code object and the manifest entry of each of its kernels, by the kernel's name.

    An entry has symbol, threads (a block), shared (bytes), params (the launcher's letters), constants, options,
    resources (registers, spills, bytes) and isa (instructions of each class): docs/kernel-store.md.
    """

    image: bytes
    entries: dict[str, dict[str, Any]]


class Compiler(ABC):
    """A source of code objects: Triton, Composable Kernel, a package of assembly kernels.

    An instance has no state, because worker processes make their own.
    """

    name: str

    @abstractmethod
    def version(self, toolchain: str) -> str:
        """What compiles, with its version: "triton 3.7.1". Raises MissingTool where this machine lacks it."""

    @abstractmethod
    def units(self, target: str, *, only: str | None, toolchain: str) -> Iterator[Unit]:
        """The units of one target, in a fixed order; none where the compiler has no kernels for the target.

        `only` is a glob over names of kernels. Raises MissingTool where a key cannot be computed on this machine.
        """

    def prepare(self, cache: Path) -> None:  # noqa: B027 - a default, not a gap
        """Runs once, before the workers start: fetches what every unit needs. Raises MissingTool or DataError."""

    def start(self, scratch: str) -> None:  # noqa: B027
        """Sets up a worker process, which has the directory `scratch` for itself and others like it."""

    @abstractmethod
    def compile(self, unit: Unit, cache: Path) -> Compiled:
        """Runs in a worker process, on a unit that `units` made. Raises CompileFailed, which names the kernel.

        The same unit gives the same bytes, on every machine.
        """


def key(ingredients: Mapping[str, Any]) -> str:
    """The key of a unit: a digest of everything that its code object depends on, as JSON-ready values."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


@cache
def recipe(*modules: ModuleType) -> str:
    """An ingredient of a key: digest of the code that turns a kernel into a code object and its entry."""
    files = (Path(str(module.__file__)) for module in modules)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
