"""comfyui/install.py on made-up trees of folders: the Python that it finds, and what it runs there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comfyui import install
from rocm_wheels.paths import ROOT

NAME = "flash_attn-2.8.3+rocm-cp310-abi3-win_amd64.whl"
TREES = {
    "portable": ("ComfyUI/main.py", "python_embeded/python.exe"),
    "a clone with .venv": ("main.py", ".venv/Scripts/python.exe"),
    "a clone with venv on Linux": ("main.py", "venv/bin/python"),
    "Stability Matrix, portable": ("Data/Packages/ComfyUI/main.py", "Data/Packages/ComfyUI/venv/Scripts/python.exe"),
    "Stability Matrix": ("Packages/ComfyUI/main.py", "Packages/ComfyUI/venv/Scripts/python.exe"),
}


def tree(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("", encoding="utf-8")
    return root


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What is run by ComfyUI's Python; flash_attn 2.7.4 is there before."""
    lines: list[list[str]] = []

    def run(command: list[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command[1:]]
        lines.append(words)
        gone = any("uninstall" in line for line in lines)
        shown = "Name: flash_attn\nVersion: 2.7.4\n" if "show" in words and not gone else ""
        return subprocess.CompletedProcess(command, 1 if "flash_attn.doctor" in words else 0, shown, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install, "WHEEL", NAME)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return lines


@pytest.mark.parametrize("name", TREES)
def test_the_python_of_each_kind_of_installation(name: str, tmp_path: Path) -> None:
    assert install.environments(tree(tmp_path, *TREES[name])) == [tmp_path / TREES[name][1]]


def test_the_portable_python_of_comfyuis_own_folder(tmp_path: Path) -> None:
    tree(tmp_path, *TREES["portable"])
    assert install.environment(tmp_path / "ComfyUI") == tmp_path / "python_embeded/python.exe"


def test_it_installs_runs_the_doctor_and_undoes(
    typed: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tree(tmp_path / "c", *TREES["portable"])
    file = tree(tmp_path, f"home/Downloads/{NAME}") / f"home/Downloads/{NAME}"
    assert install.main([str(folder)]) == 1, "the doctor's code"
    assert typed[2:] == [
        ["-s", "-m", "pip", "install", "--no-deps", "--force-reinstall", str(file)],
        ["-s", "-m", "flash_attn.doctor"],
    ]
    assert install.main([str(folder), "--wheel", str(file)]) == 1  # an update
    typed.clear()
    assert install.main([str(folder), "--undo"]) == 0
    assert typed[0] == ["-s", "-m", "pip", "uninstall", "-y", "flash_attn"]
    assert "flash_attn 2.7.4 was there before" in capsys.readouterr().out
    assert install.main([str(folder), "--undo"]) == 2
    assert "installed nothing into" in capsys.readouterr().err


def two(folder: Path) -> Path:
    return tree(folder, *TREES["portable"], ".venv/Scripts/python.exe")


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda folder: folder, [], ("no Python of ComfyUI in", "install.py FOLDER")),
        (two, [], ("2 Python of ComfyUI in", "python_embeded", ".venv")),
        (lambda folder: tree(folder, *TREES["portable"]), [], (f"no {NAME} in", "--wheel FILE")),
        (lambda folder: tree(folder, *TREES["portable"]), ["--wheel", "none.whl"], ("there is no file none.whl",)),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(
    make: Callable[[Path], Path],
    options: list[str],
    words: tuple[str, ...],
    typed: list[list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert install.main([str(make(tmp_path)), *options]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert not typed


def test_a_pip_that_fails_says_to_close_comfyui(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tree(tmp_path, *TREES["portable"], NAME)
    monkeypatch.setattr(install, "WHEEL", NAME)
    fails = subprocess.CompletedProcess([], 1, "", "")
    monkeypatch.setattr(install, "installed", lambda _: "")
    monkeypatch.setattr(install, "call", lambda *_: fails)
    assert install.main([str(folder)]) == 2
    assert "close ComfyUI" in capsys.readouterr().err
    assert install.main([str(folder), "--undo"]) == 2, "what was there before is left alone"


def test_a_pip_that_removes_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tree(tmp_path, *TREES["portable"])
    (tmp_path / "python_embeded" / install.RECORD).write_text('{"before": ""}', encoding="utf-8")
    monkeypatch.setattr(install, "call", lambda *_: subprocess.CompletedProcess([], 0, "Version: 2.8.3\n", ""))
    assert install.main([str(folder), "--undo"]) == 2
    assert "pip did not remove it" in capsys.readouterr().err


def test_the_batch_file_is_for_cmd() -> None:
    text = (ROOT / "comfyui/install.bat").read_bytes()
    assert text.count(b"\r\n") == text.count(b"\n")
    assert b'"%~dp0install.py" %*' in text
