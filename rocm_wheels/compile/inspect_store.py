"""The contents of a wheel or a kernel store: a table of every code object, read back from the code objects."""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rocm_wheels.compile import codeobject, manifest, sources
from rocm_wheels.errors import DataError

_HEADER = ("variant", "threads", "shared", "VGPR", "AGPR", "SGPR", "spills v/s", "private", "matrix", "KiB")


def report(path: Path) -> str:
    """A table per GPU target of a wheel or of one <target>.zip. Raises DataError if there is no store or if it is
    damaged.

    Registers, spills and private memory are read from the code object. The matrix instructions (MFMA, WMMA, WGMMA or
    MMA) are static counts that the compile stage took from the assembly.
    """
    with _stores(path) as stores:
        try:
            return "\n\n".join(_table(store) for store in stores)
        except sources.module("core.store").KernelError as error:
            raise DataError(f"{path} is damaged: {error}") from error


def sizes(path: Path) -> str:
    """A table of compressed sizes in KiB: a row for each operation, a column for each GPU target. Raises DataError as
    `report`.

    "manifest" is the description of all kernels, and "in all" the size of the archive.
    """
    columns: dict[str, Counter[str]] = {}
    with _stores(path) as stores:
        for store in stores:
            column = columns[store.stem] = Counter()
            with zipfile.ZipFile(store) as archive:
                for member in archive.infolist():
                    operation = re.sub(r"(-d\d+|\.json)$", "", member.filename)
                    column[operation] += member.compress_size
            column["in all"] = store.stat().st_size
    operations = sorted({name for column in columns.values() for name in column} - {"in all"})
    rows = [("KiB", *columns)] + [
        (name, *(f"{column[name] / 1024:.0f}" if name in column else "-" for column in columns.values()))
        for name in (*operations, "in all")
    ]
    return _aligned(rows)


@contextmanager
def _stores(path: Path) -> Iterator[list[Path]]:
    """The kernel stores of a wheel, or the store itself. Raises DataError if there is none."""
    if not path.exists():
        raise DataError(f"{path} is not there", remedy="name a .whl or a <target>.zip")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is neither a wheel nor a kernel store", remedy="name a .whl or a <target>.zip")
    with tempfile.TemporaryDirectory(prefix="inspect-") as scratch, zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        stores = [path]
        if "manifest.json" not in names:
            inner = sorted(name for name in names if "/_kernels/" in name and name.endswith(".zip"))
            stores = [Path(archive.extract(name, scratch)) for name in inner]
        if not stores:
            raise DataError(f"{path.name} holds no kernels", remedy="it was built without ahead-of-time kernels")
        yield stores


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _table(path: Path) -> str:
    rows: list[tuple[str, ...]] = [_HEADER]
    spilling = 0
    manifest.read(path)
    store = sources.module("core.store").Store(path)
    for name, image in sorted(store.images()):
        entry = store.kernels[name]
        kernel = codeobject.read_all(image)[entry["symbol"]]
        if kernel.target != store.target:
            raise DataError(f"{name} in {path.name} is a code object for {kernel.target}")
        isa = entry.get("isa", {})
        matrix = [f"{isa[kind]} {kind}" for kind in ("mfma", "wmma", "wgmma", "mma", "dot") if kind in isa]
        spilling += kernel.private > 0  # on CDNA a VGPR may spill to an AGPR, an SGPR to a lane of a VGPR
        figures = (
            entry["threads"], entry["shared"], kernel.vgprs, kernel.agprs, kernel.sgprs,
            f"{kernel.vgpr_spills}/{kernel.sgpr_spills}", kernel.private, " ".join(matrix) or "-",
            f"{len(image) / 1024:.0f}",
        )  # fmt: skip
        rows.append((name, *map(str, figures)))
    compiler = store.manifest["compiler"]
    title = (
        f"{store.target}: {len(rows) - 1} kernels, {path.stat().st_size / 1024:.0f} KiB, {spilling} with spills to "
        f"memory, {compiler['name']} {compiler['version']}"
    )
    return f"{title}\n{_aligned(rows)}"
