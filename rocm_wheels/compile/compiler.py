"""The contract of a compiler (`Compiler`) and its unit of work (`Unit`)."""

from __future__ import annotations

import fnmatch
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
    """One run of a compiler for one GPU target. It makes one code object with one or more kernels.

    content: the input of the compiler as plain values, because a worker process unpickles a unit before it can import
    flash_attn. key: a digest of everything that the code object depends on.
    """

    target: str
    name: str
    compiler: str
    kernels: tuple[str, ...]
    content: tuple[Any, ...]
    toolchain: str
    key: str

    def path(self, cache: Path) -> Path:
        """Path of the code object in the cache. The manifest entries of its kernels are in the .json file next to
        it.
        """
        return cache / "kernels" / self.key[:2] / f"{self.key}.co"


class Compiled(NamedTuple):
    """A code object and the manifest entries of its kernels, by the name of the kernel.

    An entry has symbol, threads (per block), shared (bytes), params (the launcher's letters), constants, options,
    resources (registers, spills, bytes) and isa (instructions of each class): docs/notes/kernel-store.md.
    """

    image: bytes
    entries: dict[str, dict[str, Any]]


def matches(name: str, only: str | None) -> bool:
    """Whether the kernel's name matches one of the globs of `only`, which semicolons separate. None: all do."""
    return only is None or any(fnmatch.fnmatch(name, glob) for glob in only.split(";"))


class Compiler(ABC):
    """A kernel provider: Triton, Composable Kernel, a package of assembly kernels.

    An instance has no state, because worker processes create their own instances.
    """

    name: str

    @abstractmethod
    def version(self, toolchain: str) -> str:
        """Name and version of the compiler: "triton 3.7.1". Raises MissingTool if this machine lacks it."""

    @abstractmethod
    def units(self, target: str, *, only: str | None, toolchain: str) -> Iterator[Unit]:
        """The units of one target, in a fixed order; empty if the compiler has no kernels for the target.

        only: see `matches`. Raises MissingTool if a key cannot be computed on this machine.
        """

    def prepare(self, cache: Path) -> None:  # noqa: B027 - a default, not a gap
        """Runs once before the workers start: fetches what all units need. Raises MissingTool or DataError."""

    def start(self, scratch: str) -> None:  # noqa: B027
        """Sets up a worker process. All workers share the directory `scratch`."""

    @abstractmethod
    def compile(self, unit: Unit, cache: Path) -> Compiled:
        """Compiles a unit of `units` in a worker process. Raises CompileFailed, which names the kernel. The same unit
        gives the same bytes on every machine.
        """


def key(ingredients: Mapping[str, Any]) -> str:
    """The key of a unit: a digest of everything that its code object depends on. ingredients: JSON-ready values."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


@cache
def recipe(*modules: ModuleType) -> str:
    """A part of a key: the digest of the code that turns a kernel into a code object and its manifest entry."""
    files = (Path(str(module.__file__)) for module in modules)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
