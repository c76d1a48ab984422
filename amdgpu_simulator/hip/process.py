"""Runs Python with AMD's own HIP runtime on a mock driver with GPUs of a target (`kfd.c`), without an AMD GPU or ROCm.

python -m amdgpu_simulator.hip.process 6.4 gfx942 -m pytest flash_attn_src/tests/test_triton_backend.py --gfx gfx942

The words after the target are Python's arguments. The runtime is HIP and ROCr with their libraries, as Debian builds
them from AMD's sources. apt fetches it into `debian.cache`; nothing is installed. HIP loads the kernels' code and
writes launch packets; the process decides what a packet does (`packets.py`).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from amdgpu_simulator import debian
from amdgpu_simulator.debian import LIBRARIES, UnavailableError
from amdgpu_simulator.hip import topology

_HERE = Path(__file__).resolve().parent
CACHE = debian.cache("hip")
RELEASES = {
    "6.4": debian.Package(("forky",), "libamdhip64-6=6.4.3-5"),
    "7.2": debian.Package(("forky", "experimental"), "libamdhip64-7=7.2.4-1~exp2"),
}


def fetch(name: str) -> Path:
    """The directory of a release's files, with their own C library. Raises UnavailableError."""
    return debian.unpack(RELEASES[name], CACHE / name)


def build() -> Path:
    """Compiles kfd.c. Returns the library."""
    output = CACHE / "kfd.so"
    source = _HERE / "kfd.c"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists() or output.stat().st_mtime < source.stat().st_mtime:
            caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(CACHE.parent / "zig"))
            zig = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.34"]
            flags = ["-std=gnu11", "-shared", "-fPIC", "-O1", "-g0", "-Wall", "-Wextra", "-Werror", "-pthread"]
            subprocess.run([*zig, *flags, "-o", str(output), str(source)], env={**os.environ, **caches}, check=True)
    return output


def command(name: str, target: str, arguments: list[str], *, gpus: int = 1) -> tuple[list[str], dict[str, str]]:
    """The command and its environment that run this Python with a release's runtime on a mock machine with GPUs of a
    target.

    Raises UnavailableError.
    """
    libraries = fetch(name) / LIBRARIES
    (library,) = libraries.glob("libamdhip64.so.?")
    # The runtime is newer than most machines' C library, so it has its own C library and loader.
    path = [sysconfig.get_config_var("LIBDIR"), str(libraries), "/usr/lib/x86_64-linux-gnu"]
    words = [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", ":".join(path), "--preload", str(build())]
    words += ["--argv0", sys.executable, str(Path(sys.executable).resolve()), *arguments]
    environment = {
        **os.environ,
        **topology.write(CACHE / f"{target}-{gpus}", target, gpus),
        "HSA_ENABLE_SDMA": "0",
        "AMDGPU_HIP": str(library),
        "AMDGPU_KFD": str(CACHE / "kfd.so"),
    }
    return words, environment


def _main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("release", choices=RELEASES)
    parser.add_argument("target")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of Python")
    asked = parser.parse_args()
    try:
        words, environment = command(asked.release, asked.target, asked.arguments)
    except (UnavailableError, ValueError) as problem:
        raise SystemExit(f"error: {problem}") from None
    os.execve(words[0], words, environment)


if __name__ == "__main__":
    _main()
