"""The comparison with AOTriton's kernels, on a made-up checkout with the layout of the real one."""

from __future__ import annotations

import re
import sqlite3
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from flash_attn.kernels import providers

from amdgpu_simulator import __main__ as command
from amdgpu_simulator import accuracy, comparison, measure
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.peers.aotriton import DKDV, DQ, FORWARD, Checkout, Tile
from amdgpu_simulator.workloads import Workload, aotriton
from rocm_wheels.errors import CompileFailed

# The columns of the real databases, without the sequence lengths. The forward has more columns.
INPUTS = ("Q_dtype", "CAUSAL_TYPE", "BLOCK_DMODEL", "ENABLE_DROPOUT", "PADDED_HEAD", "BIAS_TYPE")
TUNED = ("tuned_kernel$BLOCK_M", "tuned_kernel$BLOCK_N")
OPTIONS = ("compiler_options$waves_per_eu", "compiler_options$num_warps", "compiler_options$num_stages")
# A copy of K to the output, with arguments of the real kernel.
KERNEL = """
import triton
import triton.language as tl
from helper import tile


@triton.jit
def attn_fwd(Q, K, V, B, Sm_scale: tl.float32, L, Out, stride_qm, stride_qk, stride_kn, stride_kk, stride_bm, stride_bn,
             Max_seqlen_k, Hdim_qk, BLOCK_DMODEL: tl.constexpr, PADDED_HEAD: tl.constexpr, ENABLE_DROPOUT: tl.constexpr,
             CAUSAL_TYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRE_LOAD_V: tl.constexpr):
    tl.static_assert(stride_kk == 1 and stride_bm == 0 and not ENABLE_DROPOUT)
    for n in range(0, Max_seqlen_k, BLOCK_N):
        here = tile(n, stride_kn, BLOCK_N, BLOCK_DMODEL)
        tl.store(Out + tile(0, stride_qm, BLOCK_N, BLOCK_DMODEL), tl.load(K + here), mask=here >= 0)
"""
HELPER = """
import triton
import triton.language as tl


@triton.jit
def tile(first, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    return (first + tl.arange(0, BLOCK))[:, None] * stride + tl.arange(0, WIDTH)[None, :]
"""


def _database(root: Path, kernel: str, rows: Sequence[tuple[object, ...]]) -> None:
    """rows: queries, keys, the values of INPUTS, TUNED, PRE_LOAD_V (forward), OPTIONS."""
    length = "Max_seqlen" if kernel == FORWARD else "max_seqlen"
    tuned = (*TUNED, "tuned_kernel$PRE_LOAD_V") if kernel == FORWARD else TUNED
    lengths = (f"{length}_q", f"{length}_k")
    columns = ["gpu", *(f"inputs${name}" for name in (*lengths, *INPUTS)), *tuned, *OPTIONS]
    path = root / "modules/flash/database/amd/gfx1201" / f"{kernel}.sqlite3.tar.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_name(f"{kernel}.sqlite3")
    stored = sqlite3.connect(plain)
    named = ", ".join(f'"{name}"' for name in columns)
    stored.execute(f'CREATE TABLE "FLASH${kernel}" ({named})')
    marks = ", ".join("?" * len(columns))
    stored.executemany(f'INSERT INTO "FLASH${kernel}" VALUES ({marks})', [("gfx1201_mod0", *row) for row in rows])
    stored.commit()
    stored.close()
    with tarfile.open(path, "w:xz") as archive:
        archive.add(plain, plain.name)
    plain.unlink()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    plain = ("torch.bfloat16", 0, 48, 0, 0, 0)
    rows = [
        (512, 512, *plain, 32, 16, 1, 1, 4, 1),
        (512, 1024, *plain, 1, 1, 1, 1, 1, 1),
        (1024, 1024, *plain, 64, 32, 0, 2, 4, 1),
        (1024, 1024, "torch.bfloat16", 0, 48, 1, 0, 0, 16, 16, 0, 2, 4, 1),  # dropout
        (1024, 1024, "torch.bfloat16", 0, 48, 0, 0, 1, 16, 16, 0, 2, 4, 1),  # a bias
        (1024, 1024, "torch.bfloat16", 3, 48, 0, 0, 0, 128, 64, 1, 3, 8, 2),
    ]
    _database(tmp_path, FORWARD, rows)
    _database(tmp_path, DQ, [(512, 512, *plain, 64, 16, 2, 4, 1)])
    kernels = tmp_path / "modules/flash/kernel"
    kernels.mkdir(parents=True)
    (kernels / "fwd_kernel.py").write_text(KERNEL, encoding="utf-8")
    (kernels / "helper.py").write_text(HELPER, encoding="utf-8")
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    ("kernel", "head_dim", "tokens", "causal", "tile"),
    [
        (FORWARD, 40, 512, False, Tile(32, 16, 4, 1, 1, True)),  # the kernel for head dim 48 serves head dim 40
        (FORWARD, 48, 513, False, Tile(64, 32, 4, 1, 2, False)),  # the first bin that is not shorter
        (FORWARD, 48, 4096, False, Tile(64, 32, 4, 1, 2, False)),  # longer than the last bin
        (FORWARD, 48, 77, True, Tile(128, 64, 8, 2, 3, True)),
        (DQ, 48, 4096, False, Tile(64, 16, 4, 1, 2)),
    ],
)
def test_tiles_of_the_database(
    checkout: Checkout, kernel: str, head_dim: int, tokens: int, causal: bool, tile: Tile
) -> None:
    assert checkout.tile("gfx1201", kernel, "bf16", head_dim, tokens, causal=causal) == tile


def test_errors_name_the_file_that_a_checkout_lacks(checkout: Checkout) -> None:
    """Each error names the file."""
    with pytest.raises(ValueError, match=r"gfx1030/attn_fwd\.sqlite3\.tar\.xz does not exist: .* GPUs gfx1201$"):
        checkout.tile("gfx1030", FORWARD, "bf16", 64, 4096, causal=False)
    with pytest.raises(ValueError, match=r"gfx1201/bwd_kernel_dk_dv\.sqlite3\.tar\.xz does not exist"):
        checkout.tile("gfx1201", DKDV, "bf16", 64, 4096, causal=False)
    with pytest.raises(ValueError, match=r"attn_fwd\.sqlite3\.tar\.xz has no row for fp16, head dim 64, CAUSAL_TYPE 0"):
        checkout.tile("gfx1201", FORWARD, "fp16", 64, 4096, causal=False)
    with pytest.raises(ValueError, match="kernels up to head dim 512, not 513"):
        checkout.tile("gfx1201", FORWARD, "fp16", 513, 4096, causal=False)
    with pytest.raises(ValueError, match=r"kernel/bwd_kernel_dq\.py does not exist"):
        checkout.arguments(DQ)
    path = checkout.root / "modules/flash/database/amd/gfx1201" / f"{FORWARD}.sqlite3.tar.xz"
    other = Checkout(checkout.root / "other")
    there = other.root / path.relative_to(checkout.root)
    there.parent.mkdir(parents=True)
    with tarfile.open(there, "w:xz"):
        pass
    with pytest.raises(ValueError, match=r"has no member attn_fwd\.sqlite3"):
        other.tile("gfx1201", FORWARD, "bf16", 64, 4096, causal=False)


def test_a_kernel_of_a_checkout_runs(checkout: Checkout) -> None:
    tile = Tile(64, 32, 4, 1, 2)
    workload = aotriton.workload(checkout, "gfx1201", FORWARD, "bf16", 64, tile)
    records = [workload.run(length) for length in (64, 128)]
    assert workload.rows == 64
    assert workload.entry["threads"] == 128
    assert 1.5 < records[1].cycles["memory"] / records[0].cycles["memory"] < 2.1
    # 64 rows of 128 bytes, two lines each, loaded and stored.
    assert records[1].cycles["memory"] - records[0].cycles["memory"] == 64 * 2 * 2


def test_unknown_arguments_and_unusable_interpreters_are_refused(checkout: Checkout, tmp_path: Path) -> None:
    path = checkout.kernels / "fwd_kernel.py"
    path.write_text(KERNEL.replace("Hdim_qk", "Hdim_new"), encoding="utf-8")
    with pytest.raises(ValueError, match="argument Hdim_new of attn_fwd is unknown"):
        aotriton.workload(checkout, "gfx1201", FORWARD, "bf16", 64, Tile(64, 32, 4, 1, 2))
    path.write_text(KERNEL.replace("stride_bm == 0", "stride_bm == 1"), encoding="utf-8")
    with pytest.raises(CompileFailed, match=f"the Triton of {re.escape(sys.executable)} cannot compile it"):
        aotriton.workload(checkout, "gfx1201", FORWARD, "bf16", 64, Tile(64, 32, 4, 1, 2))
    with pytest.raises(ValueError, match="no-python does not run"):
        aotriton.workload(
            checkout, "gfx1201", FORWARD, "bf16", 64, Tile(64, 32, 4, 1, 2), python=str(tmp_path / "no-python")
        )


def _workload(target: str, rows: int, **entry: object) -> Workload:
    def run(_length: int) -> Record:
        raise AssertionError("a made-up workload does not run")

    return Workload(
        target=target, rows=rows, entry=dict(entry), run=run, operations=0,
        programs=lambda seqlen, _causal: list(range(rows, seqlen + rows, rows)),
    )  # fmt: skip


def test_a_row_shows_the_best_triton(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row shows the fewest cycles over all interpreters. An interpreter whose Triton fails is ignored."""

    def compiled(*_arguments: object, python: str, **_: object) -> Workload:
        if python == "bad":
            raise CompileFailed("no")
        return _workload("gfx1201", 64, triton=python, cycles={"3.6": 800, "3.7": 700}[python])

    def cycles(workload: Workload, keys: int | None, causal: bool) -> float:
        assert (keys, causal) == (None, False)
        return float(workload.entry["cycles"])

    monkeypatch.setattr(comparison, "_own", lambda *_: _workload("gfx1201", 64, cycles=500))
    monkeypatch.setattr(aotriton, "workload", compiled)
    monkeypatch.setattr(comparison, "cycles", cycles)
    options = ["--op", "fwd", "--mask", "full", "--dim", "40", "--python", "bad", "--python", "3.6", "--python", "3.7"]
    command.main(["table", "gfx1201", "--peer", "aotriton", str(checkout.root), *options])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row == "| fwd bf16 d40 full | 500 | 700 | 3.7 | 1.40 | 30 % | faster |"


@pytest.mark.parametrize(
    ("ratio", "target", "said"),
    [
        (1.29, "gfx1201", "no difference"),
        (1.31, "gfx1201", "faster"),
        (0.78, "gfx1100", "no difference"),
        (0.76, "gfx1100", "slower"),
        (1.17, "gfx942", "no difference"),
        (1.19, "gfx942", "faster"),
        (1.69, "gfx1151", "no difference"),
    ],
)
def test_a_ratio_within_the_error_is_no_difference(ratio: float, target: str, said: str) -> None:
    assert accuracy.judge(ratio, target) == said


def test_users_read_the_error_of_the_clock() -> None:
    """`backend_info` names one error beside cycles. Every target with cycles has that error."""
    assert {accuracy.error(row.target) for row in providers.ROWS} == {providers.ERROR}


@pytest.mark.parametrize(
    ("keys", "causal", "cycles"),
    [
        (None, False, 256.0),  # 1 cycle a key and work group of 64 rows: 2 work groups
        (1024, False, 2 * (1024 + 512) / 8),  # with 512 cycles of each work group
        # 16 work groups, on average 544 keys and 512 cycles, for 1024 * 1024 / 2 pairs
        (1024, True, 16 * (544 + 512) * 128 * 128 / (1024 * 1024 / 2)),
    ],
)
def test_cycles_of_a_whole_call(monkeypatch: pytest.MonkeyPatch, keys: int | None, causal: bool, cycles: float) -> None:
    line = measure.Line(lengths=(256, 768), start=(768.0,), end=(1280.0,), groups=1)
    monkeypatch.setattr(measure, "line", lambda _: line)
    assert comparison.cycles(_workload("gfx1201", 64), keys, causal) == cycles


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("gfx1201 --peer tiler DIR", "error: --peer tiler: the known peer is aotriton"),
        ("gfx1201 --op fwd", "error: --op needs --peer: add --peer aotriton DIR"),
        ("gfx1201 --keys 77", "error: --keys needs --peer"),
        ("gfx1201 --peer aotriton DIR --keys 0", "error: --keys 0: want 1 or more"),
        ("gfx1201 --peer aotriton DIR --keys 77", "error: 77 keys: only a forward without a mask can be measured so"),
    ],
)
def test_invalid_options_are_refused(arguments: str, said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["table", *arguments.split()])
    assert str(caught.value).startswith(said)
