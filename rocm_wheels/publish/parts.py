"""Checks by their contents whether kernel stores and the crate may be published with the wheels."""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from rocm_wheels import schema
from rocm_wheels.compile import manifest
from rocm_wheels.errors import PublishFailed
from rocm_wheels.matrix.targets import CUDA
from rocm_wheels.publish.admission import COMMIT_REMEDY
from rocm_wheels.wheel import contents
from rocm_wheels.wheel.contents import WheelFile

STORE = re.compile(r"(?:kernels-(?:ck|triton)-)?((?:gfx[0-9a-f-]+(?:generic)?|sm_\d+))\.zip")
CRATE = re.compile(r"candle-flash-rocm-\d+\.\d+\.\d+(?:-[0-9A-Za-z.]+)?\.crate")
_MAX_MEMBERS = 5000
_MAX_BYTES = 64 << 20  # limit of an unpacked crate in bytes
_COMMIT = schema.ObjectSchema({"sha1": schema.text(40, r"[0-9a-f]{40}")}, {"dirty": schema.one_of(True, False)})
_VCS = schema.ObjectSchema({"git": _COMMIT}, {"path_in_vcs": schema.text(200)})
_AGAIN = "Pack it again: candle-flash-rocm/check.sh"


def stores_of(wheels: Iterable[WheelFile]) -> dict[str, set[str]]:
    """GPU target -> the sha256 of its kernel stores in these wheels."""
    digests: dict[str, set[str]] = {}
    for wheel in wheels:
        for target, sha256 in wheel.stores.items():
            digests.setdefault(target, set()).add(sha256)
    return digests


def check_store(path: Path, known: Mapping[str, set[str]]) -> None:
    """Raises PublishFailed unless the store is, byte for byte, a member of a wheel that is published with it.

    So the attestation of the wheel covers the store too. Raises DataError for a file that is not a store.
    """
    match = STORE.fullmatch(path.name)
    if match is None:
        raise PublishFailed(
            f"{path.name} is no name of a kernel store",
            remedy="Name it after its GPU target: gfx942.zip, or kernels-triton-gfx942.zip.",
        )
    target = match[1]
    if CUDA.fullmatch(target):
        raise PublishFailed(f"{path.name} is for {target}: kernels for NVIDIA GPUs are never published")
    made = manifest.read(path)
    if made["target"] != target:
        raise PublishFailed(f"{path.name} is for {made['target']}", remedy=f"Name it {made['target']}.zip.")
    if contents.file_sha256(path) not in known.get(target, set()):
        raise PublishFailed(
            f"{path.name} is in none of the wheels, so nothing says which build made it",
            remedy=f"Take it out of a wheel of this release: unzip -j WHEEL {contents.STORES}{target}.zip",
        )
    if "base" not in made:
        manifest.check_code(path)


def check_crate(path: Path, *, commit: str | None) -> None:
    """Raises PublishFailed unless the file is the crate as `cargo package` makes it from that commit. commit: None
    accepts every commit.
    """
    if CRATE.fullmatch(path.name) is None:
        raise PublishFailed(f"{path.name} is no name of the crate", remedy=_AGAIN)
    top = path.name.removesuffix(".crate")
    try:
        with tarfile.open(path, "r:gz") as archive:
            made = _commit(path.name, archive, top)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        raise PublishFailed(f"{path.name} is no crate: {error}", remedy=_AGAIN) from error
    if commit is not None and made != commit:
        raise PublishFailed(
            f"{path.name} was packed at commit {made}, the release is of {commit}", remedy=COMMIT_REMEDY
        )


def _commit(name: str, archive: tarfile.TarFile, top: str) -> str:
    """The commit that a crate names. Raises PublishFailed for unexpected members."""
    size, vcs, manifests = 0, b"", 0
    for number, member in enumerate(archive):
        size += member.size
        parts = member.name.split("/")
        if not member.isfile() or parts[0] != top or ".." in parts or number > _MAX_MEMBERS or size > _MAX_BYTES:
            raise PublishFailed(f"{name} holds {member.name!r}, which is no file of the crate", remedy=_AGAIN)
        manifests += parts[1:] == ["Cargo.toml"]
        if parts[1:] == [".cargo_vcs_info.json"]:
            file: IO[bytes] | None = archive.extractfile(member)
            vcs = file.read(1 << 16) if file else b""
    if manifests != 1:
        raise PublishFailed(f"{name} has {manifests} manifests Cargo.toml, not one", remedy=_AGAIN)
    if not vcs:
        raise PublishFailed(f"{name} names no commit: it was packed outside of a checkout", remedy=_AGAIN)
    info: Any = schema.load(f".cargo_vcs_info.json of {name}", vcs, 1 << 16)
    if wrong := next(schema.problems(info, _VCS), None):
        raise PublishFailed(f"{name}: .cargo_vcs_info.json: {wrong}", remedy=_AGAIN)
    if info["git"].get("dirty"):
        raise PublishFailed(f"{name} was packed with changes that are not committed", remedy=COMMIT_REMEDY)
    return str(info["git"]["sha1"])
