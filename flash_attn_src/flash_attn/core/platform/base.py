"""The contract of an operating system."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# What PowerShell and cmd both take as a program's path without quotes.
_PLAIN_PATH = re.compile(r"[\w:\\./~-]+")


def in_powershell(program: str) -> str:
    """The path of a program as a command. PowerShell takes a text in quotes as a command after `&` alone."""
    return program if _PLAIN_PATH.fullmatch(program) else f'& "{program}"'


@dataclass(frozen=True)
class LaunchLimit:
    """The longest time that one launch should take, and who ends a longer task: the beginning of a sentence."""

    seconds: float
    cause: str


class Platform(ABC):
    """One operating system: its names of files, and what it tells about this process and its user.

    planner: file name of the library that plans launches of Composable Kernel. launcher: pattern of the file names that
    the launcher module can have. gpu_libraries: parts of the file names of the GPU runtimes, HIP's first.
    cache_variable: environment variable with the user's cache directory. is_windows: for texts that name commands.
    """

    is_windows = False
    planner: str
    launcher: str
    gpu_libraries: tuple[str, ...]
    cache_variable: str

    @property
    def python(self) -> str:
        """How messages start the running Python. A portable Python of Windows is not in PATH."""
        return in_powershell(sys.executable) if self.is_windows else "python"

    @property
    def hip_library(self) -> str:
        """The part of the file name of a HIP runtime."""
        return self.gpu_libraries[0]

    def cache_directory(self, env: Mapping[str, str]) -> Path:
        """Where flash_attn keeps its measurements.

        Raises RuntimeError for a user without a home, such as the bare number of a container's user.
        """
        return Path(env.get(self.cache_variable) or self.default_caches()) / "flash_attn"

    def is_gpu_library(self, path: str) -> bool:
        """Whether a file is a GPU runtime, by its name."""
        name = path.replace("\\", "/").rpartition("/")[2].lower()
        return any(part in name for part in self.gpu_libraries)

    @property
    @abstractmethod
    def has_kfd(self) -> bool:
        """Whether GPUs are reached through the device file /dev/kfd."""

    def launch_limit(self, screen: str | None) -> LaunchLimit | None:  # noqa: ARG002 - Linux reads it
        """The limit of a GPU, None for none. Windows has one, also for a program in WSL.

        screen: as in `protocol.Gpu`; "" stands for all GPUs.
        """
        return None if self.has_kfd else LaunchLimit(0.5, "Windows resets a GPU whose kernel runs for two seconds")

    def mes_firmware(self) -> dict[str, int]:
        """The targets of the GPUs that tell the version of their scheduler's firmware (MES), and these versions."""
        return {}

    @abstractmethod
    def default_caches(self) -> Path:
        """The user's cache directory if the environment names none. Raises RuntimeError for a user without a home."""

    @abstractmethod
    def replace(self, source: Path, target: Path) -> None:
        """Moves a file to a path that may exist. Raises OSError; PermissionError if the system refuses to replace a
        file that another process has open."""

    @abstractmethod
    def read(self, path: Path) -> str:
        """The text of a file. Raises OSError; PermissionError if another process keeps the file to itself, such as a
        scanner of Windows."""

    @abstractmethod
    def libraries(self) -> list[str]:
        """The paths of the GPU runtimes in this process, sorted. A link counts as the file that it leads to."""

    @abstractmethod
    def user(self) -> str:
        """The user of this process and the groups that matter for the access to a GPU."""

    @abstractmethod
    def owner(self, path: Path) -> tuple[str, str]:
        """(user, group) that a file belongs to. Raises OSError for a file that does not exist."""

    @abstractmethod
    def available_mib(self) -> int:
        """The memory that programs can get, in MiB; 0 if the system does not tell."""

    @abstractmethod
    def emulator(self) -> str:
        """The name of the emulator that stands for the GPU in this process: "rocjitsu"; "" if there is none."""

    @abstractmethod
    def gpu_driver(self) -> str:
        """The version of the GPU's driver, with the GPU's name if the system tells it; "" if it tells neither."""
