"""What of flash_attn depends on the operating system. Nothing else in the package asks which system it runs on.

Another system is another row of PLATFORMS. Standard library only, and no module that only POSIX has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One operating system.

    planner: file name of the library that plans launches of Composable Kernel.
    launcher: pattern of the file names that the launcher module can have.
    hip_library: part of the path of a loaded HIP runtime.
    cache_variable: environment variable with the user's cache directory; caches: the directory below the user's home
    where the variable is not set.
    """

    planner: str
    launcher: str
    hip_library: str
    cache_variable: str
    caches: str

    def cache_directory(self, env: Mapping[str, str]) -> Path:
        """Where flash_attn keeps what it measured.

        Raises RuntimeError for a user without a home, such as the bare number of a container's user.
        """
        return Path(env.get(self.cache_variable) or Path.home() / self.caches) / "flash_attn"


PLATFORMS = {
    "linux": Platform(
        planner="_ck_planner.so",
        launcher="_launcher*.so",
        hip_library="libamdhip64",
        cache_variable="XDG_CACHE_HOME",
        caches=".cache",
    ),
}
# A system without a row has no wheels, and the package serves CPU tensors there by the names of Linux.
PLATFORM = PLATFORMS.get(sys.platform, PLATFORMS["linux"])
