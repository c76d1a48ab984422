"""The launcher, the kernels and calls of flash_attn through AMD's own HIP and ROCr, on a stand-in for the kernel
driver.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import fake_parts
import pytest
import tools

from amdgpu_simulator import __main__
from amdgpu_simulator.debian import UnavailableError
from amdgpu_simulator.hip import process as hip
from rocm_wheels.compile import kernels, sources
from rocm_wheels.paths import ROOT
from rocm_wheels.wheel import assemble

# Kept from run to run: its content depends only on its key.
CACHE = ROOT / "build" / "test-cache"
RELEASE = "6.4"
CASES = "tests/support/hip_cases.py"


@pytest.fixture(scope="module")
def _runtime() -> None:
    """AMD's runtime. Raises as `tools.missing` if it cannot be fetched."""
    try:
        hip.fetch(RELEASE)
    except UnavailableError as problem:
        tools.missing(str(problem))


def run(directory: Path, target: str, *arguments: str, gpus: int = 1, **variables: str) -> str:
    """Runs pytest with a simulated GPU. Returns the output."""
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    command, environment = hip.command(RELEASE, target, words, gpus=gpus)
    output = directory / "output"
    # Into a file, also for children: a child that outlives the process would keep a pipe open.
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**environment, **variables}, stdout=file, stderr=file, start_new_session=True
        )
        try:
            process.wait(timeout=600)
        finally:
            if process.poll() is None or process.returncode < 0:
                os.killpg(process.pid, signal.SIGKILL)
    text = output.read_text(encoding="utf-8", errors="replace")
    assert process.returncode == 0, text
    return text


@pytest.mark.usefixtures("_runtime")
def test_the_launcher_and_every_kernel_of_a_store(kernel_store: Path, tmp_path: Path) -> None:
    cases = (CASES, "-k", "not refused")
    assert "7 passed" in run(tmp_path, "gfx1030", *cases, gpus=2, STORE=str(kernel_store))


@pytest.mark.usefixtures("_runtime")
def test_attention_by_the_kernels_of_a_wheel(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`python -m amdgpu_simulator wheel`; a GPU without kernels is reported."""
    stores = kernels.compile_store(["gfx1030"], cache=CACHE, jobs=1, only="?wd-[bd]*f16-d64")
    launcher = tmp_path / "_launcher.abi3.so"
    launcher.write_bytes(b"\x7fELF, where the launcher of these sources is taken")
    wheel = assemble.assemble(fake_parts.plan("gfx1030"), stores, launcher, tmp_path)
    capfd.readouterr()
    __main__.main(["wheel", str(wheel), "--hip", RELEASE, "--gpu", "gfx1030", "--gpu", "gfx1100"])
    right, other = capfd.readouterr().out.splitlines()
    assert re.fullmatch(
        r"gfx1030: HIP 6\.4, gfx1030\.zip: right, 0\.\d\d of the allowed error: "
        "fwd-bf16-d64, bwd-dq-bf16-d64, bwd-dkdv-bf16-d64",
        right,
    )
    assert other == "gfx1100: HIP 6.4 finds no kernels for it in the wheel"


@pytest.mark.usefixtures("_runtime")
def test_a_gpu_of_another_target(kernel_store: Path, tmp_path: Path) -> None:
    assert "1 passed" in run(tmp_path, "gfx1100", CASES, "-k", "refused", STORE=str(kernel_store))


@pytest.mark.usefixtures("_runtime")
@pytest.mark.parametrize(
    ("generic", "gpu"),
    [
        pytest.param("gfx10-1-generic", "gfx1012", marks=pytest.mark.long),
        pytest.param("gfx10-3-generic", "gfx1036", marks=pytest.mark.long),
        ("gfx11-generic", "gfx1103"),
        pytest.param("gfx11-generic", "gfx1152", marks=pytest.mark.long),  # the code that gfx1103 takes
        pytest.param("gfx12-generic", "gfx1200", marks=pytest.mark.long),
    ],
)
def test_a_generic_target_on_a_gpu_of_its_family(generic: str, gpu: str, tmp_path: Path) -> None:
    path = kernels.compile_store([generic], cache=tmp_path, jobs=1, only="combine-bf16-d128*")[generic]
    assert generic in sources.module("kernels.targets").serving_targets(gpu, RELEASE)
    assert "1 passed" in run(tmp_path, gpu, CASES, "-k", "every_launch", STORE=str(path))


@pytest.mark.usefixtures("_runtime")
def test_kernels_of_composable_kernel(tmp_path: Path) -> None:
    """Two kernels of one code object, which once lacked a section that the loader needs."""
    only = "dot-bf16-d32-*"
    path = kernels.compile_store(["gfx942"], cache=CACHE, jobs=1, only=only, backend="ck")["gfx942"]
    assert "1 passed" in run(tmp_path, "gfx942", CASES, "-k", "every_launch", STORE=str(path))


@pytest.mark.usefixtures("_runtime")
def test_assembly_kernels(tmp_path: Path) -> None:
    """HIP takes all their arguments as one buffer, although their metadata lists up to 158 arguments."""
    only = "asm-*-bf16-d128-causal"
    path = kernels.compile_store(["gfx942"], cache=CACHE, jobs=1, only=only, backend="ck")["gfx942"]
    assert "2 passed" in run(tmp_path, "gfx942", CASES, "-k", "every_launch or capture", STORE=str(path))


@pytest.mark.long
@pytest.mark.usefixtures("_runtime")
def test_attention_from_the_call_to_the_packets(tmp_path: Path) -> None:
    """FP8, with four kernels and arguments that HIP adds: the public API, the launcher, HIP, then the simulator with
    the packets that HIP wrote.
    """
    case = "flash_attn_src/tests/test_amd_code.py::test_fp8[gfx942-fp8e4b8]"
    assert "1 passed" in run(tmp_path, "gfx942", case)
