"""The kernel store: one zip archive per GPU target, holding code objects and a manifest."""

from __future__ import annotations

import hashlib
import json
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent.parent / "_kernels"
FORMAT = 1


class KernelError(RuntimeError):
    """A kernel that cannot be had or run; the message says which, and what to do."""


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
                manifest = json.loads(archive.read("manifest.json"))
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise KernelError(f"the kernel store {path} cannot be read ({error}): reinstall the wheel") from error
        if manifest["format"] != FORMAT:
            raise KernelError(
                f"the kernel store {path} has format {manifest['format']}, this flash_attn reads {FORMAT}: "
                "reinstall the wheel, its files come from two versions"
            )
        self.kernels: dict[str, dict[str, Any]] = manifest["kernels"]
        self.compiler: dict[str, str] = manifest["compiler"]

    def image(self, name: str) -> bytes:
        """The code object that holds a kernel, alone or among others, checked against its digest."""
        file = self.kernels[name].get("image", name)
        try:
            with zipfile.ZipFile(self.path) as archive:
                image = archive.read(f"{file}.co")
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise KernelError(f"{name} cannot be read from {self.path} ({error}): reinstall the wheel") from error
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
