"""The kernel store: one zip archive per GPU target, holding code objects and a manifest."""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent.parent / "_kernels"
FORMAT = 1


# What zipfile, zlib and json raise for a damaged archive, and what a manifest of another form does.
_UNREADABLE = (
    OSError, EOFError, ValueError, LookupError, TypeError, NotImplementedError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class KernelError(RuntimeError):
    """A kernel that cannot be had or run; the message says which, and what to do."""


def _read(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(name)


def targets(directory: Path | None = None) -> tuple[str, ...]:
    """The GPU targets that this installation carries kernels for."""
    return tuple(sorted(path.stem for path in (directory or DIRECTORY).glob("*.zip")))


class Store:
    """The code objects of one target. Opening reads the manifest alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target = path.stem
        try:
            manifest = json.loads(_read(path, "manifest.json"))
            found = manifest["format"]
            self.kernels: dict[str, dict[str, Any]] = manifest["kernels"] if found == FORMAT else {}
        except _UNREADABLE as error:
            raise KernelError(f"the kernel store {path} cannot be read ({error!r}): reinstall the wheel") from error
        if found != FORMAT:
            raise KernelError(
                f"the kernel store {path} has format {found}, this flash_attn reads {FORMAT}: "
                "reinstall the wheel, its files come from two versions"
            )

    def image(self, name: str) -> bytes:
        """The code object that holds a kernel, alone or among others, checked against its digest."""
        file = self.kernels[name].get("image", name)
        try:
            image = _read(self.path, f"{file}.co")
        except _UNREADABLE as error:
            raise KernelError(f"{name} cannot be read from {self.path} ({error!r}): reinstall the wheel") from error
        digest = hashlib.sha256(image).hexdigest()
        wanted = self.kernels[name]["sha256"]
        if digest != wanted:
            raise KernelError(
                f"the code object {name} in {self.path} is corrupt (sha256 {digest[:16]}..., the manifest says "
                f"{wanted[:16]}...): reinstall the wheel"
            )
        return image


@cache
def open_store(target: str, directory: Path | None = None) -> Store | None:
    """The store of a target, or None where this installation has none."""
    path = (directory or DIRECTORY) / f"{target}.zip"
    return Store(path) if path.exists() else None
