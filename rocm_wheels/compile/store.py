"""The kernel store of one GPU target: an archive of code objects with a manifest."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocm_wheels.compile.cache import read, write
from rocm_wheels.compile.compiler import Unit
from rocm_wheels.errors import CompileFailed

_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


def pack(wanted: Sequence[Unit], cache: Path, made_by: tuple[str, str]) -> Path:
    """The archive of one target: the same units give the same bytes."""
    target = wanted[0].target
    kernels: dict[str, dict[str, Any]] = {}
    images: dict[str, bytes] = {}
    for unit in wanted:
        held = read(unit, cache)
        if held is None:
            raise CompileFailed(
                f"{unit.name} for {target} vanished from the cache {cache}",
                remedy="Let nothing else write there, and run it again: what is missing is compiled.",
            )
        images[unit.name] = held.image
        kernels.update(held.entries)
    manifest = {
        "format": 1,
        "target": target,
        "compiler": dict(zip(("name", "version"), made_by, strict=True)),
        "kernels": kernels,
    }
    text = json.dumps(manifest, sort_keys=True, indent=1).encode()
    # One directory for one set of units, so that stores of different sets (`--only`) do not overwrite each other.
    identity = hashlib.sha256("".join(unit.key for unit in wanted).encode()).hexdigest()
    path = cache / "stores" / identity[:16] / f"{target}.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file, content in (("manifest.json", text), *((f"{name}.co", images[name]) for name in sorted(images))):
            information = zipfile.ZipInfo(file, _ZIP_DATE)
            information.compress_type = zipfile.ZIP_DEFLATED
            information.external_attr = 0o644 << 16
            archive.writestr(information, content)
    write(path, packed.getvalue())
    return path
