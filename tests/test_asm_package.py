"""AMD's assembly kernels as a compiler: the lock of their package, and their code objects in a store."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rocm_wheels.compile import kernels, sources, units
from rocm_wheels.compile.asm import package
from rocm_wheels.compile.asm.units import AssemblyKernels
from rocm_wheels.errors import DataError, MissingTool
from rocm_wheels.paths import ROOT

# Kept from run to run: its content depends only on its key.
CACHE = ROOT / "build" / "test-cache"


@pytest.fixture
def locked() -> package.Package:
    return package.load()


@pytest.fixture
def wheel(locked: package.Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the same paths and other code objects, which pip fetches."""
    path = tmp_path / "amd_aiter.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for one in locked.objects:
            archive.writestr(f"{locked.directory}/{one.place}", one.kernel)

    def fetch(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        assert command[-1] == f"{locked.name}=={locked.version}"
        (Path(command[command.index("--dest") + 1]) / path.name).write_bytes(path.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fetch)
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('target = "gfx942"', 'target = "gfx900"', "of gfx900 is not in flash_attn/kernels/assembly.py"),
        ('"asm-fwd-bf16-d128-plain"', '"asm-fwd-bf16-d999"', "asm-fwd-bf16-d128-plain of gfx942 is not in other.toml"),
    ],
)  # fmt: skip
def test_both_tables_have_the_same_kernels(tmp_path: Path, old: str, new: str, message: str) -> None:
    changed = tmp_path / "other.toml"
    changed.write_text(package.DATA_FILE.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        package.load(changed)


def test_a_package_with_a_wrong_digest_is_refused(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"amd_aiter.whl has sha256 [0-9a-f]+, amd_aiter.toml wants fe139d74"):
        package.directory(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "amd_aiter").iterdir())
    assert wheel.exists()


def test_a_code_object_with_a_wrong_digest_is_refused(
    wheel: Path, locked: package.Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    changed = package.Package(**{**vars(locked), "sha256": digest})
    monkeypatch.setattr(package, "load", lambda: changed)
    with pytest.raises(DataError, match=r"MI300/fwd_hd128_bf16_rtna.co has sha256"):
        package.directory(tmp_path / "cache")


def test_a_package_that_pip_cannot_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "no such index")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: failed)
    with pytest.raises(MissingTool, match="no such index") as caught:
        package.directory(tmp_path)
    assert "--without asm" in caught.value.remedy


def test_the_units_of_a_backend() -> None:
    """Assembly comes last, because the first compiler names the store. There are no units if a wheel excludes them."""
    result = units.find(["gfx942"], backend="ck", only="*-bf16-d128-plain*")
    assert [unit.name for unit in result if unit.compiler == "asm"] == [
        "asm-fwd-bf16-d128-plain", "asm-fwd-bf16-d128-plain-varlen", "asm-fwd-bf16-d128-plain-mi308",
        "asm-fwd-bf16-d128-plain-varlen-mi308", "asm-bwd-bf16-d128-plain", "asm-bwd-bf16-d128-plain-varlen",
    ]  # fmt: skip
    assert result[-1].compiler == "asm"
    without = units.find(["gfx942"], backend="ck", only="*-bf16-d128-plain*", without=["asm"])
    assert without == [unit for unit in result if unit.compiler != "asm"]
    assert not list(AssemblyKernels().units("gfx90a"))


def test_every_code_object_matches_its_row() -> None:
    """Its target, its threads, and the bytes of its arguments."""
    sizes = {"forward": 512, "backward": 272, "packed": 248, "window": 288, "backward950": 704}
    compiler = AssemblyKernels()
    compiler.prepare(CACHE)
    table = sources.module("kernels.assembly").KERNELS
    entries = {
        (target, unit.name): compiler.compile(unit, CACHE).entries[unit.name]
        for target in ("gfx942", "gfx950")
        for unit in compiler.units(target)
    }
    assert set(entries) == {(row.target, row.name) for row in table}
    for row in table:
        entry = entries[row.target, row.name]
        assert entry["threads"] == row.threads
        assert entry["params"] == f"K{sizes[row.layout]}"
        values = f"_hd{row.value_dim}" if row.value_dim else ""
        assert f"hd{row.head_dim}{values}_{row.dtype}" in entry["symbol"]
        assert ("group" in entry["symbol"]) is row.packed
        assert ("causal" in entry["symbol"]) is (row.mask == "causal")
        assert ("swa" in entry["symbol"]) is (row.mask == "window")


def test_no_code_object_needs_more_than_rocm_6_1() -> None:
    """ROCm 6.1's runtime refuses version 6, which some of AMD's code objects for gfx942 have."""
    compiler = AssemblyKernels()
    compiler.prepare(CACHE)
    versions = set()
    for unit in (unit for target in ("gfx942", "gfx950") for unit in compiler.units(target)):
        (place,) = unit.content
        theirs, ours = (package.directory(CACHE) / place).read_bytes(), compiler.compile(unit, CACHE).image
        versions.add(theirs[8])
        assert ours[8] == 3
        assert ours[:8] + ours[9:] == theirs[:8] + theirs[9:]
    assert versions == {3, 4}


def test_a_generic_target_keeps_its_version() -> None:
    header = bytearray(64)
    header[8], header[51] = 4, 1
    assert package.version_5(bytes(header)) == header
    header[51] = 0
    assert package.version_5(bytes(header))[8] == 3


def test_a_store_with_them(tmp_path: Path) -> None:
    only = "asm-fwd-bf16-d128-causal"
    (tmp_path / "amd_aiter").parent.mkdir(exist_ok=True)
    AssemblyKernels().prepare(CACHE)
    (tmp_path / "amd_aiter").symlink_to(CACHE / "amd_aiter")
    path = kernels.compile_store(["gfx942"], cache=tmp_path, jobs=1, only=only, backend="ck")["gfx942"]
    store = sources.module("core.store").Store(path)
    assert list(store.kernels) == [only]
    assert store.kernels[only]["group"] == "asm-fwd-d128"
    assert hashlib.sha256(store.image(only)).hexdigest() == store.kernels[only]["sha256"]
