"""Launches in pieces: the same results bit for bit, how many launches a limit makes, and the variable of the limit."""

from __future__ import annotations

import itertools
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_attn.attention.backends import triton as backend
from flash_attn.call.block_mask import BlockMask
from flash_attn.call.calls import AttentionCall, CacheCall, GradientCall, attention_call, cache_call
from flash_attn.call.mask import Mask
from flash_attn.core import device, driver, environment, jit, slices, stored, watchdog
from flash_attn.core.arguments import Arguments
from flash_attn.core.platform import linux, windows
from flash_attn.kernels import targets
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.variants import Variant
from triton_calls import DEVICE

from amdgpu_simulator.workloads import triton as workloads

_LIMIT = environment.MAX_LAUNCH_SECONDS
_interpreted = pytest.mark.skipif(DEVICE != "cpu", reason="counts the launches of Triton's interpreter")


pytestmark = pytest.mark.usefixtures("fresh_kernels")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(operation, programs) of each launch of an interpreted kernel."""
    launched: list[tuple[str, int]] = []
    launch = jit.JitKernel.launch

    def recorded(kernel: jit.JitKernel, grid: device.Grid, tensors: device.Tensors, numbers: list[float]) -> None:
        launched.append((kernel.variant.op, grid[0]))
        launch(kernel, grid, tensors, numbers)

    monkeypatch.setattr(jit.JitKernel, "launch", recorded)
    return launched


def _packed(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _call(name: str) -> AttentionCall:
    """A call of 2 sequences and 2 query heads of 16, by what is special about it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 20, 2, 16), torch.randn(2, 40, 1, 16), torch.randn(2, 40, 1, 16)
    call = attention_call(q, k, v, softmax_scale=0.25, causal=name == "causal")
    if name == "window":
        call.options.window_size = (9, 3)
    if name == "alibi":
        call.options.alibi_slopes = torch.rand(2, 2)
    if name == "dropout":
        call.options.dropout_p, call.options.rng_state = 0.3, torch.tensor([7, 5])
    if name in _BIASES:
        call = attention_call(
            *(torch.randn(2, rows, heads, 16) for rows, heads in _OF_BIAS), softmax_scale=0.25, causal=True
        )
        lengths = (_OF_BIAS[0][0], _OF_BIAS[1][0])
        distances = (sum(lengths) - 1,) if name == "distances" else lengths
        call.options.attn_bias = torch.randn(*_BIASES[name], *distances)
    if name == "blocks":
        q, k, v = torch.randn(2, 100, 2, 16), torch.randn(2, 150, 1, 16), torch.randn(2, 150, 1, 16)
        call = attention_call(q, k, v, softmax_scale=0.25, causal=True)
        call.options.mask = Mask(BlockMask(torch.rand(2, 2, 2, 3) < 0.6, (64, 64)))
    if name in ("varlen", "packed blocks"):
        lengths_q, lengths_k = ((15, 25), (35, 45)) if name == "varlen" else ((1, 2, 37), (3, 1, 76))
        call.q, call.k, call.v = (x.flatten(0, 1) for x in (q, k, v))
        call.cu_seqlens_q, call.cu_seqlens_k = _packed(*lengths_q), _packed(*lengths_k)
        call.max_seqlen_q, call.max_seqlen_k = max(lengths_q), max(lengths_k)
    if name == "paged":
        call.k, call.v = (x.reshape(8, 10, 1, 16) for x in (k, v))
        call.block_table = torch.randperm(8).to(torch.int32).reshape(2, 4)
        call.max_seqlen_k = 40
        call.options.causal = True
    return call


# The axes of batch and head of a bias, and (rows, heads) of the q, k and v with it. 37 rows: lse is misaligned.
_BIASES = {"bias": (2, 2), "bias of sequences": (2, 1), "one bias": (1, 1), "distances": (1, 2)}
_OF_BIAS = ((37, 2), (45, 1), (45, 1))
_CACHES: dict[str, dict[str, Any]] = {
    "cache": {"causal": True, "alibi_slopes": torch.rand(3, 6)},
    "cache in splits": {
        "num_splits": 2,
        "s_aux": torch.rand(6),
        "cache_leftpad": torch.tensor([3, 0, 7]).int(),
        "alibi_slopes": torch.rand(6),  # a piece begins at the slope of its head
    },
    "cache in pages": {"block_table": torch.randperm(12).reshape(3, 4).int(), "window_size": (50, 0)},
    "cache lines": {"cache_batch_idx": torch.tensor([2, 0, 1]).int(), "num_splits": 2},
    "cache, varlen": {"cu_seqlens_q": torch.tensor([0, 1, 3, 6]).int(), "max_seqlen_q": 3, "causal": True},
}


def _cache_call(name: str) -> CacheCall:
    """3 sequences of up to 128 keys, 6 query heads, 3 key heads, up to 3 queries. With one query lse is misaligned."""
    torch.manual_seed(0)
    options = _CACHES[name]
    q = (
        torch.randn(6, 6, 16)
        if "cu_seqlens_q" in options
        else torch.randn(3, 2 if "num_splits" in options else 1, 6, 16)
    )
    caches = [torch.randn(*((12, 32) if "block_table" in options else (3, 128)), 3, 16) for _ in range(2)]
    lengths = torch.tensor([128, 77, 100], dtype=torch.int32)
    return cache_call(q, *caches, softmax_scale=0.25, cache_seqlens=lengths, **options)


def _results(name: str) -> list[torch.Tensor]:
    if name in _CACHES:
        return list(backend.kvcache(_cache_call(name)))
    call = _call(name)
    done = backend.forward(call)
    results = [done.out, done.softmax_lse]
    if call.block_table is None:
        gradients = [torch.empty_like(x) for x in (call.q, call.k, call.v)]
        if call.options.attn_bias is not None:
            gradients.append(torch.empty_like(call.options.attn_bias))
        backend.backward(GradientCall(call, torch.randn_like(done.out), done.out, done.softmax_lse, *gradients))
        results += gradients
    return results


@_interpreted
@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(
    "name", ["causal", "window", "alibi", "dropout", "varlen", "packed blocks", "paged", "blocks", *_BIASES, *_CACHES]
)
def test_pieces_give_the_same_bits(name: str, programs: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_LIMIT, "0")
    expected = _results(name)
    whole = list(programs)
    programs.clear()
    device.clear_kernels()
    monkeypatch.setenv(_LIMIT, "1e-9")  # a piece has at least one program for each compute unit
    monkeypatch.setattr(jit.Interpreter, "compute_units", 3)
    results = _results(name)
    for got, right in zip(results, expected, strict=True):
        assert torch.equal(got, right)
    for op, count in whole:
        pieces = [size for other, size in programs if other == op]
        if op.startswith(("bwd-dbias", "bwd-ddiagonals", "decode")):  # parts of sequences, heads, rows, diagonals
            assert sum(pieces) == count
            assert len(pieces) > 1
            assert max(pieces) <= _LARGEST.get(name, 3)
        elif op.removeprefix("sparse-").startswith(("fwd", "bwd-dq", "bwd-dkdv")):
            assert count > 3
            assert pieces == [3] * (count // 3) + [count % 3] * (count % 3 > 0)
        else:
            assert pieces == [size for other, size in whole if other == op]


@_interpreted
@pytest.mark.usefixtures("_tiles")
def test_no_limit_cuts_nothing(programs: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_LIMIT, "60")
    _results("causal")
    assert [op for op, _ in programs] == ["fwd", "bwd-dq", "bwd-dkdv"]


# A row of tiles of dbias has three. Two sequences keep the pointer to lse aligned.
_LARGEST = {"cache": 6, "cache in pages": 6}


_NUMBERS = ("group", "seqlen_q", "seqlen_k", "head_dim", "window_left", "window_right", "chunk")


class _Kernel:
    """Keeps the programs of its launches, and the number of the first one."""

    block_m, block_n, num_xcds = 64, 64, 1
    arguments = Arguments("fwd", (), _NUMBERS, _NUMBERS)

    def __init__(self) -> None:
        self.launches: list[tuple[int, int]] = []

    def launch(self, grid: device.Grid, _tensors: device.Tensors, numbers: tuple[int, ...]) -> None:
        chunk = numbers[_NUMBERS.index("chunk")]
        assert chunk & 15 == 8
        self.launches.append((chunk >> 4, grid[0]))


class _Radeon780M(driver.Driver):
    """As the driver sees it: HIP counts pairs of compute units."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        properties = SimpleNamespace(
            gcnArchName="gfx1103", multi_processor_count=6, pci_domain_id=0, pci_bus_id=0xC5, pci_device_id=0
        )
        monkeypatch.setattr(torch.version, "hip", "10.0.1")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
        super().__init__(0)
        self.made = _Kernel()
        self.current = 0  # less than 0: a graph
        self.submitted: list[int] = []  # launches before each submission

    def queue(self) -> int:
        return self.current

    def submit(self) -> bool:
        if self.current >= 0:
            self.submitted.append(len(self.made.launches))
        return self.current >= 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Radeon780M:
    """In Windows, without the variable of the limit."""
    monkeypatch.setattr(watchdog, "PLATFORM", windows.Windows())
    monkeypatch.delenv(_LIMIT, raising=False)
    return _Radeon780M(monkeypatch)


def _watched(gpu: _Radeon780M, op: str = "fwd") -> device.Kernel:
    return watchdog.watched(gpu.made, Variant(op, "bf16", 128, "plain"), gpu)


def _forward_numbers(tokens: int) -> tuple[int, ...]:
    return (1, tokens, tokens, 128 // 8, 1 << 29, 0, 8)


def test_a_radeon_780m_at_64k_tokens(gpu: _Radeon780M) -> None:
    """32 heads of 128: 7.0e13 operations, at 1.5e12 in half a second. The page says how many launches."""
    kernel, size = _watched(gpu), 59 * 12
    kernel.launch((1024 * 32, 1, 1), (), _forward_numbers(65536))
    launches = gpu.made.launches
    assert launches == [(first, min(size, 1024 * 32 - first)) for first in range(0, 1024 * 32, size)]
    assert gpu.submitted == [*range(len(launches) + 1)]  # each piece is submitted alone
    pages = [Path(__file__).parents[2] / "docs" / page for page in ("windows.md", "notes/windows.md")]
    for page in filter(Path.is_file, pages):  # not in an sdist
        assert f"{len(launches)} launches" in page.read_text(encoding="utf-8")
    launches.clear()
    kernel.launch((64 * 32, 1, 1), (), _forward_numbers(4096))
    assert launches == [(0, 64 * 32)]
    with pytest.raises(ValueError, match="134217729 programs are too many for pieces"):
        kernel.launch((2**27 + 1, 1, 1), (), _forward_numbers(65536))


def test_short_launches_are_submitted_before_they_take_too_long(gpu: _Radeon780M) -> None:
    """A forward of 4096 tokens takes 0.09 s by the estimate, dq 0.13 s. The sixth launch of a stream exceeds 0.5 s."""
    fwd, dq = _watched(gpu), _watched(gpu, "bwd-dq")
    for stream in (1, 2, 1):
        gpu.current = stream
        for kernel in (fwd, fwd, dq):
            kernel.launch((64 * 32, 1, 1), (), _forward_numbers(4096))
    assert gpu.submitted == [8]
    gpu.current = 2
    fwd.launch((1024 * 32, 1, 1), (), _forward_numbers(65536))
    assert len(gpu.submitted) == 1 + 1 + 47
    gpu.current = 1  # the pieces of stream 2 submit nothing of stream 1, which has the last dq alone
    for _ in range(5):
        fwd.launch((64 * 32, 1, 1), (), _forward_numbers(4096))
    assert len(gpu.submitted) == 1 + 1 + 47 + 1


def test_a_long_graph_is_told_once(gpu: _Radeon780M) -> None:
    kernel, count = _watched(gpu), 0
    for graph in (-7, -8):
        for stream in (3, 4):  # an eager stream between the layers
            for calls in range(1, 10):
                gpu.current = graph
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    kernel.launch((64 * 32, 1, 1), (), _forward_numbers(4096))
                assert len(caught) == (stream == 3 and calls == 6)
                count += len(caught)
                gpu.current = stream
                kernel.launch((1, 1, 1), (), _forward_numbers(4096))
    assert count == 2
    assert gpu.submitted == []
    gpu.current = -9
    with pytest.warns(RuntimeWarning, match=r"attn_fwd makes a captured graph longer than 0.5 s.*call flash_attn o"):
        kernel.launch((1024 * 32, 1, 1), (), _forward_numbers(65536))
    assert gpu.made.launches[-1][0] == 46 * 59 * 12


def test_a_stream_that_cannot_be_submitted_keeps_its_seconds(gpu: _Radeon780M, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the default stream while another stream is captured."""
    asked: list[int] = []
    monkeypatch.setattr(gpu, "submit", lambda: bool(asked.append(0)))
    for _ in range(7):
        _watched(gpu).launch((64 * 32, 1, 1), (), _forward_numbers(4096))
    assert len(asked) == 2


def test_threads_share_the_account_of_a_stream(gpu: _Radeon780M) -> None:
    """In any order, no more than half a second is held back, and a launch is made before the next is counted."""
    kernel = _watched(gpu)
    threads = [
        threading.Thread(target=lambda: [kernel.launch((64 * 32, 1, 1), (), _forward_numbers(4096)) for _ in range(25)])
        for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert gpu.submitted == [*range(5, 100, 5)]


def test_what_a_stream_is_counted_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handle 2 is another stream in each thread. A graph has one number for all of its streams."""
    graphs = {5: 9, 6: 9}
    module = SimpleNamespace(capture=lambda _index, stream: graphs.get(stream, 0))
    monkeypatch.setattr(stored, "launcher", lambda _target: module)
    stored._capture.cache_clear()
    result = []
    for stream in (0, 5, 6, 2):
        monkeypatch.setattr(stored, "_current_stream", lambda _index, stream=stream: stream)
        result.append(stored.queue("gfx1103", 0))
    stored._capture.cache_clear()
    assert result == [0, -9, -9, threading.get_ident()]


def test_a_lost_gpu_is_told_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class DriverError(RuntimeError):
        code = 719

    def fail(*_: object) -> None:
        raise DriverError("kernel x on device 0: hipModuleLaunchKernel failed: hipErrorLaunchFailure (719)")

    kernel = object.__new__(stored.StoreKernel)
    kernel._index, kernel._launch = 0, fail
    monkeypatch.setattr(stored, "_current_stream", lambda _: 0)
    monkeypatch.setattr(stored, "launcher", lambda _: SimpleNamespace(submit=fail))
    calls = (
        lambda: kernel.launch((1, 1, 1), (), ()), lambda: kernel.launch_planned((1, 1, 1), b""),
        lambda: stored.submit("gfx1103", 0),
    )  # fmt: skip
    for call in calls:
        monkeypatch.setattr(stored, "PLATFORM", windows.Windows())
        with pytest.raises(RuntimeError, match=rf"\(719\)\. Windows resets a GPU .* Set {_LIMIT}=0.1 before Python"):
            call()
        monkeypatch.setattr(stored, "PLATFORM", linux.Linux())
        with pytest.raises(DriverError, match=r"\(719\)$"):
            call()


def test_where_the_limit_comes_from(gpu: _Radeon780M, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _watched(gpu) is not gpu.made
    monkeypatch.setattr(watchdog, "PLATFORM", linux.Linux())
    monkeypatch.setattr(linux, "_screens", list)
    assert _watched(gpu) is gpu.made
    monkeypatch.setattr(linux.Linux, "has_kfd", False)  # WSL
    assert _watched(gpu) is not gpu.made
    monkeypatch.setenv(_LIMIT, "0")
    assert _watched(gpu) is gpu.made
    monkeypatch.setenv(_LIMIT, "0.1")
    assert _watched(gpu, "combine") is gpu.made
    for wrong in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv(_LIMIT, wrong)
        with pytest.raises(RuntimeError, match=f"{_LIMIT}={wrong} is no number of seconds: set it to"):
            _watched(gpu)


@pytest.mark.parametrize(
    ("setting", "release", "seconds"),
    [
        ("", "7.0.0-34-generic", 0.5), ("\n", "7.1.2", 0.5), ("0", "7.0", 0.5), ("0,60000", "7.0", 0.5),
        ("", "6.17.0-14-generic", None), ("-1", "7.0", None), ("10000,-1,-1,-1", "7.0", None), ("10000", "7.0", None),
        ("5000", "6.12", 0.5), ("1000", "6.12", 0.25), ("0x3e8,60000,9000,9000\n", "7.0", 0.25), ("what", "6.1", None),
    ],
)  # fmt: skip
def test_a_screen_of_linux(
    setting: str, release: str, seconds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Instinct, a Radeon with a screen, one without, an Intel GPU with a screen, and a virtual function."""
    drm, lockup = tmp_path / "drm", tmp_path / "lockup_timeout"
    cards = {
        "0000:03:00.0": ("amdgpu", "HDMI-A-1", "disconnected"), "0000:c5:00.0": ("amdgpu", "DP-1", "connected"),
        "0000:07:00.0": ("amdgpu", "DP-2", "disconnected"), "0000:00:02.0": ("i915", "eDP-1", "connected"),
        "0000:00:05.0": ("amdgpu", "Virtual-1", "connected"),
    }  # fmt: skip
    for number, (address, (name, connector, status)) in enumerate(cards.items()):
        (tmp_path / "devices" / address).mkdir(parents=True)
        (tmp_path / "drivers" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "devices" / address / "driver").symlink_to(tmp_path / "drivers" / name)
        (drm / f"card{number}-{connector}").mkdir(parents=True)
        (drm / f"card{number}-{connector}" / "status").write_text(f"{status}\n")
        (drm / f"card{number}").mkdir()
        (drm / f"card{number}" / "device").symlink_to(tmp_path / "devices" / address)
    lockup.write_text(setting)
    monkeypatch.setattr(linux, "_DRM", drm)
    monkeypatch.setattr(linux, "_LOCKUP", lockup)
    monkeypatch.setattr(linux.os, "uname", lambda: SimpleNamespace(release=release))
    monkeypatch.setattr(linux.Linux, "has_kfd", True)
    platform = linux.Linux()
    for screen in (None, "0000:03:00.0", "0000:07:00.0", "0000:00:02.0", "0000:00:05.0"):
        assert platform.launch_limit(screen) is None
    for screen in ("", "0000:c5:00.0"):
        limit = platform.launch_limit(screen)
        assert (limit and limit.seconds) == seconds
        assert limit is None or "(0000:c5:00.0) whose screen waits for" in limit.cause
    monkeypatch.setattr(watchdog, "PLATFORM", platform)
    monkeypatch.delenv(_LIMIT, raising=False)
    gpu = _Radeon780M(monkeypatch)
    kernel = _watched(gpu)
    assert (kernel is gpu.made) == (seconds is None)
    kernel.launch((1024 * 32, 1, 1), (), _forward_numbers(65536))
    assert len(gpu.made.launches) == {None: 1, 0.5: 47, 0.25: 95}[seconds]
    assert gpu.submitted == []  # each kernel is a packet of its own there


def test_the_products_of_a_tile_are_those_of_the_simulator() -> None:
    for op, (of_keys, of_values) in workloads._PRODUCTS.items():
        function = OPERATIONS[op].function
        if function in slices.PRODUCTS:
            assert slices.PRODUCTS[function] == of_keys + of_values, op


def test_every_target_says_its_rate() -> None:
    assert {row.flops_per_cycle for row in targets.TARGETS.values()} <= {128, 512, 1024, 2048, 4096}
    assert targets.get("gfx1103").flops_per_cycle == 512
