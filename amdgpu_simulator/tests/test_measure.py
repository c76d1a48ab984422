"""Simulated cycles of kernels with different tiles, and the command that prints them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tools
from flash_attn.core.store import Store

from amdgpu_simulator import __main__ as command
from amdgpu_simulator import debian, decoding, gpu, measure, overview
from amdgpu_simulator.clock.latencies import latencies
from amdgpu_simulator.workloads import composable, triton
from rocm_wheels.compile import kernels


def test_measure_prints_one_line_per_tile(capsys: pytest.CaptureFixture[str]) -> None:
    options = "matrix_instr_nonkdim=16,schedule_hint=attention+memory-bound-attention"
    tiles = [f"64,64,4,1,0,{options}", "64,64,3,1,0"]
    command.main(["cycles", "gfx942", "fwd-bf16-d32", *tiles])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:7] == ["cycles", "util", "%", "matrix", "vector", "shared", "memory"]
    assert [row.split()[0] for row in rows] == tiles
    cycles, utilisation, *units = map(int, rows[0].split()[1:7])
    assert units[0] % 1024 == 0  # two products of 128 x 128 x 32 at 512 operations per cycle, on four SIMDs
    assert max(units) <= cycles < 3 * max(units)
    assert utilisation == round(100 * units[0] / cycles)
    assert "cannot compile" in rows[1]


def test_a_kernel_of_a_cache() -> None:
    """A tile has 16 rows. For 128 rows, its products with 128 keys and 64 columns run at 512 operations per cycle."""
    variant = triton.parse_kernel("decode-bf16-d64-sink")
    result = measure.measure(triton.workload("gfx942", variant, triton.tiles("gfx942", variant)[0]))
    assert result.matrix % 1024 == 0
    assert 2048 <= result.matrix < result.cycles


@pytest.mark.parametrize("name", ["fwd-bf16-d64-bias", pytest.param("bwd-dbias-bf16-d64", marks=pytest.mark.long)])
def test_kernels_with_a_bias(name: str) -> None:
    variant = triton.parse_kernel(name)
    record = triton.workload("gfx942", variant, triton.tiles("gfx942", variant)[0]).run(32)
    assert record.cycles["matrix"] > 0
    assert record.cycles["memory"] > 0


def test_longer_load_latency_adds_cycles() -> None:
    variant = triton.parse_kernel("fwd-bf16-d32")
    tile = triton.parse_tile("64,64,4,1,0,matrix_instr_nonkdim=16,schedule_hint=attention+memory-bound-attention")
    workload = triton.workload("gfx942", variant, tile)
    soon, late = (
        measure.measure(workload, replace(latencies("gfx942"), memory=cycles, cached=cycles)) for cycles in (0, 20000)
    )
    assert late._replace(cycles=soon.cycles) == soon
    # 128 keys take two steps, and there are two blocks of rows. Each step waits for K, and also for V if K arrives
    # late.
    waits = (late.cycles - soon.cycles) / 20000 * soon.groups / 2
    assert 2 <= waits <= 4


def test_a_kernel_of_a_store() -> None:
    """A code object has the same cycles as the assembly text that it was made from."""
    variant = triton.parse_kernel("fwd-bf16-d32")
    compiled = kernels.compile_store(["gfx942"], cache=gpu.CACHE, jobs=1, only=variant.name, backend="triton")
    store = Store(compiled["gfx942"])
    try:
        stored = triton.stored(store, variant)
    except debian.UnavailableError as problem:
        tools.missing(str(problem))
    (tile,) = triton.tiles("gfx942", variant)
    assert measure.measure(stored) == measure.measure(triton.workload("gfx942", variant, tile))
    with pytest.raises(ValueError, match=r"gfx942\.zip has no kernel fwd-bf16-d64; see `rocm_wheels inspect`"):
        triton.stored(store, triton.parse_kernel("fwd-bf16-d64"))


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "target", "groups"),
    [
        (256, 32 << 10, 256, "gfx942", 2),
        (257, 32 << 10, 256, "gfx942", 1),
        (128, 32 << 10, 256, "gfx942", 2),  # the work groups fill shared memory
        (128, 32 << 10, 256, "gfx950", 4),
        (128, 0, 512, "gfx90a", 2),
        (129, 0, 512, "gfx90a", 1),
        (256, 1 << 10, 256, "gfx1100", 2),  # 264 registers for five waves of 32 on each of four SIMDs
        (240, 1 << 10, 256, "gfx1100", 3),
        (8, 1, 128, "gfx1201", 16),  # a SIMD has at most 16 waves
        (192, 1 << 10, 256, "gfx1100", 4),
        (192, 48 << 10, 256, "gfx1100", 2),  # two compute units share 128 KiB
        (256, 1 << 10, 128, "gfx1030", 4),
    ],
)
def test_groups_on_a_compute_unit(registers: int, shared: int, threads: int, target: str, groups: int) -> None:
    entry = {"threads": threads, "shared": shared, "resources": {"reserved_vgprs": registers}}
    assert measure.resident(target, entry) == groups


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("gfx942 fwd-bf16-d65", "error: fwd-bf16-d65: want fwd, bwd-dq or bwd-dkdv"),
        ("gfx942 append-bf16-d64", "error: append-bf16-d64: want fwd"),
        ("gfx942 bwd-dbias-bf16-d32", "error: bwd-dbias-bf16-d32: want fwd"),
        ("gfx942 fwd-bf16-d64 128,x", "error: 128,x: want block_m,block_n,warps,stages"),
        ("gfx942 fwd-bf16-d64 128,64,4,1,0,16", "error: 128,64,4,1,0,16: want"),
        (
            "gfx942 asm-fwd-bf16-d64-plain",
            "error: asm-fwd-bf16-d64-plain: for gfx942 there are asm-fwd-bf16-d128-plain, ",
        ),
        ("gfx1100 asm-fwd-bf16-d128-plain", "error: asm-fwd-bf16-d128-plain: for gfx1100 there are no such kernels"),
        (
            "gfx942 splitkv-bf16-d64-batch",
            "error: splitkv-bf16-d64-batch: of Composable Kernel, only the forward and backward",
        ),
        (
            "gfx942 dqdkdv-bf16-d64-batch-mask",
            "error: dqdkdv-bf16-d64-batch-mask: of Composable Kernel, only the forward and backward",
        ),
        ("gfx942 fwd-bf16-d64 --code kernel.co", "error: --code replaces the code of an asm- kernel"),
        ("gfx942 fwd-bf16-d64 --store gfx90a.zip", "error: the kernel store gfx90a.zip cannot be read"),
        ("gfx803 fwd-bf16-d64", "error: unknown GPU target 'gfx803'"),
    ],
)
def test_invalid_options_are_refused(arguments: str, said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["cycles", *arguments.split()])
    assert str(caught.value).startswith(said)


def test_a_table_of_every_kernel_provider(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every entry is a kernel of `workloads`. The cycles of a backward with two kernels are added."""
    asked = []

    def taken(_target: str, source: str, name: str) -> measure.Taken:
        asked.append(name)
        if source == "ck":
            composable._parse(name)
        elif source == "triton":
            triton.parse_kernel(name)
        return measure.Taken(1000.0, 500.0, 0, 0, 0, 0, 0, 0, 1)

    monkeypatch.setattr(overview, "taken", taken)
    command.main(["table", "gfx942", "--dim", "128", "--dim", "192", "--dtype", "bf16"])
    assert capsys.readouterr().out.splitlines() == [
        "| gfx942 | assembly | Composable Kernel | Triton | calls take |",
        "|-|-|-|-|-|",
        "| fwd bf16 d128 | 1000 (50) | 1000 (50) | 1000 (50) | asm |",
        "| fwd bf16 d192 |  | 1000 (50) | 1000 (50) | triton |",
        "| bwd bf16 d128 | 1000 (50) | 1000 (50) | 2000 (50) | asm |",
        "| bwd bf16 d192 | 1000 (50) | 1000 (50) | 2000 (50) | asm |",
    ]
    assert asked.count("dqdkdv-bf16-d256-batch") == 1
    assert asked[:3] == ["asm-fwd-bf16-d128-plain", "fwd-bf16-d128-batch", "fwd-bf16-d128"]
    capsys.readouterr()
    command.main(["table", "gfx1100", "--dim", "64", "--dtype", "fp16"])
    assert capsys.readouterr().out.splitlines()[2] == "| fwd fp16 d64 |  |  | 1000 (50) | triton |"


def test_decoding_on_a_whole_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"constants": {"BLOCK_N": 32}, "threads": 128, "resources": {"reserved_vgprs": 200}, "shared": 0}
    monkeypatch.setattr(decoding, "_workload", lambda _target, _dtype: SimpleNamespace(entry=entry, rows=16))
    cycles_of_key = {"bf16": 64, "fp8e4nv": 40}
    monkeypatch.setattr(
        decoding, "_played", lambda _target, groups, length, dtype: 500.0 + cycles_of_key[dtype] * groups * length
    )
    command.main(["decoding", "gfx1100"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(rows) == len(decoding.BATCHES) * len(decoding.CONTEXTS)
    assert [row[:5] for row in rows if row[1] == "8192"][:4] == [
        ["1", "8192", "24", "4", "32"],
        ["2", "8192", "12", "4", "64"],
        ["4", "8192", "6", "4", "128"],
        ["8", "8192", "3", "4", "256"],
    ]
    of_one = {row[1]: int(row[-1]) for row in rows if row[0] == "1"}
    assert of_one["1024"] < of_one["8192"] < 100  # the start of a program weighs more where it reads less
    assert of_one["8192"] > 90
    command.main(["decoding", "gfx1201", "--fp8"])
    longest = capsys.readouterr().out.splitlines()[-1].split()
    assert longest[:2] == ["32", "131072"]
    assert float(longest[-1]) == pytest.approx(64 / 40, abs=0.01)
    with pytest.raises(SystemExit, match="gfx908: decoding knows gfx942, gfx950, gfx1030, gfx1100"):
        command.main(["decoding", "gfx908"])
    with pytest.raises(SystemExit, match="gfx1100: it has no FP8"):
        command.main(["decoding", "gfx1100", "--fp8"])
