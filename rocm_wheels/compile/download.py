"""Downloads one locked file with pip and checks its digest."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rocm_wheels.errors import DataError, MissingTool

_PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")


def fetch(
    requirement: str,
    options: Sequence[str],
    output: Path,
    *,
    sha256: str,
    locked_in: Path,
    holds: str,
    remedy: str,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """The file of a requirement such as "triton==3.7.1", downloaded into the directory `output`.

    options: options of pip download. sha256, locked_in: the expected digest, and the data file that holds it. holds:
    what the file contains, for the error. Raises MissingTool, with pip's message and the remedy, if pip does not
    download exactly one file, DataError for another digest.
    """
    command = [*_PIP, *options, "--dest", str(output), requirement]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    files = list(output.glob("*")) if done.returncode == 0 else []
    if len(files) != 1:
        raise MissingTool(
            f"pip could not fetch {requirement}, which holds {holds}:\n{done.stderr.strip()}", remedy=remedy
        )
    check(files[0].name, files[0].read_bytes(), sha256, locked_in)
    return files[0]


def check(name: str, content: bytes, sha256: str, locked_in: Path) -> None:
    """Raises DataError if the content has another digest than the data file `locked_in` says."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise DataError(f"{name} has sha256 {digest}, {locked_in.name} wants {sha256}")
