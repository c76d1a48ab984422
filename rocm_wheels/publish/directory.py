"""The wheels in a directory, each read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.publish.links import InterfaceWheel, Wheel, interface_link, wheel_link
from rocm_wheels.wheel import contents, verdict
from rocm_wheels.wheel.contents import WheelFile


@dataclass(frozen=True, kw_only=True)
class Directory:
    """The wheels of flash_attn and of its interfaces in a directory. The URL of a wheel is its file name.

    files: file name -> the wheel in that file.
    """

    wheels: tuple[Wheel, ...]
    interfaces: tuple[InterfaceWheel, ...]
    files: Mapping[str, WheelFile]


def read(path: Path) -> Directory:
    """Reads all wheels in a directory.

    Raises DataError if it holds none, or if a wheel is not one of ours, has no test report, failed its tests, or has a
    report about other bytes.
    """
    if not path.is_dir():
        raise DataError(f"{path} is not a directory", remedy="Give the one that holds the wheels.")
    # A universal wheel without its label is derived from the wheel with it and has no test report of its own.
    paths = sorted(each for each in path.glob("*.whl") if not names.is_unlabelled(each.name))
    verdicts = {wheel.name: _verdict_of(wheel) for wheel in paths if not names.is_interface(wheel.name)}
    if not verdicts:
        raise DataError(f"{path} holds no wheel", remedy="Build one: ./build_rocm.sh 2.8.3 3.11 2.5.1 6.2")
    files = {wheel.name: contents.read(wheel) for wheel in paths}
    wheels = [
        wheel_link(name, files[name].sha256, files[name].size, files[name].metadata, report, url=name, release="")
        for name, report in verdicts.items()
    ]
    interfaces = [
        interface_link(name, file.sha256, file.metadata, url=name, release="")
        for name, file in files.items()
        if names.is_interface(name)
    ]
    return Directory(wheels=tuple(sorted(wheels)), interfaces=tuple(interfaces), files=files)


def _verdict_of(wheel: Path) -> verdict.Verdict:
    """The test report next to a wheel. Raises DataError if there is none, or if the wheel failed its tests."""
    written = wheel.with_name(wheel.name + VERDICT)
    if not written.is_file():
        raise DataError(f"{wheel.name} has no verdict", remedy="`build` writes it beside the wheel: copy both.")
    report = verdict.read(written)
    if not report.ok:
        raise DataError(f"{wheel.name} did not pass its tests", remedy=f"See {written.name}.")
    return report
