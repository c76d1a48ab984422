"""Which wheel is installed: its label, and a digest of its contents that a report can be checked by."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from flash_attn.core import build_info

# Files that installers add or change.
_NOT_OF_THE_WHEEL = (".dist-info/INSTALLER", ".dist-info/REQUESTED", ".dist-info/direct_url.json", ".dist-info/RECORD")


def facts() -> dict[str, Any]:
    """{"version", "label", "backend", "targets", "contents", "sha256", "damaged"}.

    contents: digest of the files of the wheel, "" where flash_attn is no installed wheel. sha256: of the wheel's file,
    where the installer wrote it down, else "". damaged: files that are not what the wheel brought.
    """
    build = build_info.load()
    fields: dict[str, Any] = {
        "version": build.version,
        "label": build.label,
        "backend": build.backend,
        "targets": list(build.targets),
    }
    try:
        distribution = metadata.distribution("flash_attn")
        record = distribution.read_text("RECORD") or ""
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return fields | {"contents": "", "sha256": "", "damaged": []}
    installed = bool(build.targets) and _is_imported(distribution)
    hashes = origin.get("archive_info", {}).get("hashes", {})
    return fields | {
        "contents": contents(record) if installed else "",
        "sha256": hashes.get("sha256", "") if installed else "",
        "damaged": _damaged(distribution, record) if installed else [],
    }


def contents(record: str) -> str:
    """The digest of a wheel's contents, by the text of its RECORD or by what an installer made of that."""
    lines = sorted(f"{path},{digest}" for path, digest in _files(record))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def repository() -> str:
    """The address of the repository that the wheel was built from, or "" if its metadata does not name it."""
    try:
        urls = metadata.metadata("flash_attn").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    named = dict(url.split(", ", 1) for url in urls if ", " in url)
    return str(named.get("Repository", "")).rstrip("/")


def _files(record: str) -> Iterable[tuple[str, str]]:
    for path, digest, *_ in csv.reader(record.splitlines()):
        if digest and not path.endswith((".pyc", *_NOT_OF_THE_WHEEL)):
            yield path, digest


def _is_imported(distribution: metadata.Distribution) -> bool:
    """Whether the imported package is the installed one, not a copy that shadows it."""
    return str(distribution.locate_file("flash_attn/diagnosis/selftest/wheel.py")) == __file__


def _damaged(distribution: metadata.Distribution, record: str) -> list[str]:
    damaged = []
    for path, digest in _files(record):
        try:
            with open(str(distribution.locate_file(path)), "rb") as file:  # noqa: PTH123 - of a SimplePath
                sha256 = hashlib.sha256(file.read()).digest()
        except OSError:
            sha256 = b""
        if digest != "sha256=" + base64.urlsafe_b64encode(sha256).rstrip(b"=").decode():
            damaged.append(path)
    return damaged
