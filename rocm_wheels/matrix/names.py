"""Labels and wheel names: `flash_attn-2.8.3+rocm62torch2.5triton-cp311-cp311-linux_x86_64.whl`, and for the universal
wheel `flash_attn-2.8.3+rocm-cp310-abi3-linux_x86_64.whl`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from dataclasses import dataclass
from functools import cache

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import Claim, Universal
from rocm_wheels.matrix.platforms import DEFAULT, PLATFORMS, platform_of
from rocm_wheels.matrix.versions import Interface

DISTRIBUTION = "flash_attn"
BUILT_PLATFORM = PLATFORMS[DEFAULT].tag  # the platform before repair
VERDICT = ".verdict.json"  # suffix of the test report of a wheel
EXAMPLE = f"{DISTRIBUTION}-2.8.3+rocm62torch2.5triton-cp311-cp311-{BUILT_PLATFORM}.whl"

METADATA = ".metadata"  # suffix of the copy of METADATA beside a wheel
_NUMBER = r"(?:0|[1-9][0-9]*)"
_TAG = re.compile(rf"v{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:\.post{_NUMBER}|(?P<candidate>rc{_NUMBER}))?")
_NIGHTLY = re.compile(r"nightly-[0-9]{8}")
_LABEL = re.compile(r"rocm(?P<rocm>\d+)torch(?P<torch>\d+\.\d+)(?P<backend>[a-z]*)")
_LABEL_BACKENDS = {"": "ck", "triton": "triton"}
UNIVERSAL_LABEL = "rocm"


@dataclass(frozen=True, kw_only=True)
class ParsedWheel:
    """The parts of a wheel's name. torch is a minor version ("2.5"), because the label holds no more.

    In the universal wheel, rocm and torch are "" and python is the oldest supported Python. backend: of the label, or
    the only backend that the system of the wheel has.
    """

    flash_attn: str
    python: str
    torch_minor: str
    rocm: str
    backend: str
    platforms: tuple[str, ...]
    build: int = 0


def local_label(cell: Claim) -> str:
    """The local version label: "rocm" for the universal wheel, else "rocm62torch2.5" or "rocm62torch2.5triton"."""
    if isinstance(cell, Universal):
        return UNIVERSAL_LABEL
    suffix = {backend: suffix for suffix, backend in _LABEL_BACKENDS.items()}[cell.backend]
    digits = cell.rocm.replace(".", "")
    if _rocm_by_digits().get(digits) != cell.rocm:
        raise DataError(
            f"ROCm {cell.rocm} has no label: the digits {digits} do not name it alone among the versions that exist",
            remedy='Add it to rocm_wheels/versions.toml as [rocm."major.minor"].',
        )
    return f"rocm{digits}torch{cell.torch_minor}{suffix}"


def parse_label(label: str) -> tuple[str, str, str]:
    """(rocm, torch minor, backend) of a local version label. Raises DataError for another label.

    The universal wheel's label names neither ROCm nor torch: both are "", and the backend is ck.
    """
    if label == UNIVERSAL_LABEL:
        return "", "", "ck"
    match = _LABEL.fullmatch(label)
    if match is None or match["backend"] not in _LABEL_BACKENDS:
        raise DataError(f"{label!r} is not a label of these wheels", remedy="A label reads rocm62torch2.5triton.")
    rocm = _rocm_by_digits().get(match["rocm"])
    if rocm is None:
        known = ", ".join(_rocm_by_digits().values())
        raise DataError(
            f"{label!r} names no ROCm that exists", remedy=f"A label reads rocm62torch2.5triton. ROCm: {known}."
        )
    return rocm, match["torch"], _LABEL_BACKENDS[match["backend"]]


@cache
def _rocm_by_digits() -> dict[str, str]:
    """Maps the digits in a label to the ROCm version: 62 is 6.2, 714 is 7.14, 101 is 10.1. A pattern cannot distinguish
    7.14 from 71.4, so a label is looked up among the versions that exist.
    """
    known = [(rocm.replace(".", ""), rocm) for rocm in versions.load().rocm]
    return {digits: rocm for digits, rocm in known if [other for other, _ in known].count(digits) == 1}


def version(cell: Claim) -> str:
    """The version in the wheel's metadata, with the label."""
    return f"{cell.flash_attn}+{local_label(cell)}"


def wheel_name(cell: Claim, platform: str = BUILT_PLATFORM) -> str:
    """The file name of the wheel for these versions and a platform tag."""
    return f"{DISTRIBUTION}-{version(cell)}-{cell.python_tag}-{cell.abi_tag}-{platform}.whl"


def interface_wheel_name(interface: Interface, cell: Claim) -> str:
    """The file name of the wheel of an interface that accompanies the wheel for these versions."""
    return f"{interface.name}-{interface.version}+{local_label(cell)}-py3-none-any.whl"


def is_interface(filename: str) -> bool:
    """Whether a file is the wheel of an interface, which accompanies the wheels with its label."""
    with contextlib.suppress(DataError):
        return bool(parse_interface(filename))
    return False


def parse_universal(filename: str) -> str | None:
    """The flash-attn version in a universal wheel's file name; None for every other name."""
    match = re.fullmatch(rf"{DISTRIBUTION}-([^-+]+)\+{UNIVERSAL_LABEL}-(?:\d[^-]*-)?cp\d+-abi3-[^-]+\.whl", filename)
    return match[1] if match else None


def is_wheel(filename: str) -> bool:
    """Whether a file is a wheel of flash_attn built from these sources."""
    with contextlib.suppress(DataError):
        return bool(parse(filename))
    return False


def parse_interface(filename: str) -> tuple[str, str, str, str]:
    """(distribution, rocm, torch minor, backend) of an interface's wheel. Raises DataError for another name."""
    known = "|".join(versions.load().interfaces)
    match = re.fullmatch(rf"({known})-[^-+]+\+([^-]+)(?:-[1-9]\d*)?-py3-none-any\.whl", filename)
    if match is None:
        raise DataError(f"{filename!r} is not a wheel of {known} that was built with these sources")
    return match[1], *parse_label(match[2])


def parse(filename: str) -> ParsedWheel:
    """The parts of a wheel's file name. Raises DataError for a name that `wheel_name` does not build."""
    from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

    try:
        name, full, build, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename as error:
        raise DataError(f"{filename!r} is not a wheel name: {error}", remedy=f"Expected: {EXAMPLE}") from error
    interpreters = {tag.interpreter for tag in tags}
    match = re.fullmatch(r"cp(\d)(\d+)", interpreters.pop()) if len(interpreters) == 1 else None
    if name != canonicalize_name(DISTRIBUTION) or full.local is None or any(build[1:]) or match is None:
        raise DataError(f"{filename!r} is not one of these wheels", remedy=f"Expected: {EXAMPLE}")
    rocm, torch_minor, backend = parse_label(full.local)
    served = platform_of(filename).backends
    return ParsedWheel(
        flash_attn=full.public,
        python=f"{match[1]}.{match[2]}",
        torch_minor=torch_minor,
        rocm=rocm,
        backend=backend if backend in served else served[0],
        platforms=tuple(sorted({tag.platform for tag in tags})),
        build=build[0] if build else 0,
    )


def unlabelled(filename: str) -> str | None:
    """The file name of a universal wheel without its label: "flash_attn-2.8.3-cp310-abi3-linux_x86_64.whl". None for
    the name of another wheel."""
    version_ = parse_universal(filename)
    return filename.replace(f"-{version_}+{UNIVERSAL_LABEL}-", f"-{version_}-", 1) if version_ else None


def labelled(filename: str) -> str:
    """The file name of the universal wheel that belongs to a name without label; every other name unchanged."""
    name = re.sub(r"^([^-]+-[^-]+)-", rf"\1+{UNIVERSAL_LABEL}-", filename)
    return name if unlabelled(name) == filename else filename


def owner(asset: str) -> str:
    """The wheel that a file of a release belongs to: its METADATA, its test report, the wheel without label, itself."""
    for suffix in (METADATA, VERDICT):
        asset = asset.removesuffix(suffix)
    return labelled(asset)


def is_unlabelled(filename: str) -> bool:
    """Whether a file is a universal wheel under its version without the label."""
    return labelled(filename) != filename


def stem(filename: str) -> str:
    """A wheel's name without build number and tags: "flash_attn-2.8.3+rocm62torch2.5triton-cp311". The wheel for
    another system than Linux has the system's name behind it.
    """
    parts, platform = filename.split("-"), platform_of(filename).name
    return "-".join((*parts[:2], *parts[-3:-2], *((platform,) if platform != DEFAULT else ())))


def build_number(filename: str) -> int:
    """The build number in a wheel's name (PEP 427), 0 if it has none."""
    parts = filename.split("-")
    return int(parts[2]) if len(parts) == 6 else 0


def release_tag(text: str) -> str:
    """The tag of a release, as a type for argparse, which reports any other text."""
    if not (_TAG.fullmatch(text) or is_nightly(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a release tag such as v1.2.3 or v1.2.3rc1")
    return text


def is_candidate(tag: str) -> bool:
    """Whether the tag is a release candidate. GitHub calls it a pre-release; no page links to it."""
    match = _TAG.fullmatch(tag)
    return is_nightly(tag) or (match is not None and match["candidate"] is not None)


def is_nightly(tag: str) -> bool:
    """Whether the tag is a candidate of a day, "nightly-20261129". It is deleted after a week, and no build number of
    another release depends on it.
    """
    return _NIGHTLY.fullmatch(tag) is not None
