"""What a wheel or a kernel store holds: a table of every code object, read back from the objects themselves."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

from rocm_wheels.compile import codeobject
from rocm_wheels.errors import DataError

_HEADER = ("variant", "threads", "shared", "VGPR", "AGPR", "SGPR", "spills v/s", "private", "matrix", "KiB")


def report(path: Path) -> str:
    """A table per GPU target of a wheel or of one <target>.zip. Raises DataError where there is none.

    Registers, spills and private memory come from the code object; the matrix instructions (MFMA, WMMA, WGMMA or
    MMA) are static counts that the compile stage took from the assembly.
    """
    if not path.exists():
        raise DataError(f"{path} is not there", remedy="name a .whl or a <target>.zip")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is neither a wheel nor a kernel store", remedy="name a .whl or a <target>.zip")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if "manifest.json" in names:
            stores = {path.stem: path.read_bytes()}
        else:
            inner = [name for name in names if "/_kernels/" in name and name.endswith(".zip")]
            stores = {Path(name).stem: archive.read(name) for name in sorted(inner)}
    if not stores:
        raise DataError(f"{path.name} holds no kernels", remedy="it was built without ahead-of-time kernels")
    return "\n\n".join(_table(target, content) for target, content in stores.items())


def _table(target: str, content: bytes) -> str:
    rows: list[tuple[str, ...]] = [_HEADER]
    spilling = 0
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        for name, entry in sorted(manifest["kernels"].items()):
            image = archive.read(f"{entry.get('image', name)}.co")
            found = codeobject.read_all(image)[entry["symbol"]]
            if found.target != target:
                raise DataError(f"{name} in {target}.zip is a code object for {found.target}")
            isa = entry["isa"]
            matrix = [f"{isa[kind]} {kind}" for kind in ("mfma", "wmma", "wgmma", "mma", "dot") if kind in isa]
            spilling += found.private > 0  # on CDNA a spilled VGPR may go to an AGPR, an SGPR goes to a VGPR's lane
            figures = (
                entry["threads"], entry["shared"], found.vgprs, found.agprs, found.sgprs,
                f"{found.vgpr_spills}/{found.sgpr_spills}", found.private, " ".join(matrix) or "-",
                f"{len(image) / 1024:.0f}",
            )  # fmt: skip
            rows.append((name, *map(str, figures)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    compiler = manifest["compiler"]
    title = (
        f"{target}: {len(rows) - 1} kernels, {len(content) / 1024:.0f} KiB, {spilling} with spills to memory, "
        f"{compiler['name']} {compiler['version']}"
    )
    return "\n".join([title, *lines])
