"""The files that a release should hold. All are checked before any is sent."""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from rocm_wheels.errors import PublishFailed
from rocm_wheels.matrix import names
from rocm_wheels.matrix.names import METADATA, VERDICT
from rocm_wheels.publish import admission, catalogue, parts
from rocm_wheels.publish.directory import Directory
from rocm_wheels.publish.directory import read as read_directory
from rocm_wheels.wheel import contents, rewrite
from rocm_wheels.wheel.contents import WheelFile
from rocm_wheels.wheel.repair import MAX_BYTES

SUMS = "SHA256SUMS"
MAX_ASSETS = 1000  # limit of one GitHub release
# GitHub replaces other characters by dots.
_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*[A-Za-z0-9_+-]")
_TYPES = {
    ".whl": "application/zip",
    ".zip": "application/zip",
    ".json": "application/json",
    ".crate": "application/gzip",
}


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A file of the release. content: path of its bytes. final: whether other files rely on it, so that it must not
    change.
    """

    name: str
    size: int
    sha256: str
    content: Path | bytes
    final: bool

    def open(self) -> IO[bytes]:
        return self.content.open("rb") if isinstance(self.content, Path) else io.BytesIO(self.content)

    def renamed(self, name: str) -> Asset:
        return replace(self, name=name)

    @property
    def content_type(self) -> str:
        return _TYPES.get(Path(self.name).suffix, "text/plain")

    def is_there(self, there: Mapping[str, Any]) -> bool:
        """Whether the asset that GitHub describes is this file, by its digest."""
        return there["state"] == "uploaded" and catalogue.asset_sha256(there) == self.sha256


def collect(dist: Path, *, commit: str | None = None) -> tuple[Directory, list[Asset]]:
    """The wheels of a directory, and the assets for them, kernel stores and the crate, in the order in which they are
    sent.

    The wheels of interfaces, a wheel's metadata and test report, and the same wheel without label come before the
    wheel. So a wheel in a release is complete. Raises PublishFailed or DataError, before anything is sent, for anything
    that must not be published; with `commit` also for a wheel of another commit.
    """
    if not dist.is_dir():
        raise PublishFailed(f"{dist} is not a directory", remedy="Give --dist the directory with the wheels.")
    _check_regular(dist)
    directory = read_directory(dist)
    assets: list[Asset] = []
    for interface in directory.interfaces:
        admission.check_interface(directory.files[interface.name], directory.wheels)
        assets += _with_metadata(directory.files[interface.name])
    for wheel in directory.wheels:
        file = directory.files[wheel.name]
        admission.check(file, wheel, commit=commit)
        metadata, own = _with_metadata(file)
        assets += [
            *_unlabelled(file.path),
            metadata,
            _of_file(file.path.with_name(file.name + VERDICT), final=False),
            own,
        ]
    others = sorted((*dist.glob("*.zip"), *dist.glob("*.crate")))
    assets += [_of_file(path, final=True) for path in others]
    _check_files(dist, {asset.name for asset in assets})
    _check_derived(dist, assets)
    _check_limits(assets)
    stores = parts.stores_of(directory.files[wheel.name] for wheel in directory.wheels)
    for path in others:
        if path.suffix == ".crate":
            parts.check_crate(path, commit=commit)
        else:
            parts.check_store(path, stores)
    return directory, assets


def _with_metadata(file: WheelFile) -> tuple[Asset, Asset]:
    """The assets of a wheel's METADATA and of the wheel."""
    wheel = Asset(name=file.name, size=file.size, sha256=file.sha256, content=file.path, final=True)
    return of_bytes(file.name + METADATA, file.metadata, final=True), wheel


def _unlabelled(wheel: Path) -> list[Asset]:
    """A universal wheel under its version without the label, with its metadata.

    It is derived from the wheel and gives the same bytes each time, so it needs no test report and no attestation of
    its own.
    """
    if names.unlabelled(wheel.name) is None:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        path = rewrite.without_label(wheel, Path(scratch))
        metadata, own = _with_metadata(contents.read(path))
        return [metadata, replace(own, content=path.read_bytes())]


def of_bytes(name: str, content: bytes, *, final: bool) -> Asset:
    return Asset(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest(), content=content, final=final)


def sums(digests: Mapping[str, str]) -> Asset:
    """SHA256SUMS for name -> sha256, in the format that `sha256sum --check` reads."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items()) if name != SUMS]
    return of_bytes(SUMS, "".join(lines).encode(), final=False)


def _of_file(path: Path, *, final: bool) -> Asset:
    return Asset(name=path.name, size=path.stat().st_size, sha256=contents.file_sha256(path), content=path, final=final)


def _check_regular(dist: Path) -> None:
    """Raises PublishFailed for a link, which could lead to any file of this machine."""
    if others := sorted(path.name for path in dist.iterdir() if path.is_symlink() or not path.is_file()):
        raise PublishFailed(
            f"{dist} holds what is no regular file: {', '.join(others)}", remedy="Put copies of the files there."
        )


def _check_files(dist: Path, taken: set[str]) -> None:
    """Raises PublishFailed for a file in the directory that would not be published."""
    others = sorted(path.name for path in dist.iterdir() if path.name not in taken | {SUMS})
    if others:
        raise PublishFailed(
            f"{dist} holds what is no part of a release: {', '.join(others)}",
            remedy="A release has wheels, their verdicts, kernel stores (*.zip) and the crate: move the rest away.",
        )


def _check_derived(dist: Path, assets: Iterable[Asset]) -> None:
    """Raises PublishFailed for a file in the directory that differs from what its wheel gives: METADATA, or the wheel
    without its label. A release that was downloaded holds both.
    """
    for asset in assets:
        path = dist / asset.name
        if isinstance(asset.content, bytes) and path.is_file() and contents.file_sha256(path) != asset.sha256:
            raise PublishFailed(
                f"{path} is not what its wheel gives",
                remedy="Delete it: `publish` makes it from the wheel.",
            )


def _check_limits(assets: Iterable[Asset]) -> None:
    assets = list(assets)
    for asset in assets:
        if not _NAME.fullmatch(asset.name):
            raise PublishFailed(
                f"GitHub would rename {asset.name!r}", remedy="Use letters, digits, and . _ + - inside the name."
            )
        if not 0 < asset.size <= MAX_BYTES:
            raise PublishFailed(
                f"{asset.name} has {asset.size} bytes, an asset has 1 to {MAX_BYTES}",
                remedy="Build it for fewer GPU targets: PYTORCH_ROCM_ARCH." if asset.size else "Build it again.",
            )
    check_count(asset.name for asset in assets)


def check_count(names: Iterable[str]) -> None:
    """Raises PublishFailed if these assets and SHA256SUMS are more than a release can hold."""
    count = len({*names, SUMS})
    if count > MAX_ASSETS:
        raise PublishFailed(
            f"{count} assets do not fit: a release holds {MAX_ASSETS}",
            remedy="Publish them under two tags; the index joins all releases.",
        )
