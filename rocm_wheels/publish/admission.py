"""Decides whether a wheel may be published. It recomputes the facts from the wheel, because a test report can claim
anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from rocm_wheels.errors import PublishFailed
from rocm_wheels.matrix import names
from rocm_wheels.matrix.targets import CUDA
from rocm_wheels.publish.links import Wheel
from rocm_wheels.wheel.contents import Contents

_PLATFORM = re.compile(r"manylinux(_\d+_\d+|2014)_(x86_64|aarch64)")
_AGAIN = "Build it again: ./build_rocm.sh"
COMMIT_REMEDY = "Check out the commit of the release, without changes, and build there."


def check(path: Path, wheel: Wheel, *, commit: str | None) -> None:
    """Raises PublishFailed unless the wheel matches its test report and is for AMD GPUs on Linux, from that commit.

    commit: None accepts every commit.
    """
    check_platforms(wheel.name, names.parse(wheel.name).platforms)
    verdict = wheel.verdict
    with Contents(path) as contents:
        info = contents.build_info()
        stores = {Path(name).stem for name in contents.names if re.fullmatch(r"flash_attn/_kernels/[^/]+\.zip", name)}
        targets = tuple(sorted({*map(str, info.get("targets") or ()), *stores}))
        if foreign := [target for target in (*targets, *verdict.targets) if CUDA.fullmatch(target)]:
            raise PublishFailed(
                f"{wheel.name} is for {', '.join(dict.fromkeys(foreign))}: wheels for NVIDIA GPUs are never published",
                remedy="Build it for AMD GPUs alone: PYTORCH_ROCM_ARCH.",
            )
        facts = (
            ("the file name", wheel.name, verdict.wheel),
            ("the size", path.stat().st_size, verdict.size),
            ("the targets", targets, tuple(sorted(verdict.targets))),
            ("the commit", info.get("commit") or "", verdict.commit),
            ("the contents", contents.digest(), verdict.contents),
        )
        wrong = contents.record_errors()
    for what, found, claimed in facts:
        if found != claimed:
            raise PublishFailed(
                f"{wheel.name}: {what} in its verdict, {claimed!r}, is not the wheel's, {found!r}", remedy=_AGAIN
            )
    if wrong:
        raise PublishFailed(f"RECORD of {wheel.name} is wrong: {'; '.join(wrong[:5])}", remedy=_AGAIN)
    if commit is not None and verdict.commit != commit:
        raise PublishFailed(
            f"{wheel.name} was built from commit {verdict.commit or 'unknown'}, the release is of {commit}",
            remedy=f"Check out {commit} and build it there.",
        )


def check_interface(path: Path, wheels: Iterable[Wheel]) -> None:
    """Raises PublishFailed unless the wheel of an interface was tested together with a wheel of the same label."""
    label = path.name.split("-")[1].partition("+")[2]
    with Contents(path) as contents:
        digest, wrong = contents.digest(), contents.record_errors()
    if wrong:
        raise PublishFailed(f"RECORD of {path.name} is wrong: {'; '.join(wrong[:5])}", remedy=_AGAIN)
    same = [wheel for wheel in wheels if wheel.version.partition("+")[2] == label]
    if not any(wheel.verdict.beside.get(path.name) == digest for wheel in same):
        raise PublishFailed(
            f"no verdict says that {path.name} was tested",
            remedy=f"Test it with a wheel of {label} in the same directory: `python -m rocm_wheels verify`.",
        )


def check_platforms(name: str, platforms: Iterable[str]) -> None:
    """Raises PublishFailed for a wheel that is not repaired to manylinux."""
    if others := [platform for platform in platforms if not _PLATFORM.fullmatch(platform)]:
        raise PublishFailed(
            f"{name} is not repaired: it is for {', '.join(others)}",
            remedy="`build` repairs it to manylinux: publish what that leaves.",
        )
