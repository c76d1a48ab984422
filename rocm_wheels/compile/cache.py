"""The cache of compiled units and libraries. The key of an entry is the digest of everything that the entry depends
on.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable
from pathlib import Path

from rocm_wheels.compile.compiler import Compiled, Unit


def read(unit: Unit, cache: Path) -> Compiled | None:
    """A compiled unit. Returns None if it is not in the cache or if its copy is damaged; its manifest entries hold the
    digest.
    """
    path = unit.path(cache)
    try:
        image = path.read_bytes()
        entries = json.loads(path.with_suffix(".json").read_bytes())
        digest = hashlib.sha256(image).hexdigest()
        whole = sorted(entries) == sorted(unit.kernels) and all(e["sha256"] == digest for e in entries.values())
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return Compiled(image, entries) if whole else None


def put(unit: Unit, compiled: Compiled, cache: Path) -> None:
    """Stores a compiled unit. The manifest entries are written last, so a unit exists only if both files are
    complete.
    """
    path = unit.path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(compiled.image).hexdigest()
    held = {name: {**entry, "sha256": digest} for name, entry in compiled.entries.items()}
    write(path, compiled.image)
    write(path.with_suffix(".json"), json.dumps(held, sort_keys=True).encode())


def prune(wanted: Iterable[Unit], cache: Path) -> int:
    """Deletes all other units of the cache, and unfinished files of killed processes. Returns the number of deleted
    files.

    Only for a cache that no other job uses at the same time: this keeps a cache small that CI saves and restores
    between runs.
    """
    kept = {path for unit in wanted for path in (unit.path(cache), unit.path(cache).with_suffix(".json"))}
    others = [path for path in (cache / "kernels").glob("*/*") if path not in kept]
    for path in others:
        path.unlink(missing_ok=True)
    return len(others)


def read_library(path: Path) -> bytes | None:
    """A library that `put_library` stored. Returns None if it is not in the cache or if its copy is damaged."""
    try:
        content, digest = path.read_bytes(), path.with_suffix(".sha256").read_bytes()
    except FileNotFoundError:
        return None
    return content if hashlib.sha256(content).hexdigest().encode() == digest else None


def put_library(path: Path, content: bytes) -> None:
    """Stores a library that is not a unit, with its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content)
    write(path.with_suffix(".sha256"), hashlib.sha256(content).hexdigest().encode())


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically: a killed process leaves either the whole file or none."""
    # Another container may share the cache and the process numbers, so the name is random.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
