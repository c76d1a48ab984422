"""Linux."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_attn.core.platform.base import LaunchLimit, Platform

_WSL_GPU = Path("/dev/dxg")  # the device of WSL (Linux in Windows) that replaces /dev/kfd
_MAPS = Path("/proc/self/maps")
_MEMORY = Path("/proc/meminfo")
_LOCKUP = Path("/sys/module/amdgpu/parameters/lockup_timeout")
_LONG_LOCKUP = 10  # seconds: the default for years, which no report blames
_DRM = Path("/sys/class/drm")
_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_EMULATOR = "rocjitsu"  # AMD's; it puts its library, librocjitsu.so or librocjitsu_kmd.so, into LD_PRELOAD
_DRIVERS = (Path("/sys/module/amdgpu/version"), Path("/proc/driver/nvidia/version"))


class Linux(Platform):
    planner = "_ck_planner.so"
    launcher = "_launcher*.so"
    gpu_libraries = ("libamdhip64", "libcuda.so")
    cache_variable = "XDG_CACHE_HOME"

    @property
    def has_kfd(self) -> bool:
        return not _WSL_GPU.exists()

    def launch_limit(self, screen: str | None) -> LaunchLimit | None:
        """A GPU whose screen waits longer than amdgpu's lockup_timeout is reset. Before kernel 7 that was 10 s."""
        seconds = _lockup_seconds(_read(_LOCKUP).strip("\0\n "), os.uname().release)
        if not self.has_kfd or screen is None or not 0 < seconds < _LONG_LOCKUP:
            return super().launch_limit(screen)
        waiting = ", ".join(address for address in _screens() if screen in ("", address))
        cause = f"The driver amdgpu resets a GPU ({waiting}) whose screen waits for {seconds:g} s (lockup_timeout)"
        return LaunchLimit(min(seconds / 4, 0.5), cause) if waiting else None

    def mes_firmware(self) -> dict[str, int]:
        """amdgpu has it as a file of each GPU, in hexadecimal, since a change of July 2023 (amdgpu_ucode.c)."""
        versions = {}
        for path in sorted(_NODES.glob("*/properties")):
            node = dict(line.split(maxsplit=1) for line in _read(path).splitlines())
            text = _read(_DRM / f"renderD{node.get('drm_render_minor')}" / "device/fw_version/mes_fw_version")
            (major, rest), text = divmod(int(node.get("gfx_target_version", 0)), 10000), text.strip()
            if major and text:
                versions[f"gfx{major}{rest // 100:x}{rest % 100:x}"] = int(text, 16)
        return versions

    def default_caches(self) -> Path:
        return Path.home() / ".cache"

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def read(self, path: Path) -> str:
        return path.read_text(encoding="utf-8")

    def libraries(self) -> list[str]:
        return sorted({str(Path(path).resolve()) for path in _mapped() if self.is_gpu_library(path)})

    def emulator(self) -> str:
        return _EMULATOR if any(Path(path).name.startswith(f"lib{_EMULATOR}") for path in _mapped()) else ""

    def user(self) -> str:
        groups = ", ".join(_group(number) for number in os.getgroups())
        return f"{_user(os.getuid())}, {f'groups {groups}' if groups else 'in no further group'}"

    def owner(self, path: Path) -> tuple[str, str]:
        status = path.stat()
        return _user(status.st_uid), _group(status.st_gid)

    def available_mib(self) -> int:
        for line in _read(_MEMORY).splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) >> 10
        return 0

    def gpu_driver(self) -> str:
        return next((text.splitlines()[0].strip() for path in _DRIVERS if (text := _read(path).strip())), "")


def _lockup_seconds(setting: str, release: str) -> float:
    """How long a job of graphics may take. Negative: for ever.

    setting: lockup_timeout in ms, for all queues or for graphics, compute, copies and video. 0, or nothing, is the
    default of the kernel's release (amdgpu_drv.c, amdgpu_device.c).
    """
    try:
        milliseconds = int(setting.split(",")[0], 0)
    except ValueError:
        milliseconds = 0
    newer = int(release.split(".")[0]) >= 7
    return (milliseconds or (2000 if newer else 10000)) / 1000


def _screens() -> list[str]:
    """The PCI addresses of amdgpu's GPUs with a screen. A virtual GPU has connectors without one."""
    connectors = [path.parent for path in sorted(_DRM.glob("card*-*/status")) if _read(path).strip() == "connected"]
    cards = {_DRM / path.name.partition("-")[0] / "device" for path in connectors if "-Virtual-" not in path.name}
    return sorted(card.resolve().name for card in cards if (card / "driver").resolve().name == "amdgpu")


def _mapped() -> set[str]:
    """The files that are mapped into this process."""
    lines = (line.split(maxsplit=5) for line in _read(_MAPS).splitlines())
    return {fields[5] for fields in lines if len(fields) == 6}


def _user(number: int) -> str:
    import pwd

    return _name(pwd.getpwuid, number)


def _group(number: int) -> str:
    import grp

    return _name(grp.getgrgid, number)


def _name(lookup: Callable[[int], Any], number: int) -> str:
    """The name of a user or a group. A container may have none for the number, which then stands for it."""
    try:
        return str(lookup(number)[0])
    except KeyError:
        return str(number)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
