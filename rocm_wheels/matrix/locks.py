"""The lock files: every package that an environment of this project installs, with its version and its hashes.

uv writes them, for all Pythons from the oldest that the jobs run. It skips releases younger than the cooldown, because
a hijacked release is mostly discovered within days.
"""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rocm_wheels import packages, tables
from rocm_wheels.errors import DataError
from rocm_wheels.matrix import versions
from rocm_wheels.paths import ROOT

COOLDOWN_DAYS = 7
COMMAND = "python -m rocm_wheels lock"
DIRECTORY = ROOT / "locks"
WHEEL_TESTS = "wheel_tests/requirements.txt"
OLDEST = "3.10"
# Groups with packages that have no release for Python 3.10. build_rocm.sh has the same list.
_NEWER = dict.fromkeys(("benchmarks", "cibuildwheel", "test"), "3.11")

Groups = dict[str, list[str | dict[str, str]]]


@dataclass(frozen=True, kw_only=True)
class Lock:
    """One lock file: the pinned requirements it is made from, and the oldest Python that installs it."""

    name: str
    requirements: tuple[str, ...]
    python: str

    @property
    def path(self) -> Path:
        return DIRECTORY / f"{self.name}.txt"


def wanted() -> Iterator[Lock]:
    """All lock files: of pip, of the wheel tests, and of each dependency group."""
    yield Lock(name="pip", requirements=(f"pip=={versions.load().build.pip}",), python=OLDEST)
    lines = (ROOT / WHEEL_TESTS).read_text(encoding="utf-8").splitlines()
    yield Lock(name="wheel_tests", requirements=tuple(filter(None, lines)), python=OLDEST)
    pyproject = tables.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8"), "pyproject.toml")
    groups = cast("Groups", pyproject["dependency-groups"])
    for name in groups:
        yield Lock(name=name, requirements=_flat(groups, name), python=_NEWER.get(name, OLDEST))


def write(*, today: datetime.date) -> list[str]:
    """Writes all lock files again. Returns a line for each changed file. Raises DataError with uv's message if uv
    fails.
    """
    changes = []
    for lock in wanted():
        before = lock.path.read_text(encoding="utf-8") if lock.path.is_file() else ""
        _compile(lock, before=today - datetime.timedelta(days=COOLDOWN_DAYS))
        if lock.path.read_text(encoding="utf-8") != before:
            changes.append(f"{lock.path.relative_to(ROOT)} is locked again")
    return changes


def _compile(lock: Lock, *, before: datetime.date) -> None:
    # uv reads the file that it will write: a locked version stays as long as it satisfies the requirements.
    command = [packages.uv(), "pip", "compile", "--quiet", "--no-config", "--universal", "--generate-hashes"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--python-version", lock.python]
    command += ["--exclude-newer", before.isoformat(), "--custom-compile-command", COMMAND]
    command += ["--output-file", str(lock.path), "-"]
    lock.path.parent.mkdir(exist_ok=True)
    done = subprocess.run(
        command, input="\n".join(lock.requirements), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise DataError(
            f"uv could not lock {lock.name}: {done.stderr.strip()}",
            remedy=f"A pin must be at least {COOLDOWN_DAYS} days old, and exist for Python {lock.python}.",
        )


def _flat(groups: Groups, name: str) -> tuple[str, ...]:
    """The requirements of a dependency group and of all groups that it includes."""
    requirements: dict[str, None] = {}
    for entry in groups[name]:
        more = _flat(groups, entry["include-group"]) if isinstance(entry, dict) else (entry,)
        requirements.update(dict.fromkeys(more))
    return tuple(requirements)
