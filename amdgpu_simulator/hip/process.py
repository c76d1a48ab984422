"""Python with AMD's own HIP runtime, over a driver that pretends GPUs of a target (`kfd.c`): no AMD GPU, no ROCm.

    python -m amdgpu_simulator.hip.process 6.4 gfx942 -m pytest flash_attn_src/tests/test_triton_backend.py --gfx gfx942

runs what follows the target as Python's arguments. The runtime, HIP and ROCr with the libraries they were linked with,
is what Debian makes of AMD's sources, fetched by apt into build/test-cache; nothing is installed. HIP takes kernels,
loads their code and writes their packets; what comes of a packet is up to the process (`packets.py`).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from amdgpu_simulator.hip import topology

_HERE = Path(__file__).resolve().parent
CACHE = _HERE.parent.parent / "build" / "test-cache" / "hip"
_LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class Release(NamedTuple):
    """Where Debian has a HIP runtime: suites, the last one preferred, and the package."""

    suites: tuple[str, ...]
    package: str


RELEASES = {
    "6.4": Release(("forky",), "libamdhip64-6=6.4.3-5"),
    "7.2": Release(("forky", "experimental"), "libamdhip64-7=7.2.4-1~exp2"),
}


class UnavailableError(Exception):
    """Why there is no runtime to be had here."""


def fetch(name: str) -> Path:
    """The directory of a release's files, with a C library of their own. Raises UnavailableError."""
    release = RELEASES[name]
    if platform.machine() != "x86_64" or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise UnavailableError("AMD's runtime is taken from Debian's packages for x86_64, by apt-get and dpkg-deb")
    base = CACHE / name
    base.mkdir(parents=True, exist_ok=True)
    done = base / "done"
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text(encoding="utf-8") != repr(release):
            _download(release, base)
            done.write_text(repr(release), encoding="utf-8")
    return base / "root"


def _download(release: Release, base: Path) -> None:
    for stale in ("apt", "root"):
        shutil.rmtree(base / stale, ignore_errors=True)
    apt = base / "apt"
    for directory in ("lists/partial", "archives/partial"):
        (apt / directory).mkdir(parents=True)
    mirror = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian")
    if not mirror:
        raise UnavailableError("apt knows no mirror of Debian: apt-get update, on Debian")
    sources = [f"deb [signed-by={_KEYRING}] {mirror.split()[0]} {suite} main\n" for suite in release.suites]
    (apt / "sources.list").write_text("".join(sources), encoding="utf-8")
    (apt / "status").touch()  # nothing is installed: the C library comes too
    options = [
        f"Dir::Etc::SourceList={apt}/sources.list",
        "Dir::Etc::SourceParts=/dev/null",
        f"Dir::State::Lists={apt}/lists",
        f"Dir::State::status={apt}/status",
        f"Dir::Cache::archives={apt}/archives",
        "Dir::Cache::pkgcache=",
        "Dir::Cache::srcpkgcache=",
        "Acquire::Languages=none",
        "Debug::NoLocking=1",
        "APT::Sandbox::User=",
    ]
    command = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    _run(*command, "update")
    _run(
        *command,
        *("--yes", "--no-install-recommends", "--download-only", "--target-release", release.suites[-1]),
        *("install", release.package),
    )
    for package in sorted((apt / "archives").glob("*.deb")):
        _run("dpkg-deb", "--extract", str(package), str(base / "root"))
    shutil.rmtree(apt)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnavailableError(f"{command[0]} {command[-1]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def build() -> Path:
    """kfd.c as a library."""
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
    """What runs this Python with a release's runtime on a machine with GPUs of a target: words and environment.
    Raises UnavailableError."""
    libraries = fetch(name) / _LIBRARIES
    (library,) = libraries.glob("libamdhip64.so.?")
    # The runtime is newer than most machines' C library, so it brings its own, and the loader that goes with it.
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
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="those of Python")
    asked = parser.parse_args()
    try:
        words, environment = command(asked.release, asked.target, asked.arguments)
    except UnavailableError as problem:
        raise SystemExit(f"error: {problem}") from None
    os.execve(words[0], words, environment)


if __name__ == "__main__":
    _main()
