"""The package of AMD's assembly kernels: locked, fetched by pip, unpacked into the cache and checked there."""

from __future__ import annotations

import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rocm_wheels.compile import download, sources
from rocm_wheels.compile.check import habits
from rocm_wheels.compile.compiler import key
from rocm_wheels.errors import DataError
from rocm_wheels.tables import Table, parse

DATA_FILE = Path(__file__).with_name("amd_aiter.toml")


@dataclass(frozen=True, kw_only=True)
class CodeObject:
    """A code object of the package: its target, the name of its kernel here, its path in the package, its digest.

    places: what the check of instructions found in these bytes, by habit (`compile.check.habits`).
    """

    target: str
    kernel: str
    file: str
    sha256: str
    places: dict[str, int]

    @property
    def place(self) -> str:
        return f"{self.target}/{self.file}"


@dataclass(frozen=True, kw_only=True)
class Package:
    """A wheel with a pinned hash that has code objects in one of its directories."""

    name: str
    version: str
    sha256: str
    directory: str
    license: str
    objects: tuple[CodeObject, ...]

    @property
    def key(self) -> str:
        """Digest of the package and of the code objects that are taken from it."""
        return key({"package": self.sha256, "objects": [[code.place, code.sha256] for code in self.objects]})


@cache
def load(path: Path = DATA_FILE) -> Package:
    """Reads the data file. Raises DataError for wrong content, and if flash_attn plans other kernels than the
    data file has.
    """
    root = Table(path.name, "", parse(path.read_text(encoding="utf-8"), path.name))
    table = root.table("package")
    objects = tuple(_checked(row, path.name) for row in root.get("object", list))
    package = Package(
        name=table.text("name"),
        version=table.text("version"),
        sha256=table.text("sha256"),
        directory=table.text("directory"),
        license=table.text("license"),
        objects=objects,
    )
    table.finish()
    root.finish()
    named = {(code.target, code.kernel) for code in objects}
    planned = {(row.target, row.name) for row in sources.module("kernels.assembly").KERNELS}
    if different := sorted(named ^ planned):
        target, kernel = different[0]
        where = f"not in {path.name}" if (target, kernel) in planned else "not in flash_attn/kernels/assembly.py"
        raise DataError(f"{kernel} of {target} is {where}", remedy="Give both tables the same kernels.")
    return package


def _checked(row: dict[str, Any], where: str) -> CodeObject:
    """The code object of a row. Raises DataError if the row lacks the findings of the hazard check."""
    places = row.get("places")
    if not isinstance(places, dict) or not set(places) <= set(habits.NAMES):
        raise DataError(
            f"{row.get('kernel')} of {row.get('target')} in {where} has places {places}",
            remedy="Write what `python -m amdgpu_simulator hazards` finds in its instructions.",
        )
    return CodeObject(**row)


def directory(cache: Path, package: Package | None = None) -> Path:
    """The directory with the checked code objects, by their paths in the package. It is fetched once and then read from
    the cache.

    package: a package with other code objects than wheels take. Raises MissingTool if pip cannot fetch the package,
    DataError if a digest is wrong.
    """
    package = package or load()
    place = cache / "amd_aiter" / package.key[:16]
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".asm-", dir=place.parent) as scratch:
        tree = Path(scratch) / "tree"
        _unpack(_fetch(package, Path(scratch)), package, tree)
        try:
            tree.rename(place)
        except OSError:
            # Another process has unpacked the same files first.
            if not place.is_dir():
                raise
    return place


def _fetch(package: Package, scratch: Path) -> Path:
    return download.fetch(
        f"{package.name}=={package.version}",
        ("--only-binary", ":all:"),
        scratch,
        sha256=package.sha256,
        locked_in=DATA_FILE,
        holds="AMD's assembly kernels",
        remedy="Look at pip's own settings (index, proxy), or build without these kernels: --without asm.",
    )


def _unpack(wheel: Path, package: Package, tree: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for code in package.objects:
            try:
                content = archive.read(f"{package.directory}/{code.place}")
            except KeyError:
                raise DataError(f"{wheel.name} has no {package.directory}/{code.place}") from None
            download.check(code.place, content, code.sha256, DATA_FILE)
            target = tree / code.place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


# Offsets in a 64-bit ELF header, and the value that AMD's code objects of versions 5 and 6 have at the first offset.
_ABI_VERSION, _FLAGS, _VERSION_5, _VERSION_6 = 8, 48, 3, 4


def version_5(image: bytes) -> bytes:
    """Rewrites a code object of version 6 as version 5, because ROCm 6.1 refuses to load version 6. Others are returned
    unchanged.

    Version 6 only adds generic targets, whose number is the last byte of e_flags (LLVM, "User Guide for AMDGPU
    Backend"). So a code object for a generic target keeps its version.
    """
    is_generic = image[_FLAGS + 3] != 0
    if image[_ABI_VERSION] != _VERSION_6 or is_generic:
        return image
    return image[:_ABI_VERSION] + bytes([_VERSION_5]) + image[_ABI_VERSION + 1 :]
