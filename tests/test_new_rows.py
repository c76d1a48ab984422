"""A GPU target and an operation are data: a row is enough to compile kernels for them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from amdgpu_simulator.isa import targets as simulated
from rocm_wheels.compile import codeobject

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "flash_attn_src/flash_attn/kernels"
RUNTIME = "flash_attn_src/flash_attn/core"  # reads the store that is written

# gfx1013 is a GPU of RDNA 1 that this project does not support. `fwd-twin` is the forward under another name.
TARGET_ROW = 'TARGETS |= _rows(_RDNA2, "gfx1013", hazards=_GFX101, elf_machine=0x42)\n'
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


# gfx1300 does not exist. No compiler knows it, and the simulator does not know its instructions.
UNBUILT_ROW = """
TARGETS |= _rows(_RDNA4, "gfx1300", elf_machine=0x7F, registers=2048, generic="gfx13-generic")
TARGETS |= _rows(_RDNA4, "gfx13-generic", elf_machine=0x7E, made_for="gfx1300")
"""
UNBUILT_PROVIDERS = """
ROWS += (Row("gfx13-generic", "fwd", _BOTH, (1, 128), _ANY, 1, (TRITON,), "no cycles"),)
"""
# Prints the manifest of a store without kernels, and the message for a machine with a gfx1300.
ASK = """
import io, json, zipfile
from rocm_wheels.compile import sources, store
from rocm_wheels.matrix import versions

packed = store.archive("gfx13-generic", ("triton", "0"), {})
manifest = json.loads(zipfile.ZipFile(io.BytesIO(packed)).read("manifest.json"))
serving = sources.module("kernels.targets").serving_targets("gfx1300:xnack-", "7.2")
print(json.dumps([manifest, serving, versions.load().targets["gfx1300"].products]))
"""


def _copy(root: Path, rows: dict[str, str]) -> None:
    """The parts of the repository that compile, with rows appended to their files. The adviser is none of them: what
    compiles must not need it.
    """
    for folder in ("rocm_wheels", KERNELS, RUNTIME):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, row in rows.items():
        with (root / file).open("a") as opened:
            opened.write(row)


def test_a_made_up_gpu_is_rows_in_the_manifest_of_its_store(tmp_path: Path) -> None:
    table = VERSIONS_TABLE.replace("gfx1013", "gfx1300").replace("Oberon", "RDNA 5")
    _copy(
        tmp_path,
        {
            f"{KERNELS}/targets.py": UNBUILT_ROW,
            f"{KERNELS}/providers.py": UNBUILT_PROVIDERS,
            "rocm_wheels/versions.toml": table,
        },
    )
    done = subprocess.run([sys.executable, "-c", ASK], cwd=tmp_path, capture_output=True, text=True, check=True)
    manifest, serving, products = json.loads(done.stdout)
    assert (serving, products) == (["gfx1300", "gfx13-generic"], ["bc250"])
    facts, choice = manifest["facts"], manifest["choice"]
    assert (facts["gpus"], facts["min_hip"], facts["elf_machine"]) == (["gfx1300"], [6, 4], 0x7E)
    assert [row["sources"] for row in choice["rows"]] == [["triton"]]
    with pytest.raises(ValueError, match="does not know the instructions of gfx1300"):
        simulated.get("gfx1300")


def test_a_target_and_an_operation_are_rows(tmp_path: Path) -> None:
    _copy(
        tmp_path,
        {
            f"{KERNELS}/targets.py": TARGET_ROW,
            f"{KERNELS}/operations.py": OPERATION_ROW,
            "rocm_wheels/versions.toml": VERSIONS_TABLE,
        },
    )
    arguments = ("--target", "gfx1013", "--only", "fwd-twin*", "--cache", "cache", "--jobs", "1")
    subprocess.run([sys.executable, "-m", "rocm_wheels", "compile", *arguments], cwd=tmp_path, check=True)
    (image,) = (tmp_path / "cache").rglob("*.co")
    result = codeobject.read(image.read_bytes())
    assert (result.target, result.symbol) == ("gfx1013", "attn_fwd")
