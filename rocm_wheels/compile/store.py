"""Packs the kernel store of one GPU target: a zip of compressed groups of code objects and a manifest.

The kernels of one operation and one size are alike, so they are compressed together: a group takes a third of the
space that its code objects take one by one, and a call unpacks a group in milliseconds. docs/kernel-store.md
describes the format; `flash_attn.runtime.store` reads it.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rocm_wheels.compile import sources
from rocm_wheels.compile.cache import read, write
from rocm_wheels.compile.compiler import Compiled, Unit
from rocm_wheels.errors import CompileFailed

_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
_NAME = re.compile(r"(?P<operation>.+?)-(?:fp16|bf16|fp32|fp8e\w+)(?P<size>-d\d+)?(?:[-@].*)?")


def pack(wanted: Sequence[Unit], cache: Path, made_by: tuple[str, str]) -> Path:
    """Packs compiled units of one target and returns the path of the archive. The same units give the same bytes.

    Raises CompileFailed where the cache lost a unit.
    """
    target = wanted[0].target
    objects: dict[str, tuple[str, Compiled]] = {}
    for unit in wanted:
        held = read(unit, cache)
        if held is None:
            raise CompileFailed(
                f"{unit.name} for {target} vanished from the cache {cache}",
                remedy="Let nothing else write there, and run it again: missing kernels are compiled again.",
            )
        objects[unit.name] = (group_of(unit.compiler, unit.name), held)
    # One directory for one set of units and compilers, so that stores of different sets (`--only`) and backends do not
    # overwrite each other while another build reads them.
    identity = hashlib.sha256("\0".join([*made_by, *(unit.key for unit in wanted)]).encode()).hexdigest()
    path = cache / "stores" / identity[:16] / f"{target}.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, archive(target, made_by, objects))
    return path


def group_of(compiler: str, name: str) -> str:
    """The group of a code object: its compiler, operation and size, as "triton-fwd-d128"."""
    match = _NAME.fullmatch(name)
    operation = f"{match['operation']}{match['size'] or ''}" if match else name
    return operation if operation.startswith(f"{compiler}-") else f"{compiler}-{operation}"


def archive(target: str, made_by: tuple[str, str], objects: Mapping[str, tuple[str, Compiled]]) -> bytes:
    """The bytes of a store. `objects` maps the name of a code object to its group and to what was compiled."""
    kernels: dict[str, dict[str, Any]] = {}
    groups: dict[str, bytearray] = {}
    for name in sorted(objects):
        group, (image, entries) = objects[name]
        content = groups.setdefault(group, bytearray())
        place = {"group": group, "offset": len(content), "size": len(image)}
        kernels.update({kernel: {**entry, **place} for kernel, entry in entries.items()})
        content += image
    manifest = {
        "format": sources.module("runtime.store").FORMAT,
        "target": target,
        "compiler": dict(zip(("name", "version"), made_by, strict=True)),
        "kernels": kernels,
    }
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for member, data, method in (
            ("manifest.json", text, zipfile.ZIP_DEFLATED),
            *((group, bytes(groups[group]), zipfile.ZIP_LZMA) for group in sorted(groups)),
        ):
            information = zipfile.ZipInfo(member, _ZIP_DATE)
            information.compress_type = method
            information.external_attr = 0o644 << 16
            file.writestr(information, data)
    return packed.getvalue()
