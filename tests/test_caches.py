"""Caches between builds: no stale entries, nothing of a killed build, and hits after every unrelated change."""

from __future__ import annotations

import fnmatch
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from workflows import ROOT, load

from rocm_wheels.compile import cache, sources, units
from rocm_wheels.compile.asm import units as asm_units
from rocm_wheels.compile.ck import units as ck_units
from rocm_wheels.compile.compiler import Compiled, Unit
from rocm_wheels.compile.triton import units as triton_units
from rocm_wheels.wheel.workspace import work_directory


def unit(name: str) -> Unit:
    return Unit(target="gfx942", name=name, compiler="fake", kernels=(name,), content=(), toolchain="", key=name * 8)


def test_the_key_of_the_cache_names_what_kernels_are_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash in the workflow's cache key covers every file whose content is in the digest of a kernel."""
    used: set[str] = set()
    digest = sources.digest

    def seen(*files: str) -> str:
        used.update(f"flash_attn_src/{file}" for file in files)
        return digest(*files)

    def recipe(*modules: ModuleType) -> str:
        used.update(str(Path(str(module.__file__)).relative_to(ROOT)) for module in modules)
        return ""

    monkeypatch.setattr(sources, "digest", seen)
    for module in (asm_units, ck_units, triton_units):
        monkeypatch.setattr(module, "recipe", recipe)
    assert units.find(["gfx942"], backend="ck", only="*fwd-bf16-d64*")
    # Files read as data: the pinned sources of Composable Kernel and of AMD's package, and the compilers' versions.
    used |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "rocm_wheels/compile").rglob("*.toml")}
    used |= {"locks/build.txt", "flash_attn_src/flash_attn/kernels/targets.py"}
    assert len(used) > 15
    (restore,) = (step for step in load("build.yml")["jobs"]["build_kernels"]["steps"] if step.get("id") == "restored")
    hashed = re.findall(r"'([^']+)'", restore["with"]["key"])
    assert {file for file in used if not any(fnmatch.fnmatchcase(file, each) for each in hashed)} == set()
    # Kernels of other sources are restored too: each is stored under its own digest.
    first, second = (line for line in restore["with"]["restore-keys"].split("\n${{ matrix.cache }}"))
    assert re.findall(r"'([^']+)'", first) == hashed
    assert second == "-\n"


def test_old_kernels_are_pruned(tmp_path: Path) -> None:
    old, new = unit("o"), unit("n")
    for each in (old, new):
        cache.put(each, Compiled(b"code", {each.name: {}}), tmp_path)
    unfinished = new.path(tmp_path).with_name("x.co.0123.tmp")
    unfinished.write_bytes(b"co")
    assert cache.prune([new], tmp_path) == 3
    assert cache.read(old, tmp_path) is None
    assert cache.read(new, tmp_path) is not None
    assert not unfinished.exists()
    compile_ = next(step for step in load("build.yml")["jobs"]["build_kernels"]["steps"] if step["name"] == "Compile")
    assert "--prune" in compile_["run"], "a cache on GitHub grows with each source otherwise"


WORK = """
import sys, time
from pathlib import Path
from rocm_wheels.wheel.workspace import work_directory
with work_directory(Path(sys.argv[1])) as work:
    (work / "torch").write_text("gigabytes")
    print(work, flush=True)
    time.sleep(60)
"""


def test_the_next_build_deletes_the_files_of_a_killed_build(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORK, tmp_path], stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        with work_directory(tmp_path) as work:
            assert left.is_dir(), "the other build runs"
            assert work.is_dir()
            assert work != left
        assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, f"{left.name}.lock"]
        process.send_signal(signal.SIGKILL)
    assert (left / "torch").is_file()
    with work_directory(tmp_path) as work:
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_an_older_version_without_a_lock_stays(tmp_path: Path) -> None:
    """It is unknown whether its build still runs."""
    (tmp_path / "work-old").mkdir()
    with work_directory(tmp_path):
        pass
    assert (tmp_path / "work-old").is_dir()
