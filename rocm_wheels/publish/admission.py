"""Decides whether a wheel may be published. It recomputes the facts from the wheel, because a test report can claim
anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rocm_wheels.errors import DataError, PublishFailed, RepairFailed
from rocm_wheels.matrix import names
from rocm_wheels.matrix.names import ParsedWheel
from rocm_wheels.matrix.targets import CUDA
from rocm_wheels.publish.links import Wheel
from rocm_wheels.wheel import windows
from rocm_wheels.wheel.contents import BUILD_INFO, WheelFile

_PLATFORM = re.compile(r"manylinux(_\d+_\d+|2014)_(x86_64|aarch64)|win_amd64")
_AGAIN = "Build it again: ./build_rocm.sh"
COMMIT_REMEDY = "Check out the commit of the release, without changes, and build there."


def check(file: WheelFile, wheel: Wheel, *, commit: str | None) -> None:
    """Raises PublishFailed unless the wheel matches its test report and is for AMD GPUs, from that commit.

    commit: None accepts every commit.
    """
    parsed = names.parse(wheel.name)
    check_platforms(wheel.name, parsed.platforms)
    if wheel.platform == "windows":
        _check_windows(file, parsed)
    verdict = wheel.verdict
    if file.build_info is None:
        raise DataError(f"{wheel.name} has no {BUILD_INFO}", remedy=_AGAIN)
    targets = tuple(sorted({*map(str, file.build_info.get("targets") or ()), *file.stores}))
    if foreign := [target for target in (*targets, *verdict.targets) if CUDA.fullmatch(target)]:
        raise PublishFailed(
            f"{wheel.name} is for {', '.join(dict.fromkeys(foreign))}: wheels for NVIDIA GPUs are never published",
            remedy="Build it for AMD GPUs alone: PYTORCH_ROCM_ARCH.",
        )
    facts = (
        ("the file name", file.name, verdict.wheel),
        ("the size", file.size, verdict.size),
        ("the targets", targets, tuple(sorted(verdict.targets))),
        ("the commit", file.commit, verdict.commit),
        ("the contents", file.contents, verdict.contents),
    )
    for what, actual, claimed in facts:
        if actual != claimed:
            raise PublishFailed(
                f"{wheel.name}: {what} in its verdict, {claimed!r}, is not the wheel's, {actual!r}", remedy=_AGAIN
            )
    _check_record(file)
    if commit is not None and verdict.commit != commit:
        raise PublishFailed(
            f"{wheel.name} was built from commit {verdict.commit or 'unknown'}, the release is of {commit}",
            remedy=f"Check out {commit} and build it there.",
        )


def check_interface(file: WheelFile, wheels: Iterable[Wheel]) -> None:
    """Raises PublishFailed unless the wheel of an interface was tested together with a wheel of the same label."""
    _check_record(file)
    label = file.name.split("-")[1].partition("+")[2]
    same = [wheel for wheel in wheels if wheel.version.partition("+")[2] == label]
    if not any(wheel.verdict.beside.get(file.name) == file.contents for wheel in same):
        raise PublishFailed(
            f"no verdict says that {file.name} was tested",
            remedy=f"Test it with a wheel of {label} in the same directory: `python -m rocm_wheels verify`.",
        )


def _check_windows(file: WheelFile, parsed: ParsedWheel) -> None:
    """Raises PublishFailed for a wheel for Windows that is not the universal one, or that Windows could not load."""
    if parsed.torch_minor:
        raise PublishFailed(f"{file.name} is for one torch: for Windows there is the universal wheel alone")
    try:
        windows.check(file.path)
    except RepairFailed as error:
        raise PublishFailed(error.message, remedy=_AGAIN) from error


def _check_record(file: WheelFile) -> None:
    if file.record_errors:
        raise PublishFailed(f"RECORD of {file.name} is wrong: {'; '.join(file.record_errors[:5])}", remedy=_AGAIN)


def check_platforms(name: str, platforms: Iterable[str]) -> None:
    """Raises PublishFailed for a wheel for Linux that is not repaired to manylinux."""
    if others := [platform for platform in platforms if not _PLATFORM.fullmatch(platform)]:
        raise PublishFailed(
            f"{name} is not repaired: it is for {', '.join(others)}",
            remedy="`build` repairs it to manylinux: publish what that leaves.",
        )
