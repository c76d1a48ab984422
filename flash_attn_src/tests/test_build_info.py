"""What a wheel says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import flash_attn
import pytest
import torch
from flash_attn.core import build_info
from flash_attn.diagnosis import info

torch.set_num_threads(2)


def test_backend_info() -> None:
    told = flash_attn.backend_info()
    assert told["version"] == flash_attn.__version__ == "2.8.3"
    assert told["torch"]["running"] == torch.__version__
    assert set(told) == {
        *("backend", "gpu_backend", "version", "label", "torch", "targets", "device_targets", "launcher", "problems")
    }


def test_build_info_of_a_wheel(tmp_path: Path) -> None:
    path = tmp_path / "_build_info.json"
    assert build_info.read(path) == build_info.BuildInfo()
    path.write_text(
        json.dumps(
            {
                "version": "2.7.4",
                "label": "rocm62torch2.5triton",
                "torch": "2.5",
                "rocm": "6.2",
                "backend": "triton",
                "targets": ["gfx90a", "gfx942"],
                "compiler": None,
                "of a later build": 1,
            }
        )
    )
    read = build_info.read(path)
    assert (read.version, read.targets, read.torch_minor, read.compiler) == (
        *("2.7.4", ("gfx90a", "gfx942"), "2.5", ""),
    )
    assert info.torch_problems(read, "2.5.1+rocm6.2", "6.2.41133") == []
    minor, kind = info.torch_problems(read, "2.6.0+cpu", None)
    assert "this wheel is for torch 2.5, torch 2.6.0+cpu is running: `pip install" in minor
    assert "the flash_attn wheel for torch 2.6" in minor
    assert kind == (
        "this wheel is for ROCm 6.2, but torch 2.6.0+cpu is not: "
        '`pip install "torch==2.5.1+rocm6.2" --index-url https://download.pytorch.org/whl/rocm6.2`'
    )
    by_pip = build_info.BuildInfo(targets=("gfx942",))
    assert info.torch_problems(by_pip, "2.6.0+cpu", None) == [
        "this wheel is for ROCm, but torch 2.6.0+cpu is not: "
        '`pip install "torch==2.14.1+rocm7.2" --index-url https://download.pytorch.org/whl/rocm7.2`'
    ]


def test_import_without_torch_names_the_torch_to_install() -> None:
    root = Path(flash_attn.__file__).parents[1]
    script = f"import sys; sys.path.insert(0, {str(root)!r}); sys.modules['torch'] = None; import flash_attn"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ImportError: flash_attn 2.8.3 needs torch 2.5 or newer" in result.stderr


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["selftest", "--help"], 0, "usage: python -m flash_attn.selftest"),
        (["selftest", "-h"], 0, "usage: python -m flash_attn.selftest"),
        (["selftest"], 1, "error: flash_attn 2.8.3 needs torch 2.5 or newer, and no torch is installed"),
        (["sdpa", "--help"], 1, "error: flash_attn 2.8.3 needs torch 2.5 or newer, and no torch is installed"),
        (["sdpa", "program.py", "--help"], 1, "error: flash_attn 2.8.3 needs torch 2.5 or newer"),
        (["doctor", "--help"], 0, "usage: python -m flash_attn.doctor"),
    ],
)
def test_programs_without_torch_print_no_traceback(words: list[str], code: int, shown: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    program, *arguments = words
    done = subprocess.run(
        [tmp_path / "env/bin/python", "-m", f"flash_attn.{program}", *arguments],
        env={"PYTHONPATH": str(Path(flash_attn.__file__).parents[1])}, cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr if code else done.stdout[: len(shown)]) == (code, done.stderr or shown)
    assert shown in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_build_info_asks_the_user_to_reinstall(tmp_path: Path) -> None:
    path = tmp_path / "_build_info.json"
    for text in ('{"version": "2.8', "[]"):
        path.write_text(text)
        with pytest.raises(ImportError, match=r"_build_info\.json cannot be read .*: reinstall the wheel"):
            build_info.read(path)


WHEEL = build_info.BuildInfo(targets=("gfx90a", "gfx942"), torch="2.5", rocm="6.2")


def test_the_gpus_of_a_machine_and_those_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    result = [SimpleNamespace(gcnArchName=name, major=9, minor=0) for name in ("gfx942:sramecc+", "gfx1100", "gfx942")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(result))
    monkeypatch.setattr(torch.cuda, "get_device_properties", result.__getitem__)
    monkeypatch.setattr(torch.version, "hip", None)
    assert info._device_targets() == ["sm_90"]
    monkeypatch.setattr(torch.version, "hip", "6.2.41133")
    monkeypatch.setattr(info, "load", lambda: WHEEL)
    monkeypatch.setattr(info, "_launcher", lambda _: ("libamdhip64.so", ["the driver's"]))
    monkeypatch.setattr(info.backends, "problem", lambda: "the backend's")
    monkeypatch.setattr(info.jit, "triton_problem", lambda: "Triton is too old")
    told = info.backend_info()
    assert (told["targets"], told["device_targets"]) == (["gfx90a", "gfx942"], ["gfx1100", "gfx942"])
    assert (told["launcher"], told["torch"]["wheel"]) == ("libamdhip64.so", "2.5")
    *_, backend, driver = told["problems"]
    assert info._target_problems(WHEEL, told["device_targets"]) == []  # the wheel has kernels for another GPU
    (target,) = info._target_problems(WHEEL, ["gfx1100"])
    assert target == (
        "a GPU here is a gfx1100, this wheel has kernels for gfx90a, gfx942, and its kernels cannot be compiled here "
        "(Triton is too old): `PYTORCH_ROCM_ARCH=gfx1100 ./build_rocm.sh 2.8.3` builds a wheel that has them"
    )
    monkeypatch.setattr(info.jit, "triton_problem", lambda: None)
    (compiled,) = info._target_problems(WHEEL, ["gfx1100"])
    assert "Triton compiles its kernels at their first call" in compiled
    radeon = build_info.BuildInfo(targets=("gfx1030",))
    (relative,) = info._target_problems(radeon, ["gfx1031"])
    assert relative.endswith("`export HSA_OVERRIDE_GFX_VERSION=10.3.0` runs the kernels of gfx1030")
    assert (backend, driver) == ("the backend's", "the driver's")
    assert info._target_problems(build_info.BuildInfo(), ["gfx1100"]) == []
    assert info.torch_problems(build_info.BuildInfo(), "2.6.0+cpu", None) == []
    monkeypatch.setattr(info, "load", build_info.BuildInfo)
    monkeypatch.setattr(info.backends, "problem", lambda: None)
    told = info.backend_info()
    assert (told["problems"], told["torch"]["wheel"]) == (["the driver's"], None)


def test_backend_info_reports_the_driver_library_or_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def bind(platform: str) -> str:
        asked.append(platform)
        if platform == "cuda":
            raise RuntimeError("libcuda is not there")
        return "libamdhip64.so"

    def refuse(_: str) -> None:
        raise ImportError("undefined symbol")

    source_tree = build_info.BuildInfo()
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.2.41133")
        patch.setitem(sys.modules, "flash_attn._launcher", None)
        assert info._launcher(source_tree) == (None, [])
        said = "import of flash_attn._launcher halted; None in sys.modules"
        assert info._launcher(WHEEL) == (None, [f"the launcher does not load ({said}): reinstall the wheel"])
        patch.setitem(sys.modules, "flash_attn._launcher", SimpleNamespace(bind=bind))
        assert info._launcher(WHEEL) == ("libamdhip64.so", [])
        patch.setattr(info.importlib, "import_module", refuse)
        broken = (None, ["the launcher does not load (undefined symbol): reinstall the wheel"])
        assert info._launcher(WHEEL) == info._launcher(source_tree) == broken
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", None)
        patch.setattr(torch.version, "cuda", None)
        patch.setitem(sys.modules, "flash_attn._launcher", SimpleNamespace(bind=bind))
        assert info._launcher(WHEEL) == (None, [])
        patch.setattr(torch.version, "cuda", "12.4")
        assert info._launcher(WHEEL) == (None, [])  # torch for ROCm is what is missing, and told elsewhere
        for_nvidia = build_info.BuildInfo(targets=("sm_90",))
        assert info._launcher(for_nvidia) == (None, ["no GPU driver: libcuda is not there"])
    assert asked == ["hip", "cuda", "cuda"]
