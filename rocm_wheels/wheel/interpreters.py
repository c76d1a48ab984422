"""Finds a Python interpreter of a given version on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rocm_wheels.environment import home
from rocm_wheels.errors import MissingTool

# Prints the version of a GIL build; a free-threaded build (cp313t) needs other wheels.
_PROBE = """
import sys, sysconfig
print("%d.%d" % sys.version_info[:2] + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""))
"""
_SEARCHED = "the running interpreter, PATH, pyenv's versions, /opt/python, /opt/hostedtoolcache, `uv python find`"
_PROBE_SECONDS = 20
_INSTALL_SECONDS = 180


def find(version: str) -> Path:
    """An interpreter of `version` ("3.12") that runs; uv installs one if none is found. Raises MissingTool, which names
    the places searched.
    """
    if (here := found(version)) is not None:
        return here
    installed = _uv("python", "install", version, seconds=_INSTALL_SECONDS)
    located = _uv_find(version)
    if located is not None and _version(located) == version:
        return located
    raise MissingTool(
        f"no Python {version} on this machine: looked at {_SEARCHED}; `uv python install` said:"
        f" {installed.strip().splitlines()[-1] if installed.strip() else 'nothing'}",
        remedy=f"install one: `apt-get install python{version}` (deadsnakes has what Ubuntu lacks),"
        f" `uv python install {version}` or `pyenv install {version}`",
    )


def found(version: str) -> Path | None:
    """An interpreter of `version` that this machine has, or None."""
    return next((candidate for candidate in _candidates(version) if _version(candidate) == version), None)


def _candidates(version: str) -> Iterator[Path]:
    tag = "cp" + version.replace(".", "")
    yield Path(sys.executable)
    for directory in os.get_exec_path():
        yield Path(directory) / f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or (home() or Path("/")) / ".pyenv")
    yield from sorted((pyenv / "versions").glob(f"{version}.*/bin/python{version}"), reverse=True)
    yield Path("/opt/python") / f"{tag}-{tag}" / "bin" / "python"
    yield from sorted(Path("/opt/hostedtoolcache/Python").glob(f"{version}.*/x64/bin/python"), reverse=True)
    located = _uv_find(version)
    if located is not None:
        yield located


def _version(interpreter: Path) -> str | None:
    """The version of an interpreter; None if it does not run: pyenv has a shim for every version and runs only the
    selected ones.
    """
    if not interpreter.is_file():
        return None
    try:
        done = subprocess.run(
            [str(interpreter), "-I", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _uv_find(version: str) -> Path | None:
    lines = _uv("python", "find", "--no-project", version, seconds=_PROBE_SECONDS).strip().splitlines()
    return Path(lines[-1]) if lines and Path(lines[-1]).is_file() else None


def _uv(*arguments: str, seconds: int) -> str:
    """The output of uv, which is optional here; a failure returns its message."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]))
    if uv is None:
        return "uv is not installed"
    try:
        done = subprocess.run([uv, *arguments], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds} s"
    return done.stdout if done.returncode == 0 else done.stderr
