"""Adding is data: a GPU target and an operation are rows, and then have kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from rocm_wheels.compile import codeobject

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "flash_attn_src/flash_attn/kernels"
RUNTIME = "flash_attn_src/flash_attn/runtime"  # reads the store that is written

# gfx1013 is a GPU of RDNA 1 that this project does not serve, and `fwd-twin` the forward under another name.
TARGET_ROW = 'TARGETS |= _rows(_RDNA2, "gfx1013")\n'
OPERATION_ROW = """
OPERATIONS["fwd-twin"] = replace(
    _FORWARD, name="fwd-twin", dtypes=("bf16",), sizes=(64,), kinds=("plain",), tile_of="fwd"
)
"""
VERSIONS_TABLE = """
[targets.gfx1013]
family = "Oberon"
products = ["bc250"]
backends = { triton = "6.1" }
default = false
"""


def test_a_target_and_an_operation_are_rows(tmp_path: Path) -> None:
    for folder in ("rocm_wheels", KERNELS, RUNTIME):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, row in (
        (f"{KERNELS}/targets.py", TARGET_ROW),
        (f"{KERNELS}/operations.py", OPERATION_ROW),
        ("rocm_wheels/versions.toml", VERSIONS_TABLE),
    ):
        with (tmp_path / file).open("a") as opened:
            opened.write(row)
    arguments = ("--target", "gfx1013", "--only", "fwd-twin*", "--cache", "cache", "--jobs", "1")
    subprocess.run([sys.executable, "-m", "rocm_wheels", "compile", *arguments], cwd=tmp_path, check=True)
    (image,) = (tmp_path / "cache").rglob("*.co")
    found = codeobject.read(image.read_bytes())
    assert (found.target, found.symbol) == ("gfx1013", "attn_fwd")
