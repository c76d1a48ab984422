"""Writes a wheel again under another name: with a build number (PEP 427), or without its label."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def numbered(wheel: Path, build: int) -> Path:
    """Renames a wheel to have this build number (PEP 427), also in its WHEEL and RECORD."""
    distribution, version, *rest = wheel.name.split("-")
    name = f"{distribution}-{version}-{build}-{'-'.join(rest[-3:])}"
    info = f"{distribution}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        members = [(entry, archive.read(entry)) for entry in archive.infolist()]
    content = {entry.filename: data for entry, data in members}
    lines = [line for line in content[f"{info}/WHEEL"].decode().splitlines() if not line.startswith("Build:")]
    content[f"{info}/WHEEL"] = "\n".join([*lines[:1], f"Build: {build}", *lines[1:], ""]).encode()
    content[f"{info}/RECORD"] = _record(content, f"{info}/RECORD")
    path = wheel.with_name(name)
    with _whole(path) as scratch, zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, _ in members:
            archive.writestr(entry, content[entry.filename])
    wheel.unlink()
    return path


def without_label(wheel: Path, directory: Path) -> Path:
    """Writes a wheel into a directory under its version without the label. Returns the path.

    METADATA and RECORD name the other version; every other member is the same. The members are not compressed, so that
    every zlib gives the same bytes; the kernel stores, nearly all of a wheel, are compressed already.
    """
    distribution, version, *rest = wheel.name.split("-")
    public = version.partition("+")[0]
    before, after = (f"{distribution}-{each}.dist-info/" for each in (version, public))
    content: dict[str, bytes] = {}
    dates: dict[str, tuple[int, int, int, int, int, int]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = after + entry.filename.removeprefix(before) if entry.filename.startswith(before) else entry.filename
            content[name], dates[name] = archive.read(entry), entry.date_time
    headers_, blank, text = content[f"{after}METADATA"].partition(b"\n\n")
    changed = headers_.replace(f"\nVersion: {version}".encode(), f"\nVersion: {public}".encode())
    content[f"{after}METADATA"] = changed + blank + text
    content[f"{after}RECORD"] = _record(content, f"{after}RECORD")
    path = directory / "-".join((distribution, public, *rest))
    with _whole(path) as scratch, zipfile.ZipFile(scratch, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            archive.writestr(_entry(name, dates[name]), data)
    return path


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A path to write to. The file becomes `path` at the end; after a failure, such as a full disk, there is none."""
    scratch = path.with_name(f".{path.name}.part")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _entry(name: str, date: tuple[int, int, int, int, int, int]) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date)
    entry.create_system, entry.external_attr = 3, 0o100644 << 16
    return entry


def _record(content: Mapping[str, bytes], record: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, data in content.items():
        if name != record:
            encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            writer.writerow((name, f"sha256={encoded}", len(data)))
    writer.writerow((record, "", ""))
    return text.getvalue().encode()
