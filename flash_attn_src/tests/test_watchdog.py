"""Launches in pieces: the same results bit for bit, how many launches a limit makes, and the variable of the limit."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_attn.backends import triton as backend
from flash_attn.block_mask import BlockMask
from flash_attn.calls import AttentionCall, CacheCall, GradientCall, attention_call, cache_call
from flash_attn.kernels import targets
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.variants import Variant
from flash_attn.mask import Mask
from flash_attn.runtime import device, environment, jit, stored, watchdog
from flash_attn.runtime.arguments import Arguments
from flash_attn.runtime.platform import linux, windows
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
    wanted = _results(name)
    whole = list(programs)
    programs.clear()
    device.clear_kernels()
    monkeypatch.setenv(_LIMIT, "1e-9")  # a piece has at least one program for each compute unit
    monkeypatch.setattr(jit.Interpreter, "compute_units", 3)
    results = _results(name)
    for got, right in zip(results, wanted, strict=True):
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


class _Radeon780M:
    target, compute_units = "gfx1103", 6  # HIP counts pairs of compute units

    def __init__(self) -> None:
        self.made = _Kernel()
        self.capturing = False
        self.submitted: list[int] = []  # launches before each submission

    def submit(self) -> bool:
        if not self.capturing:
            self.submitted.append(len(self.made.launches))
        return not self.capturing

    def kernel(self, _variant: Variant) -> _Kernel:
        return self.made


def _forward_numbers(tokens: int) -> tuple[int, ...]:
    return (1, tokens, tokens, 128 // 8, 1 << 29, 0, 8)


def test_a_radeon_780m_at_64k_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 heads of 128: 7.0e13 operations, at 7.7e11 in half a second."""
    monkeypatch.setattr(watchdog, "PLATFORM", windows.Windows())
    monkeypatch.delenv(_LIMIT, raising=False)
    gpu = _Radeon780M()
    kernel = watchdog.watched(gpu.made, Variant("fwd", "bf16", 128, "plain"), gpu)
    kernel.launch((1024 * 32, 1, 1), (), _forward_numbers(65536))
    launches = gpu.made.launches
    assert len(launches) == 93
    assert [first for first, _ in launches] == [place * launches[0][1] for place in range(93)]
    assert sum(size for _, size in launches) == 1024 * 32
    assert {size % 6 for _, size in launches[:-1]} == {0}
    assert gpu.submitted == [*range(94)]  # each piece is submitted alone
    launches.clear()
    kernel.launch((64 * 32, 1, 1), (), _forward_numbers(4096))
    assert launches == [(0, 64 * 32)]
    with pytest.raises(ValueError, match="attn_fwd: 134217729 programs are too many for pieces"):
        kernel.launch((2**27 + 1, 1, 1), (), _forward_numbers(65536))


def test_short_launches_are_submitted_before_they_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of 4096 tokens takes 0.18 s by the estimate, dq 0.27 s, so a third launch exceeds half a second."""
    monkeypatch.setattr(watchdog, "PLATFORM", windows.Windows())
    monkeypatch.delenv(_LIMIT, raising=False)
    gpu = _Radeon780M()
    fwd, dq = (watchdog.watched(gpu.made, Variant(op, "bf16", 128, "plain"), gpu) for op in ("fwd", "bwd-dq"))
    for kernel in (fwd, dq, fwd, fwd, fwd):
        kernel.launch((64 * 32, 1, 1), (), _forward_numbers(4096))
    assert gpu.submitted == [2, 4]
    assert len(gpu.made.launches) == 5


def test_pieces_in_a_capture_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PLATFORM", windows.Windows())
    monkeypatch.delenv(_LIMIT, raising=False)
    gpu = _Radeon780M()
    gpu.capturing = True
    kernel = watchdog.watched(gpu.made, Variant("fwd", "bf16", 128, "plain"), gpu)
    with pytest.warns(RuntimeWarning, match=r"attn_fwd is captured into a graph in pieces of 0.5 s.*call flash_attn o"):
        kernel.launch((1024 * 32, 1, 1), (), _forward_numbers(65536))
    assert len(gpu.made.launches) == 93
    kernel.launch((64 * 32, 1, 1), (), _forward_numbers(4096))  # a short one is captured in silence


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


def test_only_windows_has_a_limit_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_LIMIT, raising=False)
    gpu = _Radeon780M()
    fwd = Variant("fwd", "bf16", 128, "plain")
    monkeypatch.setattr(watchdog, "PLATFORM", linux.Linux())
    assert watchdog.watched(gpu.made, fwd, gpu) is gpu.made
    monkeypatch.setattr(linux.Linux, "has_kfd", False)  # WSL
    assert watchdog.watched(gpu.made, fwd, gpu) is not gpu.made
    assert windows.Windows().launch_seconds == 0.5
    monkeypatch.setenv(_LIMIT, "0")
    assert watchdog.watched(gpu.made, fwd, gpu) is gpu.made
    monkeypatch.setenv(_LIMIT, "0.1")
    assert watchdog.watched(gpu.made, Variant("combine", "bf16", 128, "plain"), gpu) is gpu.made
    for wrong in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv(_LIMIT, wrong)
        with pytest.raises(RuntimeError, match=f"{_LIMIT}={wrong} is no number of seconds: set it to"):
            watchdog.watched(gpu.made, fwd, gpu)


def test_the_products_of_a_tile_are_those_of_the_simulator() -> None:
    for op, (of_keys, of_values) in workloads._PRODUCTS.items():
        function = OPERATIONS[op].function
        if function in watchdog._PRODUCTS:
            assert watchdog._PRODUCTS[function] == of_keys + of_values, op


def test_every_target_says_its_rate() -> None:
    assert {row.flops_per_cycle for row in targets.TARGETS.values()} <= {128, 512, 1024, 2048, 4096}
    assert targets.get("gfx1103").flops_per_cycle == 512
