"""Packs the kernel store of one GPU target: a zip of a manifest and compressed groups of code objects.

The kernels of one operation and size are alike and compressed together: a group takes a third of the space of
separately compressed code objects, and a call unpacks a group in milliseconds. A generic target has the code of its
base target, so its store can be packed without that code. docs/notes/kernel-store.md describes the format;
`flash_attn.core.store` reads it.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from elftools.elf.elffile import ELFFile

from rocm_wheels.compile import sources
from rocm_wheels.compile.cache import read, write
from rocm_wheels.compile.compiler import Compiled, Unit
from rocm_wheels.errors import CompileFailed

_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
_NAME = re.compile(r"(?P<operation>.+?)-(?:fp16|bf16|fp32|fp8e\w+)(?P<size>-d\d+)?(?:[-@].*)?")


# Name of a code object -> (its group, the compiled unit).
Objects = Mapping[str, tuple[str, Compiled]]


class Base(NamedTuple):
    """The store of another target, in the same directory, whose code a store refers to."""

    target: str
    objects: Objects


def pack(
    wanted: Sequence[Unit],
    cache: Path,
    made_by: tuple[str, str],
    beside: Sequence[Unit] = (),
    planner: str | None = None,
) -> Path:
    """Packs the compiled units of one target and returns the path of the archive. The same units give the same bytes.

    beside: units of another target. Code that they share is left out, so their store has to be in the same directory.
    planner: sha256 of the library that plans launches of Composable Kernel's units, if there are any. Raises
    CompileFailed if a unit is no longer in the cache.
    """
    target = wanted[0].target
    base = Base(beside[0].target, _objects(beside, cache)) if beside else None
    # One directory for each set of units and compilers, so that stores of different sets (`--only`) and backends do not
    # overwrite each other while another build reads them.
    parts = [*made_by, planner or "", *(unit.key for unit in (*wanted, *beside))]
    identity = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = cache / "stores" / identity[:16] / f"{target}.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, archive(target, made_by, _objects(wanted, cache), base, planner))
    return path


def _objects(units: Sequence[Unit], cache: Path) -> dict[str, tuple[str, Compiled]]:
    objects: dict[str, tuple[str, Compiled]] = {}
    for unit in units:
        held = read(unit, cache)
        if held is None:
            raise CompileFailed(
                f"{unit.name} for {unit.target} vanished from the cache {cache}",
                remedy="Let nothing else write there, and run it again: missing kernels are compiled again.",
            )
        objects[unit.name] = (group_of(unit.compiler, unit.name), held)
    return objects


def group_of(compiler: str, name: str) -> str:
    """The group of a code object: its compiler, operation and size, as "triton-fwd-d128"."""
    match = _NAME.fullmatch(name)
    operation = f"{match['operation']}{match['size'] or ''}" if match else name
    return operation if operation.startswith(f"{compiler}-") else f"{compiler}-{operation}"


def archive(
    target: str, made_by: tuple[str, str], objects: Objects, base: Base | None = None, planner: str | None = None
) -> bytes:
    """The bytes of a store. base: a store whose instructions are not packed again for kernels that have the same."""
    kernels: dict[str, dict[str, Any]] = {}
    signatures, signature_of = _signatures(target)
    groups: dict[str, bytearray] = {}
    held = _held_by(base, objects) if base else {}
    for name in sorted(objects):
        group, (image, entries) = objects[name]
        content = groups.setdefault(group, bytearray())
        place: dict[str, Any] = {"group": group, "offset": len(content)}
        if code := held.get(name):
            place["code"] = code
            image = image[: code["at"]] + image[code["at"] + code["size"] :]
        place["size"] = len(image)
        for kernel, entry in entries.items():
            number = signature_of.get(kernel.partition("@")[0])  # before the name of a tile that a search compares
            kernels[kernel] = {**entry, **place} if number is None else {**entry, **place, "signature": number}
        content += image
    manifest = {
        "format": sources.module("core.store").FORMAT,
        "target": target,
        "facts": sources.module("kernels.targets").facts(target),
        "choice": sources.module("kernels.providers").choice(target),
        "planning": sources.module("kernels.planning").facts(target),
        "compiler": dict(zip(("name", "version"), made_by, strict=True)),
        "signatures": signatures,
        "kernels": kernels,
    }
    if base and held:
        manifest["base"] = base.target
    if planner:
        manifest["planner"] = planner
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


def _signatures(target: str) -> tuple[list[str], dict[str, int]]:
    """The names of arguments of every Triton kernel of a target, packed or not; and the place of each kernel's."""
    kernels = sources.module("kernels.signatures")
    every = kernels.signatures(target)
    place = {text: number for number, text in enumerate(every)}
    variants = sources.module("kernels.variants").table(target)
    return every, {variant.name: place[" ".join(kernels.names(variant, target))] for variant in variants}


def instructions(image: bytes) -> tuple[int, int]:
    """(offset, size) of the instructions in a code object of AMD; (0, 0) if it has none."""
    section = ELFFile(io.BytesIO(image)).get_section_by_name(".text")
    return (section["sh_offset"], section["sh_size"]) if section else (0, 0)


def _held_by(base: Base, objects: Objects) -> dict[str, dict[str, int]]:
    """The kernels whose instructions the base contains: their offsets in the code object and in the group of the
    base.
    """
    places = {}
    filled: Counter[str] = Counter()
    for name in sorted(base.objects):
        group, (image, _) = base.objects[name]
        if name in objects and objects[name][0] == group:
            mine = objects[name][1].image
            start, size = instructions(mine)
            there = image.find(mine[start : start + size]) if size else -1
            if there >= 0:
                places[name] = {"at": start, "offset": filled[group] + there, "size": size}
        filled[group] += len(image)
    return places
