"""The scripts with which a user tests FA3 on a GPU, as far as they run without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "wheel_tests"
needs_no_gpu = pytest.mark.skipif(Path("/dev/kfd").exists() or Path("/dev/nvidia0").exists(), reason="a GPU is here")


@pytest.fixture
def prove(
    monkeypatch: pytest.MonkeyPatch,
    wheel_script: Callable[[str], ModuleType],
    one_thread: None,  # noqa: ARG001
) -> ModuleType:
    for directory in (SCRIPTS, ROOT / "flash_attn_src"):
        monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "")
    return wheel_script("prove_fa3_mi300x")


def evidence(prove: ModuleType, **changed: Any) -> Any:
    """The expected results of an MI300X, with changes; errors of one case by name too."""
    errors = {"forward": 4e-3, "backward": 8e-3} | {
        key: changed.pop(key) for key in ("forward", "backward") & changed.keys()
    }
    good = {
        "torch": "2.5.1+rocm6.2",
        "hip": "6.2.41133",
        "device": "AMD Instinct MI300X",
        "target": "gfx942",
        "driver": "HIP 6.2.41133",
        "flash_attn": "2.8.3+rocm62torch2.5triton",
        "symbol": "flash_attn.flash_attn_triton_amd.interface_v2",
        "backend": "flash_attn.attention.backends.triton",
        "problems": (),
        "results": (prove.Result(case="a case", forward_limit=1e-2, backward_limit=2e-2, **errors),),
    }
    return prove.Evidence(**{**good, **changed})


def test_an_mi300x_that_computes_right(
    prove: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "survey", lambda _: evidence(prove))
    assert prove.main([]) == 0
    assert "FA3 forward success" in capsys.readouterr().out
    assert os.environ["FLASH_ATTENTION_TRITON_AMD_ENABLE"] == "TRUE"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hip": None}, "no ROCm build"),
        ({"target": "gfx90a", "device": "AMD Instinct MI210"}, "MI210 is a gfx90a"),
        ({"symbol": "flash_attn_2_cuda"}, "flash_attn_2_cuda does not end in interface_v2"),
        ({"backend": "flash_attn.attention.backends.ck"}, "go to flash_attn.attention.backends.ck"),
        ({"problems": ("this wheel was built for torch 2.5",)}, "built for torch 2.5"),
        ({"forward": 2e-2}, "the forward is wrong for a case"),
        ({"backward": float("nan")}, "the backward is wrong for a case"),
        ({"results": ()}, "nothing was measured"),
    ],
)
def test_whatever_does_not_hold_is_no_proof(
    prove: ModuleType,
    changed: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(prove, "survey", lambda _: evidence(prove, **changed))
    assert prove.main([]) == 1
    out = capsys.readouterr().out
    assert said in out
    assert "success" not in out


def test_a_gpu_of_another_kind_proves_nothing_and_is_reported(
    prove: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "survey", lambda _: evidence(prove, hip=None, target="sm_90", device="NVIDIA H200"))
    assert prove.main(["--any-gpu"]) == 0
    assert "no proof for an MI300X" in capsys.readouterr().out
    monkeypatch.setattr(prove, "survey", lambda _: evidence(prove, hip=None, target="sm_90", forward=1.0))
    assert prove.main(["--any-gpu"]) == 1


def test_the_script_measures(prove: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    flash_attn = importlib.import_module("flash_attn")
    monkeypatch.setattr(prove, "SHAPES", ((1, 40, 70, 4, 2, 32, True),))
    actual = list(prove.measure("cpu"))
    assert [result.case for result in actual] == ["1x40x70x4x2x32 bfloat16, causal", "1x40x70x4x2x32 float16, causal"]
    assert all(0 < result.forward <= result.forward_limit for result in actual)
    assert all(0 < result.backward <= result.backward_limit for result in actual)
    right = flash_attn.flash_attn_func
    monkeypatch.setattr(flash_attn, "flash_attn_func", lambda *args, **kwargs: 1.1 * right(*args, **kwargs))
    assert all(result.forward > result.forward_limit for result in prove.measure("cpu"))


@needs_no_gpu
@pytest.mark.usefixtures("prove")
def test_the_minimal_forward(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    minimal = importlib.import_module("test_fa3")
    flash_attn = importlib.import_module("flash_attn")
    assert minimal.main([]) == 2
    assert 0 < minimal.printed_error(capsys.readouterr().out) < 1e-2
    right = flash_attn.flash_attn_func
    monkeypatch.setattr(flash_attn, "flash_attn_func", lambda *args, **kwargs: 1.1 * right(*args, **kwargs))
    assert minimal.main([]) == 1
    assert "the result is wrong" in capsys.readouterr().out


def test_the_minimal_forward_without_flash_attn_is_one_line(
    prove: ModuleType,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert importlib.import_module("test_fa3").main([]) == 1
    assert capsys.readouterr().out == (
        f"FA3 did not run: flash_attn is not installed in {sys.executable}; pip install torch and the wheel\n"
    )


@needs_no_gpu
@pytest.mark.parametrize(
    ("script", "said"),
    [("prove_fa3_mi300x.py", "no AMD GPU here"), ("test_fa3.py", "FA3 did not run")],
)
def test_without_a_gpu_they_say_so_and_end_with_2(script: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "flash_attn_src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stdout
    assert "success" not in done.stdout
