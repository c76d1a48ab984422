"""Kernels of the wheel on a GPU that it is for. Triton cannot be imported here: only the store serves."""

from __future__ import annotations

import shutil
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn import flash_attn_fp8_func, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.kernels.targets import fp8_format
from helpers import TOLERANCE, Device, check, error, fresh, inputs, reference

Record = Callable[[str, object], None]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DIMS = [32, 40, 64, 72, 96, 111, 128, 160, 192, 256]
LENGTHS = [(128, 128), (113, 203), (203, 113), (1, 257), (513, 64)]

_CALL = """
import sys
sys.modules["triton"] = None
import torch
from flash_attn import flash_attn_func
q, k, v = torch.randn(3, 1, 64, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
"""
_EAGER = _CALL + "flash_attn_func(q, k, v).sum().backward(); torch.cuda.synchronize()"
_FIRST_CALL_IN_A_GRAPH = (
    _CALL
    + """
graph = torch.cuda.CUDAGraph()
with torch.no_grad():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.mm(q[0, :, 0], k[0, :, 0].T)  # the math library sets itself up outside of the capture
    stream.synchronize()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v)
    graph.replay()
    wanted = flash_attn_func(q, k, v)
    assert torch.equal(out, wanted), (out - wanted).abs().max()
"""
)
_FIRST_RESULT = """
import sys, time
sys.modules["triton"] = None
import torch
torch.ones(1, device="cuda").item()
started = time.perf_counter()
from flash_attn import flash_attn_func
x = torch.ones(1, 64, 2, 64, device="cuda", dtype=torch.float16)
flash_attn_func(x, x, x)[0, 0, 0, 0].item()
print(time.perf_counter() - started)
"""


@pytest.fixture(autouse=True)
def _without_triton(fitting: list[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.set_device(fitting[0].index)
    monkeypatch.setitem(sys.modules, "triton", None)


def _record(record_property: Record, dtype: torch.dtype, errors: tuple[float, float]) -> None:
    for direction, value in zip(("forward", "backward"), errors, strict=True):
        record_property(f"error {str(dtype).removeprefix('torch.')} {direction}", value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(dim: int, causal: bool, dtype: torch.dtype, record_property: Record) -> None:
    q, k, v, dout = inputs(2, 150, 203, 4, 2, dim, dtype, "cuda")
    errors = check(flash_attn_func(q, k, v, causal=causal), q, k, v, dout, causal=causal)
    _record(record_property, dtype, errors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_lengths(
    seqlen_q: int, seqlen_k: int, causal: bool, dtype: torch.dtype, record_property: Record
) -> None:  # fmt: skip
    q, k, v, dout = inputs(1, seqlen_q, seqlen_k, 2, 2, 64, dtype, "cuda")
    errors = check(flash_attn_func(q, k, v, causal=causal), q, k, v, dout, causal=causal)
    _record(record_property, dtype, errors)


@pytest.mark.parametrize("heads_k", [8, 2, 1])
def test_grouped_heads(heads_k: int, record_property: Record) -> None:
    q, k, v, dout = inputs(2, 130, 130, 8, heads_k, 128, torch.bfloat16, "cuda")
    errors = check(flash_attn_func(q, k, v, causal=True), q, k, v, dout, causal=True)
    _record(record_property, torch.bfloat16, errors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal: bool, dtype: torch.dtype, record_property: Record) -> None:
    lengths_q, lengths_k = [5, 200, 1, 37], [9, 200, 130, 20]
    q, k, v, dout = (x[0] for x in inputs(1, sum(lengths_q), sum(lengths_k), 4, 2, 64, dtype, "cuda"))
    offsets = [torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32) for lengths in (lengths_q, lengths_k)]
    out = flash_attn_varlen_func(q, k, v, *offsets, max(lengths_q), max(lengths_k), causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    split = zip(*(x.split(n) for x, n in zip(exact, (lengths_q, lengths_k, lengths_k), strict=True)), strict=True)
    wanted = torch.cat([reference(*(x[None] for x in part), causal=causal)[0][0] for part in split])
    wanted_grads = torch.autograd.grad(wanted, exact, dout.float())
    errors = error(out, wanted), max(error(*pair) for pair in zip(grads, wanted_grads, strict=True))
    assert errors[0] <= TOLERANCE[dtype][0]
    assert errors[1] <= TOLERANCE[dtype][1]
    _record(record_property, dtype, errors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("seqlen_q", "dim"), [(1, 64), (1, 128), (1, 256), (70, 128)])
def test_kvcache(seqlen_q: int, dim: int, paged: bool, dtype: torch.dtype) -> None:
    """A step over a cache with 500 keys and some new keys equals attention over all these keys."""
    q, k, v, _ = (x.detach() for x in inputs(2, seqlen_q, 512 + seqlen_q, 8, 2, dim, dtype, "cuda"))
    old, new = ([x[:, :512] for x in (k, v)], [x[:, 512:] for x in (k, v)])
    caches = [torch.zeros(2, 1024, 2, dim, device="cuda", dtype=dtype) for _ in range(2)]
    for cache, keys in zip(caches, old, strict=True):
        cache[:, :512] = keys
    table = None
    if paged:
        caches = [cache.view(64, 32, 2, dim) for cache in caches]
        table = torch.arange(64, device="cuda", dtype=torch.int32).view(2, 32)
    lengths = torch.full((2,), 512, device="cuda", dtype=torch.int32)
    out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, block_table=table, causal=True)
    wanted, _ = reference(q.float(), k.float(), v.float(), causal=True)
    assert error(out, wanted) <= TOLERANCE[dtype][0]
    assert torch.equal(caches[0].view(2, 1024, 2, dim)[:, : 512 + seqlen_q], k)


def test_fp8_or_why_not(fitting: list[Device]) -> None:
    """Near fp32 attention on a GPU with matrix units for FP8; others say which have them."""
    q, k, v, _ = (x.detach() for x in inputs(2, 300, 300, 4, 2, 128, torch.bfloat16, "cuda"))
    if fp8_format(fitting[0].target) is None:
        with pytest.raises(NotImplementedError, match="gfx942, gfx950"):
            flash_attn_fp8_func(q, k, v)
        return
    out = flash_attn_fp8_func(q, k, v, causal=True).float()
    wanted, _ = reference(q.float(), k.float(), v.float(), causal=True)
    assert (out - wanted).square().mean().sqrt() < 0.08 * wanted.square().mean().sqrt()


def test_strides(record_property: Record) -> None:
    """Views of a packed tensor, not contiguous along the sequence."""
    q, k, v, dout = inputs(2, 100, 100, 4, 4, 64, torch.float16, "cuda")
    views = torch.stack([q, k, v], 2).detach().unbind(2)
    out = flash_attn_func(*views, causal=True)
    errors = check(flash_attn_func(q, k, v, causal=True), q, k, v, dout, causal=True)
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))
    _record(record_property, torch.float16, errors)


# torch warns once a process where a leaf was made on another stream than the capture's.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
def test_backward_in_a_graph() -> None:
    q, k, v, dout = inputs(2, 96, 96, 4, 4, 64, torch.float16, "cuda")

    def step() -> tuple[torch.Tensor, ...]:
        out = flash_attn_func(q, k, v, causal=True)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    # Backward may add into dq in any order: equal up to rounding.
    for got, wanted in zip(captured, step(), strict=True):
        assert error(got, wanted) <= TOLERANCE[torch.float16][0]


def test_first_call_in_a_graph() -> None:
    done = fresh(_FIRST_CALL_IN_A_GRAPH)
    assert done.returncode == 0, done.stderr


def test_threads(fitting: list[Device]) -> None:
    """Eight threads, each with its own stream and shape, from a cold start of each shape's kernels."""
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            torch.cuda.set_device(fitting[number % len(fitting)].index)
            with torch.cuda.stream(torch.cuda.Stream()):
                dim, dtype = (32, 64, 128, 256)[number % 4], (torch.float16, torch.bfloat16)[number % 2]
                q, k, v, dout = inputs(1, 70 + number, 90, 2, 2, dim, dtype, "cuda", seed=number)
                for _ in range(10):
                    check(flash_attn_func(q, k, v, causal=True), q, k, v, dout, causal=True)
        except Exception as problem:
            failures.append(f"thread {number}: {problem!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_every_device(fitting: list[Device]) -> None:
    """Each GPU by its index, while another one may be current."""
    for device in fitting:
        q, k, v, dout = inputs(1, 65, 65, 2, 2, 64, torch.float16, f"cuda:{device.index}")
        check(flash_attn_func(q, k, v), q, k, v, dout, causal=False)
    assert torch.cuda.current_device() == fitting[0].index


def test_first_result_of_a_process(record_property: Record) -> None:
    done = fresh(_FIRST_RESULT)
    assert done.returncode == 0, done.stderr
    record_property("first result seconds", round(float(done.stdout), 3))


@pytest.fixture
def copied(package: Path, tmp_path: Path) -> Path:
    """The package's stores in a copy of it that comes before the installed one."""
    shutil.copytree(package, tmp_path / "flash_attn", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "flash_attn" / "_kernels"


def test_corrupt_code_objects_are_refused(copied: Path) -> None:
    for store in copied.glob("*.zip"):
        _rewrite(store, lambda group: group.translate(bytes(byte ^ 1 for byte in range(256))))
    done = fresh(_EAGER, path=copied.parent.parent)
    assert done.returncode != 0
    assert "sha256" in done.stderr
    assert "corrupt" in done.stderr


def test_a_missing_target_is_an_error(copied: Path, build_info: dict[str, Any]) -> None:
    for store in copied.glob("*.zip"):
        store.unlink()
    (copied / "gfx000.zip").write_bytes(b"")
    done = fresh(_EAGER, path=copied.parent.parent)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()
    assert "gfx000" in "\n".join(last[-5:]), last
    assert build_info["backend"]


def _rewrite(store: Path, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(store) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(store, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data if name == "manifest.json" else change(data))
