"""The operating systems that wheels are for. Another system is another row of PLATFORMS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One operating system.

    tag: the platform tag of a wheel when it is assembled. launcher: file name of the launcher in the package. steps:
    what a build on Linux can do for this system.
    """

    name: str
    tag: str
    launcher: str
    steps: tuple[str, ...]


_STEPS = ("check", "compile", "assemble", "repair")
PLATFORMS: Mapping[str, Platform] = MappingProxyType(
    {
        platform.name: platform
        for platform in (
            Platform(name="linux", tag="linux_x86_64", launcher="_launcher.abi3.so", steps=(*_STEPS, "verify")),
            Platform(name="windows", tag="win_amd64", launcher="_launcher.pyd", steps=_STEPS),
        )
    }
)
DEFAULT = "linux"
