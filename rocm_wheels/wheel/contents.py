"""The contents of a wheel: read with limits, checked against RECORD, hashed, renamed with a build number.

Two builds of the same sources differ in the commit that they name and in the version of the build backend. Their digest
is the same, because it leaves out the provenance.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from rocm_wheels.errors import DataError

BUILD_INFO = "flash_attn/_build_info.json"
PROVENANCE = ("commit", "release")  # provenance in the build info: not part of the contents
_MAX_TEXT = 1 << 20  # limit for METADATA, WHEEL and build info; real ones have a few KiB
_MAX_MEMBERS = 10_000
_CHUNK = 1 << 20
_NO_WHEEL = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


class Contents:
    """A wheel opened for reading. Raises DataError for a file that is not a wheel, or that would exhaust memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.archive = zipfile.ZipFile(path)
        except _NO_WHEEL as error:
            raise DataError(f"{path.name} is not a wheel of that name: {error}") from error
        names = [info.filename for info in self.archive.infolist() if not info.is_dir()]
        if len(names) > _MAX_MEMBERS or len(set(names)) != len(names):
            self.archive.close()
            raise DataError(f"{path.name} has {len(names)} members, some twice or more than {_MAX_MEMBERS}")
        if outside := [name for name in names if name.startswith("/") or ".." in name.split("/")]:
            self.archive.close()
            raise DataError(f"{path.name} has a member outside of itself: {outside[0]}")
        self.names = sorted(names)
        self.info = f"{'-'.join(path.name.split('-')[:2])}.dist-info"

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        self.archive.close()

    def text(self, name: str) -> bytes:
        """A small member as text. Raises DataError if it is missing or large."""
        try:
            if self.archive.getinfo(name).file_size > _MAX_TEXT:
                raise DataError(f"{self.path.name}: {name} has more than {_MAX_TEXT} bytes")
            with self.archive.open(name) as file:
                content = file.read(_MAX_TEXT + 1)
        except (KeyError, *_NO_WHEEL) as error:
            raise DataError(f"{self.path.name} is not a wheel of that name: {error}") from error
        if len(content) > _MAX_TEXT:  # the archive's directory states a smaller size
            raise DataError(f"{self.path.name}: {name} has more than {_MAX_TEXT} bytes")
        return content

    def metadata(self) -> bytes:
        """The METADATA file (PEP 658)."""
        return self.text(f"{self.info}/METADATA")

    def build_info(self) -> dict[str, Any]:
        """The build info in the wheel. Raises DataError if it is missing or malformed."""
        try:
            found = json.loads(self.text(BUILD_INFO))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.path.name}: {BUILD_INFO} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"{self.path.name}: {BUILD_INFO} is not a table")
        return found

    def record_errors(self) -> list[str]:
        """The errors of its RECORD; empty for a valid wheel."""
        record = f"{self.info}/RECORD"
        try:
            rows = list(csv.reader(io.StringIO(self.text(record).decode())))
        except (UnicodeDecodeError, csv.Error) as error:
            return [f"{record} cannot be read: {error}"]
        listed = {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}
        errors = [f"{name} is not listed" for name in self.names if name not in listed]
        errors += [f"{name} is listed and absent" for name in sorted(set(listed) - set(self.names))]
        for name in self.names:
            if name in listed and name != record:
                digest, size = self._digest(name)
                text = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
                if listed[name] != (f"sha256={text}", str(size)):
                    errors.append(f"{name} has another hash or size")
        return errors

    def digest(self) -> str:
        """sha256 of the members, without provenance and build number."""
        total = hashlib.sha256()
        for name in self.names:
            content = self._without_provenance(name)
            digest = self._digest(name)[0] if content is None else hashlib.sha256(content).digest()
            total.update(f"{name}\0".encode() + digest)
        return total.hexdigest()

    def sha256(self, name: str) -> str:
        """sha256 of a member. Raises DataError if it cannot be read."""
        return self._digest(name)[0].hex()

    def _without_provenance(self, name: str) -> bytes | None:
        """The part of a member that the digest covers; None for all of it."""
        if name == f"{self.info}/RECORD":
            return b""
        if name == f"{self.info}/WHEEL":
            return re.sub(rb"(?m)^(Build|Generator):.*\n", b"", self.text(name))
        if name == BUILD_INFO:
            kept = {key: value for key, value in self.build_info().items() if key not in PROVENANCE}
            return json.dumps(kept, sort_keys=True).encode()
        if name.startswith(f"{self.info}/sboms/") and name.endswith(".cdx.json"):
            return _bill_without_provenance(self.path.name, self.text(name))
        return None

    def _digest(self, name: str) -> tuple[bytes, int]:
        digest, size = hashlib.sha256(), 0
        try:
            for chunk in self._chunks(name):
                digest.update(chunk)
                size += len(chunk)
        except _NO_WHEEL as error:
            raise DataError(f"{self.path.name}: {name} cannot be read: {error}") from error
        return digest.digest(), size

    def _chunks(self, name: str) -> Iterator[bytes]:
        with self.archive.open(name) as file:
            while chunk := file.read(_CHUNK):
                yield chunk


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        total = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            total.update(chunk)
    return total.hexdigest()


def digest(path: Path) -> str:
    """`Contents.digest` of the wheel in a file."""
    with Contents(path) as contents:
        return contents.digest()


def headers(name: str, metadata: bytes) -> Message:
    """The headers of a METADATA. Raises DataError unless name and version match the wheel's file name."""
    try:
        found = HeaderParser().parsestr(metadata.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"the metadata in {name} is not UTF-8: {error}") from error
    distribution, version = name.split("-")[:2]
    if re.sub(r"[-_.]+", "_", str(found["Name"])).lower() != distribution.lower():
        raise DataError(f"the metadata in {name} is of {found['Name']}")
    if found["Version"] != version:
        raise DataError(f"the metadata in {name} is of version {found['Version']}")
    return found


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
    scratch = path.with_name(f".{name}.part")
    with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, _ in members:
            archive.writestr(entry, content[entry.filename])
    scratch.replace(path)
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
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            archive.writestr(_entry(name, dates[name]), data)
    return path


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


def _bill_without_provenance(name: str, text: bytes) -> bytes:
    try:
        bill = json.loads(text)
        bill.pop("serialNumber", None)
        bill["metadata"].pop("timestamp", None)
        component = bill["metadata"]["component"]
        component["properties"] = [each for each in component.get("properties", []) if each["name"] not in PROVENANCE]
        return json.dumps(bill, sort_keys=True).encode()
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{name}: its bill of materials cannot be read: {error!r}") from error
