"""sanitize.py: its calls run on the CPU, and the output of the tools is parsed correctly."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import sanitize

OUTPUT = """========= COMPUTE-SANITIZER
@@ dense full
@@ loss sum
========= Invalid __global__ read of size 4 bytes
=========     at cross_entropy_bwd+0x1a0
=========     by thread (0,0,0) in block (3,0,0)
========= Invalid __global__ read of size 4 bytes
@@ end
========= ERROR SUMMARY: 2 errors
"""


@pytest.mark.parametrize("name", list(sanitize.calls("cpu")))
def test_every_call_runs(name: str) -> None:
    sanitize.calls("cpu")[name]()


def test_findings_belong_to_the_call_before_them() -> None:
    wrong = ["Invalid __global__ read of size 4 bytes"] * 2
    assert dict(sanitize.findings(OUTPUT)) == {"start": [], "dense full": [], "loss sum": wrong, "end": []}


@pytest.mark.parametrize(
    ("output", "code"), [(OUTPUT, 1), ("@@ dense full\n@@ end\n========= ERROR SUMMARY: 0 errors\n", 0)]
)
def test_the_exit_code(
    output: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append((command[1:3], options["env"]["PYTORCH_NO_CUDA_MEMORY_CACHING"]))
        return subprocess.CompletedProcess(command, 0, stdout=output)

    monkeypatch.setattr(subprocess, "run", run)
    assert sanitize.main(["--sanitizer", "/bin/true"]) == code
    assert asked == [(["--tool", tool], "1") for tool in sanitize.TOOLS]
    assert ("memcheck: loss sum: Invalid" in capsys.readouterr().out) is bool(code)


def test_calls_that_end_early_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 9, stdout="@@ dense full\nkilled\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(SystemExit, match="memcheck: the calls ended after 'dense full', exit code 9"):
        sanitize.main(["--sanitizer", "/bin/true"])
