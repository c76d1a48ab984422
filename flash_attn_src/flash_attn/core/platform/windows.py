"""Windows."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from flash_attn.core.platform.base import Platform

_HELD_SECONDS = 1.0  # how long another process may hold a file that is to be read or replaced
_Result = TypeVar("_Result")
_LONGEST_PATH = 32768  # characters, with the null character
# The class of display adapters: one numbered subkey for each installed adapter.
_ADAPTERS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
# The name of a card, not that of a GPU in a processor, such as AMD Radeon(TM) Graphics or AMD Radeon 780M Graphics.
_CARD = r"\b(RX|VII|PRO|HD|R9|R7|Vega)\b(?!.*Graphics)"
_MAKERS = ("Advanced Micro Devices", "AMD", "ATI", "NVIDIA")


class Windows(Platform):
    is_windows = True
    planner = "_ck_planner.dll"
    launcher = "_launcher*.pyd"
    gpu_libraries = ("amdhip64", "nvcuda.dll")
    cache_variable = "LOCALAPPDATA"
    has_kfd = False

    def default_caches(self) -> Path:
        return Path.home() / "AppData" / "Local"

    def replace(self, source: Path, target: Path) -> None:
        _patiently(lambda: source.replace(target))

    def read(self, path: Path) -> str:
        return _patiently(lambda: path.read_text(encoding="utf-8"))

    def libraries(self) -> list[str]:
        return sorted({path for path in _modules() if self.is_gpu_library(path)})

    def user(self) -> str:
        return os.environ.get("USERNAME", "")

    def owner(self, path: Path) -> tuple[str, str]:
        path.stat()
        return "", ""  # access is not decided by one user and one group here

    def available_mib(self) -> int:
        status = _MemoryStatus(size=ctypes.sizeof(_MemoryStatus))
        return int(status.available >> 20) if _kernel32().GlobalMemoryStatusEx(ctypes.byref(status)) else 0

    def emulator(self) -> str:
        return ""  # rocjitsu runs on Linux alone

    def gpu_driver(self) -> str:
        """The driver of the adapter that counts: among those that are there, AMD's first, a card before the GPU of a
        processor. The key of an adapter stays in the registry when the card is taken out.
        """
        adapters = list(_adapters())
        attached = _attached()
        there = [adapter for adapter in adapters if adapter.key.lower() in attached] or adapters
        best = min(there, key=lambda adapter: (not adapter.of_amd, not re.search(_CARD, adapter.name)), default=None)
        return f"{best.version} ({best.name})" if best else ""


class _Adapter(NamedTuple):
    """A display adapter, as the registry has it."""

    key: str
    maker: str
    version: str
    name: str

    @property
    def of_amd(self) -> bool:
        return not self.maker.startswith("NVIDIA")


def _adapters() -> Iterator[_Adapter]:
    """The display adapters of AMD and NVIDIA that have or had a driver."""
    import winreg

    registry: Any = winreg  # the types of the module are known on Windows alone
    with suppress(OSError), registry.OpenKey(registry.HKEY_LOCAL_MACHINE, _ADAPTERS) as adapters:
        for index in range(registry.QueryInfoKey(adapters)[0]):
            key = registry.EnumKey(adapters, index)
            with suppress(OSError), registry.OpenKey(adapters, key) as adapter:
                values = ("ProviderName", "DriverVersion", "DriverDesc")
                card = _Adapter(key, *(str(registry.QueryValueEx(adapter, value)[0]) for value in values))
                if card.maker.startswith(_MAKERS):
                    yield card


def _attached() -> set[str]:
    """The keys below _ADAPTERS of the adapters that Windows lists now."""
    user32 = ctypes.WinDLL("user32", use_last_error=True)  # type: ignore[attr-defined]
    device = _DisplayDevice(size=ctypes.sizeof(_DisplayDevice))
    keys: set[str] = set()
    number = 0
    while user32.EnumDisplayDevicesW(None, number, ctypes.byref(device), 0):
        keys.add(str(device.key).rpartition("\\")[2].lower())
        number += 1
    return keys


class _DisplayDevice(ctypes.Structure):
    """DISPLAY_DEVICEW."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("name", ctypes.c_wchar * 32),
        ("text", ctypes.c_wchar * 128),
        ("flags", ctypes.c_uint32),
        ("identity", ctypes.c_wchar * 128),
        ("key", ctypes.c_wchar * 128),
    )


def _patiently(act: Callable[[], _Result]) -> _Result:
    """Does what needs a file that another process may hold for a short while."""
    deadline = time.monotonic() + _HELD_SECONDS
    while time.monotonic() < deadline:
        with suppress(PermissionError):
            return act()
        time.sleep(0.01)
    return act()


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("further", ctypes.c_uint64 * 5),
    )


def _kernel32() -> Any:
    return ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined]


def _modules() -> list[str]:
    """The paths of all files that are loaded into this process. Raises OSError if the system does not list them."""
    kernel32 = _kernel32()
    kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    kernel32.K32EnumProcessModules.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
    kernel32.GetModuleFileNameW.argtypes = (ctypes.c_void_p, ctypes.c_wchar_p, ctypes.c_uint32)
    process, needed = kernel32.GetCurrentProcess(), ctypes.c_uint32()
    modules = (ctypes.c_void_p * 0)()
    while True:
        size = ctypes.sizeof(modules)
        if not kernel32.K32EnumProcessModules(process, ctypes.byref(modules), size, ctypes.byref(needed)):
            raise ctypes.WinError(ctypes.get_last_error())  # type: ignore[attr-defined]
        if needed.value <= size:
            break
        modules = (ctypes.c_void_p * (needed.value // ctypes.sizeof(ctypes.c_void_p)))()
    text = ctypes.create_unicode_buffer(_LONGEST_PATH)
    paths = []
    for module in modules[: needed.value // ctypes.sizeof(ctypes.c_void_p)]:
        kernel32.GetModuleFileNameW(module, text, _LONGEST_PATH)
        paths.append(text.value)
    return paths
