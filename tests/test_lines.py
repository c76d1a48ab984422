"""The budget of lines: what counts, what a change adds, and that a product beyond its budget is an error."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from rocm_wheels.paths import ROOT


@pytest.fixture(scope="module")
def lines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lines", ROOT / ".ci/lines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("rocm_wheels/a.py", "product"), ("build_rocm.sh", "product"), ("a/src/lib.rs", "product"),
        ("tests/a.py", "tests"), ("flash_attn_src/tests/clients/a.py", "tests"), ("wheel_tests/a.py", "tests"),
        ("README.md", ""), ("locks/build.txt", ""), ("docs/speed.json", ""),
    ],
)  # fmt: skip
def test_what_counts(lines: ModuleType, path: str, part: str) -> None:
    assert lines.part(path) == part


def test_a_change_and_the_budget(
    lines: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *words], cwd=tmp_path, check=True)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "a.py").write_text("1\n2\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.lines]\nbudget = 4\n", encoding="utf-8")
    for words in (["init", "-q", "-b", "trunk"], ["add", "."], ["commit", "-qm", "x"], ["switch", "-qc", "change"]):
        git(*words)
    (tmp_path / "a.py").write_text("1\n3\n4\n", encoding="utf-8")
    (tmp_path / "tests/test_a.py").write_text("1\n", encoding="utf-8")
    git("add", ".")
    git("commit", "-qm", "y")
    assert lines.main("trunk") == 0
    assert capsys.readouterr().out.splitlines() == [
        "lines: product +2 -1, +1 since trunk",
        "lines: tests +1 -0, +1 since trunk",
        "lines: product 3 of 4, tests 1",
    ]
    (tmp_path / "a.py").write_text("1\n" * 6, encoding="utf-8")
    assert lines.main("origin/none") == 1
    said = capsys.readouterr()
    assert "since" not in said.out
    assert "the product has 2 lines more than its budget" in said.err
