"""The same sources give the same bytes, in any directory and with any number of compile processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from rocm_wheels.paths import ROOT

KERNELS = "combine-*-d128"  # small kernels of several dtypes


def store(checkout: Path, *, jobs: int, home: Path) -> Path:
    """The store of some kernels, built by the command line of a checkout with caches of its own."""
    shutil.copytree(ROOT / "rocm_wheels", checkout / "rocm_wheels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "flash_attn_src",
        checkout / "flash_attn_src",
        ignore=shutil.ignore_patterns("__pycache__", "tests", "csrc"),
    )
    dropped = ("PYTHONPATH", "TRITON_CACHE_DIR", "ROCM_WHEELS_CACHE")
    inherited = {key: value for key, value in os.environ.items() if key not in dropped}
    command = [sys.executable, "-m", "rocm_wheels", "store", "gfx1030", "--only", KERNELS]
    done = subprocess.run(
        [*command, "--dist", "out", "--cache", "cache"],
        cwd=checkout,
        env={**inherited, "MAX_JOBS": str(jobs), "HOME": str(home), "PYTHONHASHSEED": str(jobs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 cached" in done.stdout, "both are compiled"
    return checkout / "out/gfx1030.zip"


def test_a_store_is_the_same_on_another_path_with_other_jobs(tmp_path: Path) -> None:
    one = store(tmp_path / "a", jobs=1, home=tmp_path)
    other = store(tmp_path / "a much longer path/of another checkout", jobs=2, home=tmp_path / "a")
    assert zipfile.ZipFile(one).namelist() == ["manifest.json", "triton-combine-d128"]
    assert one.read_bytes() == other.read_bytes()
