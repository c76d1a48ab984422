"""What a machine should be told, worked out a second time: from versions.toml itself, without `advice`.

It says what has to be true of an answer (its state, its index, its variable), not how the answer is worded.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rocm_wheels import tables

FILE = Path(__file__).resolve().parents[2] / "rocm_wheels" / "versions.toml"
DATA: dict[str, Any] = tables.parse(FILE.read_text(encoding="utf-8"), FILE.name)
GPUS = {name: row for name, row in DATA["targets"].items() if not name.endswith("-generic")}
# The GPUs that run a relative's kernels, by the GPUs' own tables: RDNA 2 runs gfx1030's, RDNA 3 gfx1100's.
RELATIVES = {**{f"gfx103{digit}": "10.3.0" for digit in "123456"}, **{f"gfx110{digit}": "11.0.0" for digit in "123"}}
LOADS_GENERIC = (6, 4)


class Expected(NamedTuple):
    """state: "install", "torch" or "refuse". index_url: of torch, "" for none. override: of the variable."""

    state: str
    index_url: str
    override: str = ""


@cache
def v(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def expected(gpu: str, system: str, python: str, torch: str, rocm: str) -> Expected:
    """For one GPU ("" if unknown) and minor versions; torch "": not installed; rocm "": not for ROCm. The installed
    torch is PyTorch's on Linux, AMD's on Windows.
    """
    row = GPUS.get(gpu)
    if v(python) < (3, 10) or (gpu and row is None) or (system == "windows" and row and not row.get("windows")):
        return Expected("refuse", "")
    index = _index(row, system, python, rocm)
    works = bool(torch and rocm) and v(torch) >= (2, 5) and v(rocm) >= (6, 1)
    override = ""
    if works and row:
        works = v(rocm) >= min(map(v, row["backends"].values()))
        lacks = "pytorch" not in row or v(rocm) < v(row["pytorch"])
        if system == "linux" and (lacks or ("universal" in row and v(rocm) < LOADS_GENERIC)):
            override = RELATIVES.get(gpu, "")
            works = works and bool(override)
    if works:
        return Expected("install", index, override)
    return Expected("torch", index) if index else Expected("refuse", "")


@cache
def newest_torch(python: str, since: str) -> tuple[str, str]:
    """(torch, directory) on PyTorch's index for a Python, of the preferred ROCm if it is new enough."""
    sure = [
        (rocm, torch, directory)
        for torch, release in DATA["torch"].items()
        if "uncertain" not in release and (not python or python in release["python"])
        for rocm, directory in release["rocm"].items()
        if "uncertain" not in DATA["rocm"][rocm] and v(rocm) >= v(since)
    ]
    preferred = [entry for entry in sure if entry[0] == DATA["advice"]["rocm"]]
    ordered = sorted(preferred or sure, key=lambda entry: (v(entry[0]), tuple(map(int, entry[1].split(".")))))
    return ordered[-1][1:] if ordered else ("", "")


def _index(row: dict[str, Any] | None, system: str, python: str, rocm: str) -> str:
    if system == "linux" and (row is None or "pytorch" in row):
        since = max(row["pytorch"], min(row["backends"].values(), key=v), key=v) if row else "6.1"
        if newest_torch(python, since)[1]:
            return f"https://download.pytorch.org/whl/{newest_torch(python, since)[1]}"
    if python not in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        return ""
    newer = rocm and v(rocm) >= (10, 0)
    return f"https://{'stable.repo.amd.com/rocm/whl-next' if newer else 'repo.amd.com/rocm/whl-multi-arch'}/"


def index_of(line: str) -> str:
    """The index that a line of pip names, "" if there is no line."""
    match = re.search(r"--index-url (\S+)", line)
    return match[1] if match else ""
