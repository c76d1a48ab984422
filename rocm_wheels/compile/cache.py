"""The cache of compiled units: each under the digest of everything that it depends on."""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

from rocm_wheels.compile.units import Unit


def write(path: Path, content: bytes) -> None:
    """Whole or not at all, whenever the process is killed."""
    # A name that no process of another container takes, which has the same cache and numbers of processes.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(unit: Unit, cache: Path) -> tuple[bytes, dict[str, dict[str, Any]]] | None:
    """A unit's code object and entries, or None where the cache lacks it or holds a damaged copy."""
    path = unit.path(cache)
    try:
        image = path.read_bytes()
        entries: dict[str, dict[str, Any]] = json.loads(path.with_suffix(".json").read_bytes())
        digest = hashlib.sha256(image).hexdigest()
        whole = sorted(entries) == sorted(unit.kernels) and all(e["sha256"] == digest for e in entries.values())
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return (image, entries) if whole else None
