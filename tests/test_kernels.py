"""The compile stage with real compilers: the smallest kernels, for an AMD target of each wave size and an NVIDIA
target.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import pytest

from rocm_wheels.compile import cache as unit_cache
from rocm_wheels.compile import codeobject, inspect_store, kernels, sources, store, units, workers
from rocm_wheels.errors import CompileFailed, DataError
from rocm_wheels.paths import FLASH_ATTN_SRC
from rocm_wheels.wheel import assemble

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("gfx942", "gfx1100", "sm_90")
SMALL = "probabilities-*16-d[36]*"  # d32 and d64, of fp16 and bf16


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    cache = tmp_path_factory.mktemp("cache")
    return cache, kernels.compile_store(TARGETS, cache=cache, jobs=2, only=SMALL)


def test_the_store_of_each_target_holds_what_its_manifest_says(built: tuple[Path, dict[str, Path]]) -> None:
    _, stores = built
    assert set(stores) == set(TARGETS)
    for target, path in stores.items():
        assert path.name == f"{target}.zip"
        store = sources.module("core.store").Store(path)
        assert store.target == store.manifest["target"] == target
        dims = (32, 64)
        assert set(store.kernels) == {f"probabilities-{dtype}-d{d}" for dtype in ("fp16", "bf16") for d in dims}
        with zipfile.ZipFile(path) as archive:
            assert set(archive.namelist()) == {"manifest.json", *(f"triton-probabilities-d{d}" for d in dims)}
        images = dict(store.images())
        assert set(images) == set(store.kernels)
        for name, image in images.items():
            assert store.image(name) == image
            assert codeobject.read(image).target == target
            assert str(ROOT).encode() not in image
            entry = store.kernels[name]
            assert entry["threads"] == 4 * (64 if target == "gfx942" else 32)
            assert entry["params"].startswith("P" * 10 + "fff" + "i" * 6)


def test_a_generic_target_shares_the_code_of_its_base_target(
    built: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    pair, cache = ("gfx1100", "gfx11-generic"), built[0]
    alone = kernels.compile_store(pair, cache=cache, jobs=2, only=SMALL)
    together = kernels.compile_store(pair, cache=cache, jobs=2, only=SMALL, together=True)
    assert together["gfx1100"] == alone["gfx1100"]
    reader = sources.module("core.store")
    expected = dict(reader.Store(alone["gfx11-generic"]).images())
    beside = assemble.collect(together, tmp_path / "wheel")
    result = reader.Store(beside / "gfx11-generic.zip")
    assert result.manifest["base"] == "gfx1100"
    assert dict(result.images()) == expected == {name: result.image(name) for name in expected}
    for name, image in expected.items():
        code = result.kernels[name]["code"]
        assert (code["at"], code["size"]) == store.instructions(image)
        assert result.kernels[name]["size"] + code["size"] == len(image)
    assert "gfx11-generic: 4 kernels" in inspect_store.report(beside / "gfx11-generic.zip")
    (beside / "gfx1100.zip").unlink()
    with pytest.raises(reader.KernelError, match=r"cannot be read from .*gfx1100\.zip .*: reinstall the wheel"):
        result.image(name)


def test_a_second_build_compiles_nothing(built: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, stores = built

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernels, "compile_units", refuse)
    assert kernels.compile_store(TARGETS, cache=cache, jobs=2, only=SMALL) == stores


def test_backends_with_the_same_kernels_keep_stores_of_their_own(built: tuple[Path, dict[str, Path]]) -> None:
    """Otherwise two parallel builds of one target with different backends would take a store that records the other
    build's compiler."""
    cache, stores = built
    expected = units.find(["gfx942"], only=SMALL)
    other = store.pack(expected, cache, ("ziglang", "0.15.2, triton 3.7.1"))
    assert store.pack(expected, cache, units.compiler("triton")) == stores["gfx942"] != other
    result = [json.loads(zipfile.ZipFile(path).read("manifest.json")) for path in (stores["gfx942"], other)]
    assert [manifest["compiler"]["name"] for manifest in result] == ["triton", "ziglang"]
    assert result[0]["kernels"] == result[1]["kernels"]


def test_a_damaged_object_is_compiled_again_and_gives_the_same_archive(
    built: tuple[Path, dict[str, Path]],
) -> None:
    cache, stores = built
    before = stores["gfx942"].read_bytes()
    first, second, third, *_ = (unit.path(cache) for unit in units.find(["gfx942"], only=SMALL))
    first.write_bytes(first.read_bytes()[:-1])
    entries = second.with_suffix(".json")
    entries.write_text(entries.read_text().replace("sha256", "sha255"))
    third.with_suffix(".json").write_text("3")
    kernels.compile_store(["gfx942"], cache=cache, jobs=1, only=SMALL)
    assert stores["gfx942"].read_bytes() == before


def test_a_killed_build_continues_and_gives_the_same_bytes(built: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    _, stores = built
    command = [
        sys.executable, "-c",
        "import sys; from pathlib import Path; from rocm_wheels.compile.kernels import compile_store\n"
        "if __name__ == '__main__':\n"
        f"    compile_store(['gfx942'], cache=Path(sys.argv[1]), jobs=1, only={SMALL!r})",
        str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    wait_for(lambda: list(tmp_path.glob("kernels/*/*.json")))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("kernels/*/*.json")}
    assert 0 < len(kept) < 4
    resumed = kernels.compile_store(["gfx942"], cache=tmp_path, jobs=1, only=SMALL)
    assert resumed["gfx942"].read_bytes() == stores["gfx942"].read_bytes()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_a_build_that_is_ended_leaves_no_process(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """SIGTERM goes only to the build, as if a job was cancelled. Compiled kernels stay; temporary files are deleted."""
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-m", "rocm_wheels", "compile", "--target", "gfx942", "--jobs", "2", "--only", "norm-*"]
    environment = {**os.environ, "ROCM_WHEELS_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "scratch")}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    wait_for(lambda: list(tmp_path.glob("cache/kernels/*/*.json")))
    workers = children(process.pid)
    assert len(workers) >= 2
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    if number != signal.SIGKILL:
        assert said == b"error: interrupted\nRun it again: it goes on from the kernels that are compiled.\n"
        assert list((tmp_path / "scratch").iterdir()) == []


def children(parent: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("changed", "others", "same"),
    [
        ("tiles", ("fwd-bf16-d64", "bwd-dq-bf16-d64", "decode-bf16-d64"), "combine-bf16-d128"),
        ("dropout", ("fwd-bf16-d64", "probabilities-fp16-d64"), "decode-bf16-d64"),
        ("lengths", ("decode-bf16-d64", "append-bf16-d64"), "fwd-bf16-d64"),
        ("common", ("fwd-bf16-d64", "cross-entropy-fwd-fp16-d4096", "norm-fwd-bf16-d1024"), None),
        ("forward", ("fwd-bf16-d64",), "bwd-dq-bf16-d64"),
    ],
)
def test_a_kernel_is_recompiled_if_its_sources_change(
    changed: str,
    others: tuple[str, ...],
    same: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    folder = "flash_attn/kernels"
    shutil.copytree(FLASH_ATTN_SRC / folder, tmp_path / folder)

    def read_anew() -> None:
        sources.digest.cache_clear()
        sources.kernel_files.cache_clear()

    request.addfinalizer(read_anew)

    def keys() -> dict[str, str]:
        read_anew()
        return {
            unit.name: unit.key for name in filter(None, (*others, same)) for unit in units.find(["gfx942"], only=name)
        }

    before = keys()
    monkeypatch.setattr(sources, "FLASH_ATTN_SRC", tmp_path)
    assert keys() == before
    with (tmp_path / folder / f"{changed}.py").open("a") as file:
        file.write("# and more")
    after = keys()
    assert all(after[name] != before[name] for name in others)
    assert same is None or after[same] == before[same]


def test_a_kernel_is_compiled_again_where_its_row_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> dict[str, str]:
        return {unit.name: unit.key for unit in units.find(["gfx942"], only="norm-fwd-*bf16-d1024")}

    before = keys()
    rows = sources.module("kernels.operations").OPERATIONS
    changed = dataclasses.replace(rows["norm-fwd-r32"], fp32_arguments=("weight", "bias"))
    monkeypatch.setitem(rows, "norm-fwd-r32", changed)
    after = keys()
    assert [name for name in before if after[name] != before[name]] == ["norm-fwd-r32-bf16-d1024"]


def test_a_kernel_is_compiled_again_where_the_launcher_spells_a_type_differently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keys() -> set[str]:
        return {unit.key for unit in units.find(["gfx942"], only="norm-fwd-bf16-d1024")}

    before = keys()
    monkeypatch.setitem(sources.module("kernels.operation").LAUNCH_LETTERS, "i32", "I")
    assert not keys() & before


@pytest.mark.parametrize(("count", "only"), [(1, None), *((count, "*-bf16-d64*") for count in (2, 3, 7))])
def test_the_shards_are_a_partition_of_the_whole(count: int, only: str | None) -> None:
    targets = ["gfx90a", "gfx942"]
    whole = units.find(targets, only=only)
    shards = [units.find(targets, only=only, shard=(index, count)) for index in range(1, count + 1)]
    assert sorted(unit.key for shard in shards for unit in shard) == sorted(unit.key for unit in whole)
    assert len({unit.key for unit in whole}) == len(whole)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_sharded_builds_fill_one_cache(built: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    _, stores = built
    for index in (1, 2):
        assert kernels.compile_store(["gfx1100"], cache=tmp_path, jobs=1, shard=(index, 2), only=SMALL) == {}
    whole = kernels.compile_store(["gfx1100"], cache=tmp_path, jobs=1, only=SMALL)
    assert whole["gfx1100"].read_bytes() == stores["gfx1100"].read_bytes()


def test_a_pattern_without_a_match_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CompileFailed, match=r"no kernel for gfx942 matches 'fwd-fp8\*'"):
        kernels.compile_store(["gfx942"], cache=tmp_path, jobs=1, only="fwd-fp8*")
    with pytest.raises(CompileFailed, match="fwd-fp8"):
        kernels.compile_store(["gfx942"], cache=tmp_path, jobs=1, only="fwd-fp8*", shard=(2, 2))


def test_a_shard_may_be_empty(tmp_path: Path) -> None:
    assert kernels.compile_store(["gfx942"], cache=tmp_path, jobs=1, only="fwd-fp16-d32", shard=(2, 2)) == {}


def test_a_target_without_a_match_is_an_error(built: tuple[Path, dict[str, Path]]) -> None:
    cache, _ = built
    with pytest.raises(CompileFailed, match=r"no kernel for gfx1100 matches 'fp8-amax-fp16\*'"):
        kernels.compile_store(["gfx942", "gfx1100"], cache=cache, jobs=1, only="fp8-amax-fp16*")


def test_a_file_that_cannot_be_written_is_reported_with_its_place(tmp_path: Path) -> None:
    """Simulates a full disk."""
    (unit,) = units.find(["gfx942"], only="probabilities-fp16-d32")
    unit.path(tmp_path).with_suffix(".json").mkdir(parents=True)
    with pytest.raises(CompileFailed, match="compiling probabilities-fp16-d32 for gfx942: Is a directory") as caught:
        kernels.compile_store(["gfx942"], cache=tmp_path, jobs=1, only=unit.name)
    assert f"Files go to {tmp_path} (--cache) and " in caught.value.remedy
    assert not list(tmp_path.rglob("*.tmp"))


def test_builds_in_two_containers_may_fill_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with equal numbers compile the same kernel at the same time."""
    path, replace = tmp_path / "unit.co", Path.replace

    def meanwhile(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        unit_cache.write(path, b"theirs")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", meanwhile)
    unit_cache.write(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert list(tmp_path.iterdir()) == [path]


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    ("problem", "jobs", "message", "remedy"),
    [
        (OSError(errno.ENOSPC, FULL, "x.co"), 2, f"compiling NAME for gfx942: {FULL}", "Files go to CACHE (--cache)"),
        (CompileFailed(f"lld: {FULL}"), 2, f"compiling NAME for gfx942: lld: {FULL}", "Files go to CACHE (--cache)"),
        (ValueError("x"), 2, "compiling NAME for gfx942: ValueError('x')", ""),
        (CompileFailed("Triton cannot", remedy="as it says"), 2, "Triton cannot", "as it says"),
        (BrokenProcessPool(), 2, "a compiler process ended before it was done", "with fewer jobs than 2 (MAX_JOBS"),
        (BrokenProcessPool(), 1, "a compiler process ended before it was done", "Run it again with more memory free"),
    ],
    ids=repr,
)
def test_failures_of_a_worker_are_reported(
    problem: Exception, jobs: int, message: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ProcessPoolExecutor", partial(Pool, problem))
    name = "probabilities-fp16-d32"
    with pytest.raises(CompileFailed) as caught:
        kernels.compile_store(["gfx942"], cache=tmp_path, jobs=jobs, only=name)
    assert caught.value.message.startswith(message.replace("NAME", name))
    assert remedy.replace("CACHE", str(tmp_path)) in caught.value.remedy


def test_tiles_that_do_not_compile_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "ProcessPoolExecutor", partial(Pool, CompileFailed("too wide\nby far")))
    name = "fwd-fp16-d32"
    with pytest.raises(CompileFailed, match=f"no kernel for gfx942 matches '{name}' and compiles"):
        kernels.compile_store(["gfx942"], cache=tmp_path, jobs=1, only=name, tiles=True)
    assert capsys.readouterr().out.count("  left out: too wide\n") == len(units.find(["gfx942"], only=name, tiles=True))


class Pool:
    """Worker processes whose jobs all fail with the same error."""

    def __init__(self, problem: Exception, *_: object, **__: object) -> None:
        self.problem = problem

    def submit(self, *_: object) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(self.problem)
        return future

    def shutdown(self, **_: object) -> None:
        pass


@pytest.mark.long
def test_attention_of_an_mi300_spills_no_register_to_memory(tmp_path: Path) -> None:
    stores = kernels.compile_store(["gfx942"], cache=tmp_path, jobs=2, only="[fb]w*-bf16-d128*")
    archive = sources.module("core.store").Store(stores["gfx942"])
    assert len(archive.kernels) > 15
    private = {name: entry["resources"]["private"] for name, entry in archive.kernels.items()}
    assert {name: size for name, size in private.items() if size} == {}


def test_inspect_prints_a_row_for_every_code_object(built: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    _, stores = built
    table = inspect_store.report(stores["gfx942"])
    assert table.startswith("gfx942: 4 kernels, ")
    assert "0 with spills to memory" in table
    assert len(table.splitlines()) == 2 + 4

    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for target, path in stores.items():
            archive.write(path, f"flash_attn/_kernels/{target}.zip")
    assert inspect_store.report(wheel).count(" kernels, ") == 3
    heading, *rows = inspect_store.sizes(wheel).splitlines()
    assert heading.split() == ["KiB", *sorted(stores)]
    assert [row.split()[0] for row in rows][-1:] == ["in"]
    assert {"manifest"} < {row.split()[0] for row in rows}

    (tmp_path / "text").write_text("no archive")
    with pytest.raises(DataError, match="neither a wheel nor a kernel store"):
        inspect_store.report(tmp_path / "text")

    content = bytearray(stores["gfx942"].read_bytes())
    with zipfile.ZipFile(stores["gfx942"]) as archive:
        group = archive.infolist()[-1]
    content[group.header_offset + group.compress_size // 2] ^= 0xFF
    damaged = tmp_path / "gfx942.zip"
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=r"gfx942\.zip is damaged: .* cannot be read"):
        inspect_store.report(damaged)


# Prints the PTX of a variant, and the messages of ptxas about it.
_TRANSLATE = """
import subprocess, sys
from rocm_wheels.compile.triton import compiler
compiler.prepare(sys.argv[1])
op, dtype, size, kind = sys.argv[2:]
print(text := compiler.translate("sm_90", (op, dtype, int(size), kind))[2])
from triton.backends.nvidia.compiler import get_ptxas
command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", "/dev/stdin"]
done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
print(done.stdout + done.stderr, file=sys.stderr)
"""


def _translated(scratch: Path, *variant: object) -> tuple[str, str]:
    """The PTX of a variant for sm_90, and the messages of ptxas."""
    command = [sys.executable, "-c", _TRANSLATE, str(scratch), *map(str, variant)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


@pytest.mark.long
def test_warps_beside_each_other_share_the_scores(tmp_path: Path) -> None:
    """On sm_90 at head dim 512, each of two warp groups computes half of the products of queries and keys, in the loop
    for whole blocks and in the loop for masked blocks.
    """
    variants, tuning = sources.module("kernels.variants"), sources.module("kernels.tuning")
    variant = variants.Variant("fwd", "bf16", 512, "plain")
    tile = tuning.config("sm_90", variant)
    assembly, messages = _translated(tmp_path, *variant)
    assert "Compiling entry function" in messages
    assert "serialized" not in messages
    columns = [int(n) for n in re.findall(r"wgmma\.mma_async\.\S*?m64n(\d+)k16", assembly)]
    of_scores = 512 // 16 * tile.block_n // 2
    of_values = tile.block_n // 16 * 512 // 2
    assert sum(columns) == 2 * (of_scores + of_values)


@pytest.mark.parametrize("op", ["extend", pytest.param("latent-extend-paged", marks=pytest.mark.long)])
def test_products_of_queries_of_a_cache_stay_under_way(op: str, tmp_path: Path) -> None:
    """ptxas reports it if it serialises the `wgmma` instructions."""
    assembly, messages = _translated(tmp_path, op, "bf16", 512, "plain")
    assert "wgmma.mma_async" in assembly
    assert "Compiling entry function" in messages
    assert "serialized" not in messages
