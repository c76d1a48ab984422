"""The cache of compiled units and libraries: each under the digest of everything that it depends on."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable
from pathlib import Path

from rocm_wheels.compile.compiler import Compiled, Unit


def read(unit: Unit, cache: Path) -> Compiled | None:
    """A compiled unit, or None where the cache lacks it or holds a damaged copy. Its entries hold the digest."""
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
    """Keeps a compiled unit. The entries are written last, so a unit is there once both files are whole."""
    path = unit.path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(compiled.image).hexdigest()
    held = {name: {**entry, "sha256": digest} for name, entry in compiled.entries.items()}
    write(path, compiled.image)
    write(path.with_suffix(".json"), json.dumps(held, sort_keys=True).encode())


def prune(wanted: Iterable[Unit], cache: Path) -> int:
    """Deletes all units of the cache but these, and what killed processes left unfinished; how many files went.

    For a cache that one job has for itself: what it carries from run to run stays as large as what it needs.
    """
    kept = {path for unit in wanted for path in (unit.path(cache), unit.path(cache).with_suffix(".json"))}
    others = [path for path in (cache / "kernels").glob("*/*") if path not in kept]
    for path in others:
        path.unlink(missing_ok=True)
    return len(others)


def read_library(path: Path) -> bytes | None:
    """What `put_library` kept, or None where the cache lacks it or holds a damaged copy."""
    try:
        content, digest = path.read_bytes(), path.with_suffix(".sha256").read_bytes()
    except FileNotFoundError:
        return None
    return content if hashlib.sha256(content).hexdigest().encode() == digest else None


def put_library(path: Path, content: bytes) -> None:
    """Keeps a library that is no unit, and its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content)
    write(path.with_suffix(".sha256"), hashlib.sha256(content).hexdigest().encode())


def write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, whenever the process is killed."""
    # Another container may share the cache and the numbers of processes: the name is random.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
