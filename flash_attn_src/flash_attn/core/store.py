"""The kernel store: one zip archive per GPU target, with groups of code objects and a manifest.

docs/notes/kernel-store.md describes the format; `rocm_wheels.compile.store` writes it. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

try:
    import lzma
except ImportError:  # a Python that was built without liblzma; `Store.image` says so
    lzma = None  # type: ignore[assignment]

DIRECTORY = Path(__file__).resolve().parent.parent / "_kernels"
FORMAT = 6

# What zipfile, its decompressors and json raise for a damaged archive, and for a manifest of another form.
_UNREADABLE = (
    OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error,
    *(() if lzma is None else (lzma.LZMAError,)),
)  # fmt: skip


class KernelError(RuntimeError):
    """A kernel cannot be found or run. The message names the kernel and a remedy."""


def targets(directory: Path | None = None) -> tuple[str, ...]:
    """The GPU targets that this installation carries kernels for."""
    return tuple(sorted(path.stem for path in (directory or DIRECTORY).glob("*.zip")))


class Store:
    """The code objects of one target. Opening reads the manifest alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target = path.stem
        try:
            with zipfile.ZipFile(path) as archive:
                self.manifest: dict[str, Any] = json.loads(archive.read("manifest.json"))
            version = self.manifest["format"]
            self.kernels: dict[str, dict[str, Any]] = self.manifest["kernels"] if version == FORMAT else {}
            self._signatures = [text.split() for text in self.manifest["signatures"]] if version == FORMAT else []
        except _UNREADABLE as error:
            raise KernelError(f"the kernel store {path} cannot be read ({error!r}): reinstall the wheel") from error
        if version != FORMAT:
            raise KernelError(
                f"the kernel store {path} has format {version}, this flash_attn reads {FORMAT}: "
                "reinstall the wheel, its files come from two versions"
            )

    @cached_property
    def vocabulary(self) -> frozenset[str]:
        """Every name that a run-time argument of some kernel has."""
        return frozenset(name for names in self._signatures for name in names)

    def signature(self, name: str) -> list[str] | None:
        """The names of the run-time arguments of a kernel, in order; None for one that takes a structure. Raises
        KernelError for a damaged manifest."""
        number = self.kernels[name].get("signature")
        try:
            return None if number is None else self._signatures[number]
        except _UNREADABLE as error:
            raise KernelError(
                f"the kernel store {self.path} has no signature {number!r} of {name}: reinstall the wheel"
            ) from error

    def image(self, name: str) -> bytes:
        """The code object of a kernel, checked against its digest.

        Unpacks the kernel's group as far as the code object reaches, and keeps only the code object. Raises
        KernelError for a damaged store and for a Python without the module lzma.
        """
        return dict(self._images((name,)))[name]

    def images(self) -> Iterator[tuple[str, bytes]]:
        """Every kernel's name with its code object, as `image` gives it; each group is unpacked once."""
        for _, names in groupby(sorted(self.kernels, key=self._group), key=self._group):
            yield from self._images(tuple(names))

    def _group(self, name: str) -> str:
        return str(self.kernels[name]["group"])

    def _images(self, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
        """Kernels of one group with their code objects. Code that another store holds is put in its place."""
        entries = [self.kernels[name] for name in names]
        shared = [entry["code"] for entry in entries if "code" in entry]
        content = self._unpacked(self.path, entries, names[0])
        if shared:
            base = self.path.with_name(f"{self.manifest['base']}.zip")
            code = self._unpacked(base, [{**part, "group": entries[0]["group"]} for part in shared], names[0])
        for name, entry in zip(names, entries, strict=True):
            image = content[entry["offset"] : _end(entry)]
            if (place := entry.get("code")) is not None:
                image = image[: place["at"]] + code[place["offset"] : _end(place)] + image[place["at"] :]
            yield name, self._checked(name, image)

    def _unpacked(self, path: Path, entries: Sequence[dict[str, Any]], name: str) -> bytes:
        """The group of these entries, as far as they reach. `name` is the kernel that errors tell of."""
        if lzma is None:
            raise KernelError(
                f"{name} cannot be unpacked: this Python has no module lzma. The Pythons of Linux distributions and of "
                "uv have it; pyenv builds it where liblzma-dev is installed"
            )
        try:
            with zipfile.ZipFile(path) as archive, archive.open(entries[0]["group"]) as group:
                return group.read(max(map(_end, entries)))
        except _UNREADABLE as error:
            raise KernelError(f"{name} cannot be read from {path} ({error!r}): reinstall the wheel") from error

    def _checked(self, name: str, image: bytes) -> bytes:
        digest = hashlib.sha256(image).hexdigest()
        expected = self.kernels[name]["sha256"]
        if digest != expected:
            raise KernelError(
                f"the code object {name} in {self.path} is corrupt (sha256 {digest[:16]}..., the manifest says "
                f"{expected[:16]}...): reinstall the wheel"
            )
        return image


def _end(entry: dict[str, Any]) -> int:
    return int(entry["offset"]) + int(entry["size"])


@cache
def open_store(target: str, directory: Path | None = None) -> Store | None:
    """The store of a target, or None if this installation has none for it."""
    path = (directory or DIRECTORY) / f"{target}.zip"
    return Store(path) if path.exists() else None
