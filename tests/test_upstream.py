"""wheel_tests/upstream.py on a source distribution of three small tests."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "wheel_tests" / "upstream.py"
TESTS = """
import os, sys
import pytest
import torch
from beside import LIMIT

@pytest.mark.parametrize("dtype", ["half", "float"])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 2), (3, 4), (5, 6)])
def test_some(seqlen_q, seqlen_k, dtype):
    print("noise")
    if dtype == "half":
        pytest.skip("no half here")
    assert seqlen_k == seqlen_q + 1 < LIMIT

@pytest.mark.skip
def test_none():
    raise AssertionError

def test_compilation_count():
    raise AssertionError

@pytest.mark.parametrize("how", ["fail", "exit", "xfail", "die"])
def test_ends(how):
    if how == "die":
        os._exit(3)
    {"fail": pytest.fail, "exit": sys.exit, "xfail": pytest.xfail}[how]("of its own accord")

@pytest.mark.skipif(True, reason="never")
@pytest.mark.parametrize("size", [1])
def test_elsewhere(size):
    raise AssertionError

@pytest.mark.parametrize("size", [4])
def test_on_a_gpu(size):
    x = torch.ones(size, device="cuda").to(torch.device("cuda", 0))
    assert x.shape == (size,) and torch.cuda.get_device_capability("cuda") == (9, 0)

def test_internals(monkeypatch):
    raise AssertionError
"""


@pytest.fixture
def upstream(wheel_script: Callable[[str], ModuleType]) -> ModuleType:
    return wheel_script("upstream")


def distribution(directory: Path, files: dict[str, str]) -> Path:
    archive = directory / "flash_attn-2.8.3.tar.gz"
    with tarfile.open(archive, "w:gz") as content:
        for name, text in files.items():
            member = tarfile.TarInfo(f"flash_attn-2.8.3/{name}")
            member.size = len(text.encode())
            content.addfile(member, io.BytesIO(text.encode()))
    return archive


def test_cases_are_drawn_and_distinguished(
    upstream: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))  # run() adds to the path
    files = {"tests/test_flash_attn.py": TESTS, "tests/beside.py": "LIMIT = 6\n", "hopper/flash_attn_interface.py": ""}
    root = upstream.unpack(distribution(tmp_path, files), tmp_path)
    path = root / "tests" / "test_flash_attn.py"
    assert not (root / "hopper").exists()
    told = {name: upstream.reason_left_out(path, name, "2.8.3", False) for name in upstream.names(path)}
    assert [name for name, why in told.items() if why is None] == [
        *("test_some", "test_none", "test_ends", "test_elsewhere", "test_on_a_gpu")
    ]
    assert told["test_compilation_count"] == "counts how often upstream's own kernel is compiled"
    assert "monkeypatch" in told["test_internals"]
    outcome = upstream.run(path, "test_some", 100, 0, 60.0)
    assert (outcome.test, outcome.passed, outcome.skipped) == ("tests/test_flash_attn.py::test_some", 2, 3)
    (failure,) = outcome.failures
    assert "'seqlen_q': 5" in failure
    assert "AssertionError" in failure
    assert "assert seqlen_k == seqlen_q + 1 < LIMIT" in failure
    assert upstream.run(path, "test_none", 1, 0, 60.0).skipped == 1
    assert "noise" not in capsys.readouterr().out

    function = upstream.load(path).test_some
    every = [tuple(sorted(case.items())) for case in upstream.draw(function, 100, 0)]
    assert len(set(every)) == 6
    some = list(upstream.draw(function, 3, 1))
    assert some == list(upstream.draw(function, 3, 1))
    assert len(some) == 3
    assert upstream.run(root / "tests" / "absent.py", "test_some", 1, 0, 60.0).failures


def test_a_test_that_fails_or_ends_its_process_is_reported(
    upstream: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # modules of the checkout, in the other process too
    files = {"tests/test_flash_attn.py": TESTS, "tests/beside.py": "LIMIT = 6\n"}
    path = upstream.unpack(distribution(tmp_path, files), tmp_path) / "tests" / "test_flash_attn.py"
    ends = upstream.run_alone(path, "test_ends", 100, 0, 60.0)
    assert ends.failures == ("its process ended with exit code 3",)
    monkeypatch.setattr(os, "_exit", sys.exit)
    ends = upstream.run(path, "test_ends", 100, 0, 60.0)
    assert (ends.passed, ends.skipped) == (0, 1)
    assert sorted(each.partition(":")[2].split(":")[0].strip() for each in ends.failures) == [
        *("'die'}", "'exit'}", "'fail'}")
    ]
    assert upstream.run(path, "test_elsewhere", 1, 0, 60.0).skipped == 1
    assert upstream.run(path, "test_on_a_gpu", 1, 0, 60.0, True).passed == 1


@pytest.mark.parametrize(
    ("module", "options", "package"),
    [("flash_attn", [], "the wheel"), ("flash_attn_interface", ["--fa3"], "the wheel of flash-attn-3")],
)
def test_missing_packages_give_one_line(
    upstream: ModuleType,
    module: str,
    options: list[str],
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else name)
    assert upstream.main(["an archive", *options]) == 2
    expected = f"error: {module} is not installed in {sys.executable}; pip install {package}\n"
    assert capsys.readouterr() == ("", expected)


def test_files_that_are_no_source_distribution_are_refused(upstream: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tests/\*\.py: give flash-attn's source distribution"):
        upstream.unpack(distribution(tmp_path, {"setup.py": ""}), tmp_path)


def test_of_a_checkout_the_tests_alone_are_taken(upstream: ModuleType, tmp_path: Path) -> None:
    """Upstream's own modules are next to hopper's tests, which would import them instead of the installed ones."""
    checkout = tmp_path / "flash-attention"
    taken = ("tests/test_flash_attn.py", "tests/cute/test_flash_attn.py", "hopper/test_util.py", "hopper/padding.py")
    for name in (*taken, "hopper/flash_attn_interface.py", "flash_attn/cute/interface.py", "setup.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    root = upstream.unpack(checkout, tmp_path / "unpacked")
    assert {path.relative_to(root).as_posix() for path in root.rglob("*.py")} == set(taken)
    (checkout / taken[0]).unlink()
    with pytest.raises(ValueError, match=r"holds no tests/test_flash_attn\.py: give a checkout"):
        upstream.unpack(checkout, tmp_path)
