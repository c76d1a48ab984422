"""The commands of the README, for real: a wheel is compiled, assembled, repaired, installed and tested.

Of Triton kernels alone: Composable Kernel takes the better part of an hour, so of that tests compile a few kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def environment(kernel_cache: Path) -> dict[str, str]:
    """Of a user with one GPU target in mind."""
    keep = {key: value for key, value in os.environ.items() if key not in ("GPU_ARCHS", "BUILD_TRITON_BACKEND")}
    asked = {"PYTORCH_ROCM_ARCH": "gfx1030", "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
    return {**keep, **asked, "ROCM_WHEELS_CACHE": str(kernel_cache)}


def build(environment: dict[str, str], dist: Path, *cell: str) -> tuple[str, Path]:
    """Runs build_rocm.sh from another directory; its output and the wheel."""
    done = subprocess.run(
        [ROOT / "build_rocm.sh", *cell, "--dist", dist],
        env=environment, cwd=dist, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (wheel,) = dist.glob("flash_attn-*.whl")
    return done.stdout, wheel


@pytest.fixture(scope="module")
def first(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return build(environment, tmp_path_factory.mktemp("first"), "2.8.3", "3.11", "2.5.1", "6.2")


def test_the_command_of_the_readme_ends_with_a_tested_wheel(first: tuple[str, Path]) -> None:
    output, wheel = first
    assert wheel.name.startswith("flash_attn-2.8.3+rocm62torch2.5triton-cp311-cp311-manylinux")
    verdict = json.loads(Path(f"{wheel}.verdict.json").read_text(encoding="utf-8"))
    assert verdict["tests"]["failed"] == 0
    assert verdict["tests"]["passed"] >= 40
    assert {stage: entry["status"] for stage, entry in verdict["stages"].items() if stage != "gpu"} == dict.fromkeys(
        ["repaired", "installed with pip", "installed with uv", "code objects", "import", "cpu numerics"],
        "passed",
    )
    for word in (
        str(wheel),
        "gfx1030",
        "pip install",
        "MiB" if wheel.stat().st_size >= 2**20 else "KiB",
        "passed",
    ):
        assert word in output


def test_another_cell_compiles_nothing_and_holds_the_same_kernels(
    environment: dict[str, str], first: tuple[str, Path], tmp_path: Path
) -> None:
    output, wheel = build(environment, tmp_path, "2.7.4", "3.11", "2.5.1", "6.2")
    assert wheel.name.startswith("flash_attn-2.7.4+rocm62torch2.5triton")
    assert "compiled" not in output

    def store(path: Path) -> bytes:
        with zipfile.ZipFile(path) as archive:
            return archive.read("flash_attn/_kernels/gfx1030.zip")

    assert store(wheel) == store(first[1])
