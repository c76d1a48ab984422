"""The operating systems that wheels are for. Another system is another row of PLATFORMS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One operating system.

    tag: the platform tag of a wheel when it is assembled. launcher: file name of the launcher in the package.
    backends: the backends that a wheel can have there, the default first.
    """

    name: str
    tag: str
    launcher: str
    backends: tuple[str, ...]


# What a build does for every system.
STEPS = ("check", "compile", "assemble", "repair", "verify")
PLATFORMS: Mapping[str, Platform] = MappingProxyType(
    {
        platform.name: platform
        for platform in (
            Platform(name="linux", tag="linux_x86_64", launcher="_launcher.abi3.so", backends=("ck", "triton")),
            Platform(name="windows", tag="win_amd64", launcher="_launcher.pyd", backends=("triton",)),
        )
    }
)
DEFAULT = "linux"  # builds run on Linux alone, so this is the system of the machine
ALL = "all"  # in place of a system: a wheel for each


def platform_of(filename: str) -> Platform:
    """The system of a wheel, by its file name. A wheel for Linux has one of several tags after its repair."""
    others = (platform for platform in PLATFORMS.values() if filename.endswith(f"-{platform.tag}.whl"))
    return next(others, PLATFORMS[DEFAULT])
