"""Unpacks Debian packages into a directory with apt and dpkg-deb; installs nothing.

The packages come from newer suites than most machines have, so all their libraries are unpacked too, with the C library
and its loader.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_CHECKOUT = Path(__file__).resolve().parent.parent
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def cache(name: str) -> Path:
    """The directory that keeps files of this name: below build/test-cache in a checkout of the repository, otherwise
    below $XDG_CACHE_HOME/amdgpu_simulator (~/.cache/amdgpu_simulator by default)."""
    if (_CHECKOUT / "run_tests.sh").exists():
        return _CHECKOUT / "build" / "test-cache" / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amdgpu_simulator" / name


class Package(NamedTuple):
    """A Debian package. suites: where to look, the preferred suite last. name: optionally with "=" and a version."""

    suites: tuple[str, ...]
    name: str


class UnavailableError(Exception):
    """A package cannot be fetched on this machine. The message is the reason."""


def unpack(package: Package, base: Path) -> Path:
    """The directory with a package and all its dependencies; fetched once. Raises UnavailableError."""
    if platform.machine() != "x86_64" or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise UnavailableError(f"{package.name} is taken from Debian's packages for x86_64, by apt-get and dpkg-deb")
    base.mkdir(parents=True, exist_ok=True)
    done = base / "done"
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text(encoding="utf-8") != repr(package):
            _download(package, base)
            done.write_text(repr(package), encoding="utf-8")
    return base / "root"


def loader(root: Path) -> list[str]:
    """The command prefix that runs a program with the C library of unpacked packages."""
    libraries = root / LIBRARIES
    return [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries)]


def _download(package: Package, base: Path) -> None:
    for stale in ("apt", "root"):
        shutil.rmtree(base / stale, ignore_errors=True)
    apt = base / "apt"
    for directory in ("lists/partial", "archives/partial"):
        (apt / directory).mkdir(parents=True)
    mirror = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian")
    if not mirror:
        raise UnavailableError("apt knows no mirror of Debian: apt-get update, on Debian")
    sources = [f"deb [signed-by={_KEYRING}] {mirror.split()[0]} {suite} main\n" for suite in package.suites]
    (apt / "sources.list").write_text("".join(sources), encoding="utf-8")
    (apt / "status").touch()  # no installed packages, so that apt fetches the C library too
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
        *("--yes", "--no-install-recommends", "--download-only", "--target-release", package.suites[-1]),
        *("install", package.name),
    )
    for archive in sorted((apt / "archives").glob("*.deb")):
        _run("dpkg-deb", "--extract", str(archive), str(base / "root"))
    shutil.rmtree(apt)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnavailableError(f"{command[0]} {command[-1]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
