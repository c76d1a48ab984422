"""Composable Kernel compiled for real: a few kernels for two targets, read back and compared with the planner."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from rocm_wheels.compile import codeobject, inspect_store, kernels, sources
from rocm_wheels.compile.ck import compiler as ck_compiler
from rocm_wheels.compile.ck import instances as ck_instances
from rocm_wheels.compile.ck import planner as ck_planner
from rocm_wheels.compile.ck import toolchain as ck_toolchain
from rocm_wheels.errors import CompileFailed, MissingTool
from rocm_wheels.matrix import names
from rocm_wheels.matrix.plan import make_plan
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.paths import ROOT
from rocm_wheels.wheel import assemble, launcher, repair

# Kept from run to run: its content depends only on its key.
CACHE = ROOT / "build" / "test-cache"
# The forward of up to 128 that needs most registers, none of which may spill to memory, and small kernels of another
# operation, which test_rocm_runtime.py has from the same cache. A kernel takes half a minute, whatever its size.
SUBSETS = {"gfx942": "dot-bf16-d32-*", "gfx950": "fwd-bf16-d128-batch-mask-dropout"}


def store_of(target: str) -> Path:
    return kernels.compile_store([target], cache=CACHE, jobs=2, only=SUBSETS[target], backend="ck")[target]


@pytest.mark.parametrize("target", ["gfx942", pytest.param("gfx950", marks=pytest.mark.long)])
def test_code_objects_match_the_manifest_and_the_planner(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = sources.module("core.ck_planner")
    planner.library.cache_clear()
    monkeypatch.setattr(planner, "PATH", ck_planner.build(tmp_path, cache=CACHE))
    planned = planner.kernels()
    planner.library.cache_clear()
    store = sources.module("core.store").Store(store_of(target))
    assert store.manifest["compiler"]["name"] == "ziglang"
    assert store.manifest["planner"] == hashlib.sha256(planner.PATH.read_bytes()).hexdigest()
    assert set(store.kernels) == {i.name for _, some in ck_instances.units(SUBSETS[target]) for i in some}
    for name, image in store.images():
        entry = store.kernels[name]
        assert str(ROOT).encode() not in image
        symbols = ELFFile(io.BytesIO(image)).get_section_by_name(".symtab")
        assert isinstance(symbols, SymbolTableSection)
        assert symbols.get_symbol_by_name(f"{entry['symbol']}.kd")
        kernel = codeobject.read_all(image)[entry["symbol"]]
        assert kernel.target == target
        assert entry["params"] == f"B{kernel.argument_bytes}" == f"B{planned[name]}"
        assert (kernel.arguments, kernel.private, kernel.vgpr_spills) == (1, 0, 0)
        assert entry["threads"] == kernel.threads
        assert entry["isa"].get("mfma", 0) > 0 or not name.startswith("fwd")
        assert "scratch" not in entry["isa"]


def test_inspect_shows_each_kernel_of_an_object() -> None:
    report = inspect_store.report(store_of("gfx942"))
    assert "dot-bf16-d32-batch" in report
    assert "dot-bf16-d32-group" in report
    assert report.startswith("gfx942: 2 kernels")


def test_a_failing_instance_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, (good, bad)), *_ = ck_instances.units("dot-fp16-d32-*")
    entries = ck_compiler.source((good, bad)).replace("BackwardDot<fp16, 32, true>", "BackwardDot<fp16, 31, true>")
    monkeypatch.setattr(ck_compiler, "source", lambda _: entries)
    with pytest.raises(CompileFailed, match=r"^dot-fp16-d32-group \(unit some\) for gfx942 did not compile:\n.*error:"):
        ck_compiler.compile_unit("gfx942", "some", (good, bad), cache=CACHE, toolchain="pypi")


def test_a_kernel_that_calls_or_keeps_objects_in_memory_is_refused() -> None:
    instance = ck_instances.table()[0]
    kernel = codeobject.CodeObject(
        target="gfx942", symbol=instance.symbol, arguments=1, vgprs=1, agprs=0, sgprs=1, vgpr_spills=0, sgpr_spills=0,
        private=208, lds=0,
    )  # fmt: skip
    with pytest.raises(CompileFailed, match=r"calls functions \(s_swappc_b64\); it uses 208 bytes of private memory"):
        ck_compiler._check("gfx942", instance, kernel, "\n\ts_swappc_b64 s[30:31], s[0:1]\n")
    with pytest.raises(CompileFailed, match="it is for gfx942"):
        ck_compiler._check("gfx950", instance, kernel, "")


def test_the_body_of_one_kernel() -> None:
    assembly = "\na:\n\ts_nop 0\n.Lfunc_end0:\n\nab:\n\tv_nop\n.Lfunc_end1:\n"
    assert ck_compiler.function(assembly, "a").split() == ["a:", "s_nop", "0"]
    assert ck_compiler.function(assembly, "ab").split() == ["ab:", "v_nop"]


def test_the_number_of_the_instruction_set() -> None:
    """The numbers in LLVM's AMDGPU.h and ROCm's oclc_isa_version files."""
    assert [ck_toolchain._isa(target) for target in ("gfx90a", "gfx942", "gfx950", "gfx1201")] == [
        9010,
        9402,
        9500,
        12001,
    ]


def test_rocm_without_its_clang_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.raises(MissingTool, match=f"ROCm's clang is missing: no {tmp_path}/llvm/bin/clang"):
        ck_toolchain._rocm()


def test_rocms_clang_brings_its_own_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = tmp_path / "llvm" / "bin"
    tools.mkdir(parents=True)
    for tool in ("clang", "ld.lld"):
        path = tools / tool
        path.write_text("#!/bin/sh\necho 'AMD clang version 18.0.0git (roc-6.2)'\n")
        path.chmod(0o755)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    clang = ck_toolchain._rocm()
    assert (clang.version, clang.command) == ("ROCm clang 18.0.0git", (str(tools / "clang"),))
    assert clang.library("gfx942", tmp_path) == []


@pytest.mark.long
def test_the_same_unit_gives_the_same_bytes(tmp_path: Path) -> None:
    with zipfile.ZipFile(store_of("gfx942")) as archive:
        (name,) = (name for name in archive.namelist() if name != "manifest.json")
        before = archive.read(name)
    shutil.copytree(CACHE / "composable_kernel", tmp_path / "composable_kernel")
    again = kernels.compile_store(["gfx942"], cache=tmp_path, jobs=1, only=SUBSETS["gfx942"], backend="ck")["gfx942"]
    assert again.read_bytes() == store_of("gfx942").read_bytes()
    with zipfile.ZipFile(again) as archive:
        assert archive.read(name) == before


# A user's run of the wheel: its extension module, and a call as far as a CPU can execute it.
IN_THE_WHEEL = """
import json, sys
import torch
import flash_attn, flash_attn_2_cuda
from flash_attn.attention.backends import recording
from flash_attn.core import store
assert flash_attn.__file__.startswith(sys.argv[1])
held = store.open_store("gfx950").kernels
q = torch.randn(1, 100, 4, 128, dtype=torch.bfloat16)
with recording.record("gfx950") as launches:
    flash_attn_2_cuda.fwd(q, q, q, None, None, 0.1, 0.125, False, -1, -1, 0.0, False, None)
    flash_attn.flash_attn_func(q, q, q, 0.1)
    flash_attn.flash_attn_func(q.float(), q.float(), q.float())
for launch in launches[:2]:
    assert held[launch.kernel]["params"] == f"B{len(launch.argument)}"
print(json.dumps([[launch.kernel for launch in launches], flash_attn.backend_info()["backend"]]))
"""


@pytest.mark.long
def test_a_wheel_of_them_plans_calls(data: Versions, tmp_path: Path) -> None:
    target = {"PYTORCH_ROCM_ARCH": "gfx950"}
    plan = make_plan(data, flash_attn="2.8.3", python="3.11", torch="2.13.0", rocm="7.2", env=target)
    built = [build(tmp_path, cache=CACHE) for build in (launcher.build, ck_planner.build)]
    raw = assemble.assemble(plan, {"gfx950": store_of("gfx950")}, built[0], tmp_path / "raw", planner=built[1])
    repaired = repair.repair(raw, tmp_path)
    assert "manylinux_2_17_x86_64" in names.parse(repaired.name).platforms
    assert names.parse(repaired.name).backend == "ck"
    with zipfile.ZipFile(repaired) as archive:
        archive.extractall(tmp_path / "installed")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FLASH_ATT")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore:the CK backend cannot do:RuntimeWarning", "-c", IN_THE_WHEEL, tmp_path],
        env={**environment, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launched, backend = json.loads(done.stdout)
    assert launched == [SUBSETS["gfx950"], SUBSETS["gfx950"], "triton.forward"]
    assert backend == "ck"
