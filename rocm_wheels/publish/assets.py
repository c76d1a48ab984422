"""What a release should hold: the files of a directory, checked before anything is sent."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rocm_wheels.errors import PublishFailed
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.matrix.targets import CUDA
from rocm_wheels.publish import catalogue
from rocm_wheels.publish.catalogue import METADATA, YANKED
from rocm_wheels.publish.entry import Wheel
from rocm_wheels.wheel.repair import MAX_BYTES

SUMS = "SHA256SUMS"
MAX_ASSETS = 1000  # of one GitHub release
# GitHub stores other characters as dots.
_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*[A-Za-z0-9_+-]")
_TYPES = {".whl": "application/zip", ".zip": "application/zip", ".json": "application/json"}


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A file to be in the release; `content` is where its bytes are, `final` that others rely on them."""

    name: str
    size: int
    sha256: str
    content: Path | bytes
    final: bool

    def open(self) -> IO[bytes]:
        return self.content.open("rb") if isinstance(self.content, Path) else io.BytesIO(self.content)

    @property
    def content_type(self) -> str:
        return _TYPES.get(Path(self.name).suffix, "text/plain")

    def is_there(self, there: Mapping[str, Any]) -> bool:
        """Whether GitHub's description is of this file; a digest that GitHub lacks is not held against it."""
        return (
            there["state"] == "uploaded"
            and there["size"] == self.size
            and catalogue.asset_sha256(there) in (self.sha256, None)
        )


def collect(dist: Path) -> tuple[list[Wheel], list[Asset]]:
    """The wheels of a directory and the assets they make, in the order to send them.

    A wheel's metadata, its verdict and the wheels of flash-attn-3 come before it, so that a wheel that is there is
    complete. PublishFailed or DataError for anything that must not be published, before anything is sent.
    """
    if not dist.is_dir():
        raise PublishFailed(f"{dist} is not a directory", remedy="Give --dist the directory with the wheels.")
    wheels = catalogue.from_directory(dist)
    assets = []
    for interface in catalogue.interfaces_in(dist):
        path = dist / interface.name
        assets.append(of_bytes(interface.name + METADATA, catalogue.core_metadata(path), final=True))
        assets.append(_of_file(path, final=True))
    for wheel in wheels:
        _check(wheel)
        path = dist / wheel.name
        assets += [
            of_bytes(wheel.name + METADATA, catalogue.core_metadata(path), final=True),
            _of_file(path.with_name(wheel.name + VERDICT), final=False),
            Asset(name=wheel.name, size=wheel.size, sha256=wheel.sha256, content=path, final=True),
        ]
    assets += [_of_file(path, final=False) for path in sorted(dist.glob("*.zip"))]
    _check_files(dist, {asset.name for asset in assets})
    _check_limits(assets)
    return wheels, assets


def of_bytes(name: str, content: bytes, *, final: bool) -> Asset:
    return Asset(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest(), content=content, final=final)


def sums(digests: Mapping[str, str]) -> Asset:
    """SHA256SUMS over name -> sha256, in the form that `sha256sum --check` reads."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items()) if name != SUMS]
    return of_bytes(SUMS, "".join(lines).encode(), final=False)


def _of_file(path: Path, *, final: bool) -> Asset:
    return Asset(
        name=path.name, size=path.stat().st_size, sha256=catalogue.file_sha256(path), content=path, final=final
    )


def _check(wheel: Wheel) -> None:
    if foreign := [target for target in wheel.targets if CUDA.fullmatch(target)]:
        raise PublishFailed(
            f"{wheel.name} is for {', '.join(foreign)}: wheels for NVIDIA GPUs are never published",
            remedy="Build it for AMD GPUs alone: PYTORCH_ROCM_ARCH.",
        )
    if "-linux_" in wheel.name:
        raise PublishFailed(f"{wheel.name} is not repaired", remedy="`build` repairs it: publish what that leaves.")


def _check_files(dist: Path, taken: set[str]) -> None:
    """Nothing in the directory is left behind in silence."""
    others = sorted(path.name for path in dist.iterdir() if path.name not in taken | {SUMS})
    if others:
        raise PublishFailed(
            f"{dist} holds what is no part of a release: {', '.join(others)}",
            remedy="A release is made of wheels, their verdicts and kernel stores (*.zip): move the rest away.",
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
    """PublishFailed if these and their sums are more assets than a release holds."""
    count = len({*names, SUMS})
    if count > MAX_ASSETS:
        raise PublishFailed(
            f"{count} assets do not fit: a release holds {MAX_ASSETS}",
            remedy="Publish them under two tags; the index joins all releases.",
        )


def yank(wheel: str, reason: str) -> Asset:
    """The asset that marks a wheel as yanked."""
    return of_bytes(wheel + YANKED, f"{reason}\n".encode(), final=False)
