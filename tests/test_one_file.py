"""`python -m rocm_wheels firstlight`: one Python file with the package, its kernels and a launcher by ctypes."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import fake_parts
import pytest
import tools

from amdgpu_simulator.debian import UnavailableError
from amdgpu_simulator.hip import process as hip
from rocm_wheels import cli
from rocm_wheels.compile import kernels
from rocm_wheels.paths import ROOT
from rocm_wheels.wheel import one_file

SUPPORT = ROOT / "tests" / "support"


def test_the_file_is_the_package_with_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, output = fake_parts.store(tmp_path, "gfx1201"), tmp_path / "firstlight.py"
    asked: dict[str, object] = {}

    def compiled(targets: list[str], **options: object) -> dict[str, Path]:
        asked.update(options, targets=targets)
        return {"gfx1201": store}

    monkeypatch.setattr(kernels, "compile_store", compiled)
    command = ["firstlight", "--target", "gfx1201", "--output", str(output), "--cache", str(tmp_path / "cache")]
    assert cli.main(command) == 0
    assert (asked["targets"], asked["only"]) == (("gfx1201",), one_file.KERNELS)
    seen: dict[str, object] = {}

    class Started:
        def __init__(self, command: list[str]) -> None:
            package = Path(command[3], "flash_attn")
            seen.update(
                command=[command[1], *command[4:]],
                build=json.loads((package / "_build_info.json").read_text(encoding="utf-8")),
                kernels=(package / "_kernels/gfx1201.zip").read_bytes(),
                launcher=(package / "_launcher.py").read_bytes(),
                package=package,
            )

        def wait(self) -> int:
            return 1

    monkeypatch.setattr(sys, "argv", ["firstlight.py", "--gpu", "1"])
    with mock.patch.object(subprocess, "Popen", Started), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(output), run_name="__main__")
    assert ended.value.code == 1
    assert seen["command"] == ["-c", "--gpu", "1"]
    assert seen["build"]["targets"] == ["gfx1201"]  # type: ignore[index]
    assert seen["build"]["some_kernels"] is True  # type: ignore[index]
    assert seen["kernels"] == store.read_bytes()
    assert seen["launcher"] == (ROOT / "rocm_wheels/wheel/ctypes_launcher.py").read_bytes()
    assert not seen["package"].exists()  # type: ignore[attr-defined]
    monkeypatch.setattr(one_file, "MOST_BYTES", 1000)
    assert cli.main(command) == 10


@pytest.mark.long
def test_a_gpu_is_measured_with_the_file_alone(tmp_path: Path) -> None:
    """AMD's HIP runtime over the pretended driver: tests/support/torch_on_hip.py. The file has the probes alone."""
    try:
        hip.fetch("6.4")
    except UnavailableError as problem:
        tools.missing(str(problem))
    store = kernels.compile_store(["gfx1030"], cache=ROOT / "build/test-cache", jobs=1, only="probe-*")["gfx1030"]
    one_file.write("gfx1030", "2.8.3", store, tmp_path / "firstlight.py")
    shutil.copyfile(SUPPORT / "torch_on_hip.py", tmp_path / "sitecustomize.py")
    command, environment = hip.command("6.4", "gfx1030", [], gpus=2)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    environment |= {"PRETEND": "gfx1030:2", "PRETEND_PYTHON": str(python), "PYTHONPATH": paths}
    run = [str(python), "firstlight.py", "--gpu", "1"]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "exchange through LDS                                      31.0 ns" in done.stdout, done.stderr
    report = json.loads((tmp_path / "flash-attn-firstlight-gfx1030.json").read_text(encoding="utf-8"))
    assert report["wheel"]["label"] == "onefile"
    assert report["probes"][0] == {"probe": "vector", "ns": 2.0}
    assert report["trouble"] == ""
    assert report["troubles"] == {}
    assert all("it has those that firstlight times" in line["failure"] for line in report["shapes"])
