"""The manifest of a kernel store. It is checked before it is used (docs/notes/kernel-store.md)."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

from rocm_wheels import schema
from rocm_wheels.compile import sources
from rocm_wheels.errors import DataError

_NAME = "manifest.json"
_MAX_BYTES = 64 << 20  # a store of 5000 kernels has 4 MiB
_MAX_CODE = 1 << 30  # bytes of a group of code objects
_REMEDY = "Compile it again: ./build_rocm.sh --store TARGET."
_PLACE = {name: schema.number(most=_MAX_CODE, whole=True) for name in ("offset", "size")}
_TEXT = schema.text(300)
_KERNEL = schema.ObjectSchema(
    {
        **_PLACE,
        "group": _TEXT,
        "symbol": schema.prose(10_000),
        "sha256": schema.text(64, r"[0-9a-f]{64}"),
        **{name: schema.number(whole=True) for name in ("threads", "shared")},
        "params": schema.prose(10_000),
    },
    {
        "signature": schema.number(whole=True),
        "code": schema.ObjectSchema({**_PLACE, "at": schema.number(most=_MAX_CODE, whole=True)}),
        "isa": schema.MapSchema(schema.number(whole=True), 1000, _TEXT),
    },
    others=True,
)
_MANIFEST = schema.ObjectSchema(
    {
        "format": schema.number(whole=True),
        "target": schema.text(40, r"gfx[0-9a-f-]+(generic)?|sm_[0-9]+[af]?"),
        "compiler": schema.ObjectSchema({"name": _TEXT, "version": _TEXT}, others=True),
        "signatures": schema.ListSchema(schema.prose(10_000), 10_000),
        "kernels": schema.MapSchema(_KERNEL, 100_000),
    },
    {"base": schema.text(40, r"gfx[0-9a-f-]+(generic)?")},
    others=True,
)


def read(path: Path) -> dict[str, Any]:
    """The manifest of the store in a file. Raises DataError if the file is not a store of this format."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(_NAME) as file:
            text = file.read(_MAX_BYTES + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, LookupError) as error:
        raise DataError(f"{path.name} is no kernel store: {error}", remedy=_REMEDY) from error
    content: dict[str, Any] = schema.load(f"{_NAME} of {path.name}", text, _MAX_BYTES)
    if wrong := next(schema.problems(content, _MANIFEST), None):
        raise DataError(f"{path.name}: its manifest has another form: {wrong}", remedy=_REMEDY)
    expected = sources.module("core.store").FORMAT
    if content["format"] != expected:
        raise DataError(f"{path.name} has format {content['format']}, these sources read {expected}", remedy=_REMEDY)
    return content


def check_code(path: Path) -> None:
    """Raises DataError unless each code object of the store has the digest in the manifest."""
    store = sources.module("core.store")
    try:
        for _ in store.Store(path).images():
            pass
    except store.KernelError as error:
        raise DataError(f"{path.name} is damaged: {error}", remedy=_REMEDY) from error
