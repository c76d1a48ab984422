"""The command that runs programs' own tests, on a made-up checkout. No program is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

_CLIENTS = Path(__file__).resolve().parent / "clients"


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.syspath_prepend(str(_CLIENTS))
    from on_cpu import Cpu

    return Cpu


def test_tensors_on_a_gpu_are_on_the_cpu(cpu: type) -> None:
    with cpu():
        tensors = (
            torch.ones(2, device="cuda"),
            torch.zeros(2).to("cuda:1"),
            torch.arange(2, device=torch.device("cuda", 1)),
            torch.ones(2).cuda(),
        )
    assert {x.device.type for x in tensors} == {"cpu"}


def test_differences_are_named_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_CLIENTS))
    import suites

    first = "[Rank#0] out: max 3.5, mean 1.0\nout diff:\n[Rank#0] max 0.25, mean 0.1\ndq:\n[Rank#0] max 2.0, mean 0.1\n"
    second = "[Rank#1] max 0.5, mean 0.1\n[Rank#1] max 2.0, mean 0.1\n"
    assert suites._differences(first, second) == [0.25, 0.5]


def test_a_run_that_never_calls_flash_attn_fails(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_some.py").write_text("def test_nothing():\n    pass\n", encoding="utf-8")
    call = (
        "import flash_attn, torch\ndef test_call():\n    x = torch.ones(1, 2, 1, 8)\n"
        "    flash_attn.flash_attn_func(x, x, x)\n"
    )
    (tests / "test_call.py").write_text(call, encoding="utf-8")
    code = "import suites; print([suites.run_pytest([f'tests/{name}.py']) for name in ('test_some', 'test_call')])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{_CLIENTS}:{_CLIENTS.parent.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.splitlines()
    ends = [line for line in said if line.endswith("calls of flash_attn")]
    assert (ends, said[-1:]) == (["0 calls of flash_attn", "1 calls of flash_attn"], ["[1, 0]"]), done.stderr
