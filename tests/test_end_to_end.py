"""The command of the README, for real: a wheel is compiled, assembled, repaired, installed and tested.

Of Triton kernels alone: Composable Kernel takes the better part of an hour, so of that tests compile a few kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent


def test_the_command_of_the_readme_ends_with_a_tested_wheel(
    kernel_cache: Path, kernel_store: Path, tmp_path: Path
) -> None:
    keep = {key: value for key, value in os.environ.items() if key not in ("GPU_ARCHS", "BUILD_TRITON_BACKEND")}
    asked = {"PYTORCH_ROCM_ARCH": "gfx1030", "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
    done = subprocess.run(
        [ROOT / "build_rocm.sh", "2.8.3", "3.11", "2.5.1", "6.2", "--dist", tmp_path],
        env={**keep, **asked, "ROCM_WHEELS_CACHE": str(kernel_cache)}, cwd=tmp_path, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (wheel,) = tmp_path.glob("flash_attn-*.whl")
    assert wheel.name.startswith("flash_attn-2.8.3+rocm62torch2.5triton-cp311-cp311-manylinux")
    verdict = json.loads(Path(f"{wheel}.verdict.json").read_text(encoding="utf-8"))
    assert verdict["tests"]["failed"] == 0
    assert verdict["tests"]["passed"] >= 40
    assert {stage: entry["status"] for stage, entry in verdict["stages"].items() if stage != "gpu"} == dict.fromkeys(
        ["repaired", "installed with pip", "installed with uv", "code objects", "import", "cpu numerics"],
        "passed",
    )
    size = "MiB" if wheel.stat().st_size >= 2**20 else "KiB"
    for word in (str(wheel), "gfx1030", "pip install", size, "passed"):
        assert word in done.stdout
    with ZipFile(wheel) as archive:
        assert archive.read("flash_attn/_kernels/gfx1030.zip") == kernel_store.read_bytes()
