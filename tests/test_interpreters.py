from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rocm_wheels.errors import MissingTool
from rocm_wheels.wheel import interpreters

RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


def _program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with only the running interpreter: no PATH, no pyenv, no uv."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(interpreters, "_uv", lambda *_, seconds: f"no uv in {seconds} s")
    return tmp_path


def test_the_running_python_comes_first() -> None:
    assert interpreters.find(RUNNING) == Path(sys.executable)


def test_a_python_on_path(bare: Path) -> None:
    result = _program(bare / "bin" / "python3.99", "echo 3.99")
    assert interpreters.find("3.99") == result


def test_a_shim_that_fails_is_passed_over(bare: Path) -> None:
    _program(bare / "bin" / "python3.99", "echo 'pyenv: python3.99: command not found' >&2; exit 127")
    result = _program(bare / "pyenv" / "versions" / "3.99.1" / "bin" / "python3.99", "echo 3.99")
    assert interpreters.find("3.99") == result


def test_a_program_of_another_version_is_passed_over(bare: Path) -> None:
    _program(bare / "bin" / "python3.99", "echo 3.98")
    with pytest.raises(MissingTool):
        interpreters.find("3.99")


def test_a_free_threaded_python_is_skipped(bare: Path) -> None:
    _program(bare / "bin" / "python3.99", "echo 3.99t")
    with pytest.raises(MissingTool):
        interpreters.find("3.99")


def test_a_file_that_is_no_program_is_skipped(bare: Path) -> None:
    path = bare / "bin" / "python3.99"
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF")
    path.chmod(0o755)
    with pytest.raises(MissingTool):
        interpreters.find("3.99")


def test_pyenv_of_a_longer_version_is_no_match(bare: Path) -> None:
    _program(bare / "pyenv" / "versions" / "3.99.1" / "bin" / "python3.9", "echo 3.9")
    with pytest.raises(MissingTool):
        interpreters.find("3.9" if RUNNING != "3.9" else "3.8")


def test_uv_comes_last_and_installs_a_python(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    installed = bare / "uv" / "python3.99"

    def uv(*arguments: str, seconds: int) -> str:
        assert seconds > 0
        asked.append(arguments)
        if arguments[:2] == ("python", "install"):
            _program(installed, "echo 3.99")
        return f"{installed}\n" if installed.is_file() else "error: no interpreter found"

    monkeypatch.setattr(interpreters, "_uv", uv)
    assert interpreters.find("3.99") == installed
    assert [each[1] for each in asked] == ["find", "install", "find"]


def test_the_error_without_a_python_names_the_search_path_and_a_remedy(bare: Path) -> None:
    with pytest.raises(MissingTool, match=r"no Python 3\.99 .*PATH, pyenv.*/opt/python.*no uv in") as caught:
        interpreters.find("3.99")
    for remedy in (
        "apt-get install python3.99",
        "deadsnakes",
        "uv python install 3.99",
        "pyenv install 3.99",
    ):
        assert remedy in caught.value.remedy
    assert os.environ["PATH"] == str(bare / "bin")
