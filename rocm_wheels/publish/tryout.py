"""Installs the newest universal wheel from the public index, as a user does, and runs its selftest."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocm_wheels import packages
from rocm_wheels.errors import DataError, VerifyFailed
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.plan import TORCH_INDEX
from rocm_wheels.paths import ROOT
from rocm_wheels.tables import version_key
from rocm_wheels.wheel import interpreters
from rocm_wheels.wheel.verify import clean_environment

PYTHONS = ("oldest", "newest")
PUBLISHED = ROOT / "docs/published.json"
_SECONDS = 1800
_LOG_LINES = 40
_VERSION = "from importlib.metadata import version; print(version('torch'), version('flash_attn'))"


def run(site: str, *, installer: str, python: str, torch_index: str = f"{TORCH_INDEX}/cpu") -> str:
    """Installs and runs the wheel. Returns a line about it. python: a version, "oldest" or "newest".

    Raises DataError if the site or its universal wheel is missing, VerifyFailed with the log of the command that
    failed.
    """
    summary = listing(site)
    if summary is None:
        return f"{site}: nothing is published yet"
    wheel = newest_universal(summary, site)
    known = versions.load().python
    python = {"oldest": known[0], "newest": known[-1]}.get(python, python)
    interpreter = interpreters.find(python)
    with tempfile.TemporaryDirectory(prefix="tryout-") as scratch:
        env = Path(scratch) / "env"
        _call([str(interpreter), "-m", "venv", *(["--without-pip"] if installer == "uv" else []), str(env)])
        inside = str(env / "bin/python")
        install = [inside, "-m", "pip", "install", "--no-cache-dir"]
        if installer == "uv":
            install = [_uv(), "pip", "install", "--no-cache", "--python", inside]
        _call([*install, "torch", "--index-url", torch_index])
        before = _call([inside, "-c", _VERSION.replace(", version('flash_attn')", "")]).strip()
        _call([*install, f"flash_attn=={wheel['version']}", "--extra-index-url", f"{site}{wheel['index']}"])
        torch, flash_attn = _call([inside, "-c", _VERSION]).split()
        if torch != before:
            raise VerifyFailed(f"{installer} replaced torch {before} by {torch}", remedy="See its log.")
        _call([inside, "-m", "flash_attn.selftest", "--cpu", "--json", str(Path(scratch) / "report.json")])
    return f"flash_attn {flash_attn}, torch {torch}, Python {python}, {installer}: installed, selftest passed"


def newest_universal(summary: dict[str, Any], site: str) -> dict[str, Any]:
    """The universal wheel of the newest release in a site's metadata.json. Raises DataError if it lists none."""
    wheels = [wheel for wheel in summary["wheels"] if not wheel["torch"] and wheel["yanked"] is None]
    if not wheels:
        raise DataError(
            f"{site} offers no universal wheel", remedy="Publish one, or take the mark off (`yank --undo`)."
        )
    return max(wheels, key=lambda wheel: (version_key(wheel["flash_attn"])[:3], -len(wheel["flash_attn"])))


def listing(site: str) -> dict[str, Any] | None:
    """The content of metadata.json; None if it does not exist and is not expected yet, before the first release.

    Raises DataError if it cannot be read.
    """
    try:
        with urllib.request.urlopen(f"{site}metadata.json", timeout=60) as answer:
            content: dict[str, Any] = json.load(answer)
            return content
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404 and json.loads(PUBLISHED.read_text(encoding="utf-8")) == []:
            return None
        why: object = f"status {error.code}"
    except (OSError, ValueError) as error:
        why = error
    raise DataError(f"{site}metadata.json cannot be read: {why}", remedy="Start pages.yml by hand and see its log.")


def _uv() -> str:
    """The uv on PATH, which a user would use, else the uv of this environment."""
    return shutil.which("uv") or packages.uv()


def _call(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise VerifyFailed(f"`{' '.join(command)}` took over {_SECONDS} s") from error
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-_LOG_LINES:])
        raise VerifyFailed(f"`{' '.join(command)}` ended with {done.returncode}:\n{tail}")
    return done.stdout
