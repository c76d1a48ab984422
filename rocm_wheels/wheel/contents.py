"""The contents of a wheel: read once with limits, checked against RECORD, hashed.

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
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import Any

from rocm_wheels.errors import DataError

BUILD_INFO = "flash_attn/_build_info.json"
STORES = "flash_attn/_kernels/"  # the directory of the kernel stores
PROVENANCE = ("commit", "release")  # provenance in the build info: not part of the contents
_MAX_TEXT = 1 << 20  # limit for METADATA, WHEEL and build info; real ones have a few KiB
_MAX_MEMBERS = 10_000
_CHUNK = 1 << 20
_NO_WHEEL = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """A wheel in a file, read once by `read`.

    size: bytes. sha256: of the file. metadata, record: its METADATA and RECORD. build_info: None for the wheel of an
    interface, which has none. contents: `Contents.digest`. stores: GPU target -> sha256 of its kernel store.
    record_errors: empty for a valid wheel.
    """

    path: Path
    size: int
    sha256: str
    metadata: bytes
    record: bytes
    build_info: Mapping[str, Any] | None
    contents: str
    stores: Mapping[str, str]
    record_errors: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def commit(self) -> str:
        """The commit that it was built from, "" if it names none."""
        return str((self.build_info or {}).get("commit") or "")


def read(path: Path) -> WheelFile:
    """The wheel in a file. Raises DataError for a file that is not a wheel, or that would exhaust memory."""
    with Contents(path) as opened:
        return WheelFile(
            path=path,
            size=path.stat().st_size,
            sha256=file_sha256(path),
            metadata=opened.metadata(),
            record=opened.text(f"{opened.info}/RECORD"),
            build_info=opened.build_info() if BUILD_INFO in opened.names else None,
            contents=opened.digest(),
            stores={PurePosixPath(name).stem: opened.sha256(name) for name in opened.names if _is_store(name)},
            record_errors=tuple(opened.record_errors()),
        )


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
        self._digests: dict[str, tuple[bytes, int]] = {}
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
            info = json.loads(self.text(BUILD_INFO))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.path.name}: {BUILD_INFO} is not JSON: {error}") from error
        if not isinstance(info, dict):
            raise DataError(f"{self.path.name}: {BUILD_INFO} is not a table")
        return info

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
        """sha256 and size in bytes of a member, which is read once."""
        if name in self._digests:
            return self._digests[name]
        digest, size = hashlib.sha256(), 0
        try:
            for chunk in self._chunks(name):
                digest.update(chunk)
                size += len(chunk)
        except _NO_WHEEL as error:
            raise DataError(f"{self.path.name}: {name} cannot be read: {error}") from error
        self._digests[name] = digest.digest(), size
        return self._digests[name]

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


def _is_store(name: str) -> bool:
    return name.startswith(STORES) and name.endswith(".zip")


def headers(name: str, metadata: bytes) -> Message:
    """The headers of a METADATA. Raises DataError unless name and version match the wheel's file name."""
    try:
        message = HeaderParser().parsestr(metadata.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"the metadata in {name} is not UTF-8: {error}") from error
    distribution, version = name.split("-")[:2]
    if re.sub(r"[-_.]+", "_", str(message["Name"])).lower() != distribution.lower():
        raise DataError(f"the metadata in {name} is of {message['Name']}")
    if message["Version"] != version:
        raise DataError(f"the metadata in {name} is of version {message['Version']}")
    return message


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
