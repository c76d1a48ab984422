"""Every environment of the project is installed from a lock file with hashes."""

from __future__ import annotations

import datetime
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import locks
from rocm_wheels.paths import ROOT

LOCKS = {lock.name: lock for lock in locks.wanted()}
_PINNED = re.compile(
    r"(?m)^(?P<name>[a-z0-9._-]+)==(?P<version>\S+)(?: ; .+?)? \\\n(?P<hashes>(?:    --hash=sha256:.*\n)+)"
)
# Images for users: they install a published wheel as a user does.
_FOR_USERS = {"docker/user/Dockerfile"}
_INSTALL = re.compile(r"\b(?:pip|uv)\b[^|;&\n]* install\b|\buvx\b|\bpipx\b|\bnpm (?:install|i|ci)\b|\bcargo install\b")


def name_of(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def test_every_group_has_its_lock_and_no_lock_is_left_over() -> None:
    assert {path.stem for path in locks.DIRECTORY.iterdir()} == set(LOCKS)
    assert {"pip", "wheel_tests", "build", "release", "test"} <= set(LOCKS)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_matches_pyproject_toml(name: str) -> None:
    """If this fails, run `python -m rocm_wheels lock` and commit the result."""
    lock = LOCKS[name]
    text = lock.path.read_text(encoding="utf-8")
    pinned: dict[str, set[str]] = {}
    for match in _PINNED.finditer(text):
        pinned.setdefault(match["name"], set()).add(match["version"])
    pythons = [f"3.{minor}" for minor in range(int(lock.python.partition(".")[2]), 16)]
    environments = [{"python_version": python, "python_full_version": f"{python}.0"} for python in pythons]
    expected: dict[str, set[str]] = {}
    for requirement in map(Requirement, lock.requirements):
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            expected.setdefault(name_of(requirement.name), set()).add(str(requirement.specifier))
    for package, specifiers in expected.items():
        assert {f"=={version}" for version in pinned[package]} == specifiers, locks.COMMAND
    # A package that no other package needs must be requested.
    direct = re.findall(r"(?m)^([a-z0-9._-]+)==[^\n]*\\\n(?:    --hash=[^\n]*\n)+(?!    --hash|    # via)", text)
    assert set(direct) <= set(expected), locks.COMMAND


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_hashes_and_no_address(name: str) -> None:
    text = LOCKS[name].path.read_text(encoding="utf-8")
    assert len(_PINNED.findall(text)) == len(re.findall(r"(?m)^[^\s#]", text)) > 0
    assert "://" not in text
    assert not re.search(r"(?m)^\s*-(?!-hash=sha256:[0-9a-f]{64}\b)", text), "options other than hashes"
    assert locks.COMMAND in text.splitlines()[1]


def test_the_job_that_writes_releases_installs_little() -> None:
    """Any package there could publish: only page rendering, HTTP, and their dependencies are allowed."""
    assert {match["name"] for match in _PINNED.finditer(LOCKS["release"].path.read_text(encoding="utf-8"))} == {
        "certifi",
        "charset-normalizer",
        "idna",
        "jinja2",
        "markupsafe",
        "packaging",
        "requests",
        "tomli",
        "urllib3",
    }


def test_every_install_uses_a_lock() -> None:
    scripts = [*ROOT.glob("*.sh"), ROOT / ".ci/run", *ROOT.glob("docker/*/Dockerfile"), *ROOT.glob("*/check.sh")]
    result = 0
    for path in [*scripts, ROOT / "flash_attn_src/pyproject.toml", *(ROOT / ".github/workflows").glob("*.yml")]:
        where = str(path.relative_to(ROOT))
        text = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)(^|\s)# .*$", "", path.read_text(encoding="utf-8")))
        for line in text.splitlines():
            if not _INSTALL.search(line) or where in _FOR_USERS or re.search(r"uv python install|^\s*fail ", line):
                continue
            for command in re.split(r"&&", line):
                if not _INSTALL.search(command):
                    continue
                result += 1
                # The wheel under test, torch, which a user installs, and what the newest programs import have no lock.
                free = r'wheels/\*\.whl\s*$|\btorch([=$]|\s*$| --index-url )|/servers\.txt"?$'
                assert "--require-hashes" in command or re.search(free, command), (
                    where,
                    line,
                )
    assert result >= 4
    script = (ROOT / "build_rocm.sh").read_text(encoding="utf-8")
    assert "locked=(install --quiet --disable-pip-version-check --require-hashes --requirement)" in script
    assert len(re.findall(r'-m pip (?:--python \S+ )?"\$\{locked\[@\]\}"', script)) == 4
    assert len(re.findall(r"-m pip ", script)) == 6, "the others are pip --version and pip config list"
    assert len(re.findall(r"bin/uv\S* pip install .*--require-hashes", script)) == 1
    for command in re.findall(r"(?m)^cargo .*", (ROOT / "candle-flash-rocm/check.sh").read_text(encoding="utf-8")):
        assert "--locked" in command or command.startswith("cargo fmt"), command


def test_uv_makes_a_lock_with_a_cooldown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def uv(command: list[str], **options: str) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        Path(command[-2]).write_text(options["input"])
        return subprocess.CompletedProcess(command, int("bad" in options["input"]), "", "no such version")

    monkeypatch.setattr(locks, "DIRECTORY", tmp_path)
    monkeypatch.setattr(locks, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", uv)
    monkeypatch.setattr(locks, "wanted", lambda: [locks.Lock(name="one", requirements=("a==1", "b==2"), python="3.10")])
    assert locks.write(today=datetime.date(2026, 11, 24)) == ["one.txt is locked again"]
    assert (tmp_path / "one.txt").read_text() == "a==1\nb==2"
    (command,) = calls
    for options in (
        ["--exclude-newer", "2026-11-17"],
        ["--python-version", "3.10"],
        ["--universal", "--generate-hashes", "--no-emit-index-url", "--no-emit-find-links"],
    ):
        assert " ".join(options) in " ".join(command)
    assert locks.write(today=datetime.date(2026, 11, 24)) == []
    monkeypatch.setattr(locks, "wanted", lambda: [locks.Lock(name="two", requirements=("bad==1",), python="3.10")])
    with pytest.raises(DataError, match="uv could not lock two: no such version"):
        locks.write(today=datetime.date(2026, 11, 24))
