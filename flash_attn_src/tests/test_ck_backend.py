"""The Composable Kernel backend without a GPU: its launches recorded on CPU tensors, and done by ck_interpreter; with
--gfx by the code that was compiled for that target, on the simulator."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ck_interpreter
import numpy as np
import pytest
import reference
import simulated_gpu
import torch
from assert_close import assert_close
from flash_attn import backends, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.backends import ck, ck_calls, ck_dropout, parts
from flash_attn.backends import torch as torch_backend
from flash_attn.runtime import ck_planner, recording

from rocm_wheels import ck_planner as build
from rocm_wheels import sources

torch.set_num_threads(2)
BF16 = torch.bfloat16


@pytest.fixture(scope="session", autouse=True)
def _simulated() -> None:
    """Nothing here goes to the Triton kernels of --gfx."""


@pytest.fixture(scope="module", autouse=True)
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = build.build(tmp_path_factory.mktemp("planner"), cache=sources.ROOT / "build" / "test-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ck_planner, "PATH", path)
        ck_planner.library.cache_clear()
        yield
    ck_planner.library.cache_clear()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[ck_planner.Launch]]:
    """The launches of the test's calls, each done on the CPU as it comes: by what the kernels compute, or with --gfx by
    their code."""
    add = recording.Recording.add
    target = request.config.getoption("--gfx")

    def add_and_run(self: recording.Recording, launches: list[ck_planner.Launch]) -> None:
        add(self, launches)
        own = [launch for launch in launches if not launch.kernel.startswith("triton.")]
        if target is None:
            ck_interpreter.run(own)
        else:
            simulated_gpu.run(target, own)

    monkeypatch.setattr(recording.Recording, "add", add_and_run)
    with recording.record(target or "gfx942") as launches:
        yield launches


def operations(launches: list[ck_planner.Launch]) -> list[str]:
    return [launch.kernel.split("-")[0] for launch in launches]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = BF16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def both(call: Any, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients of a call here and by PyTorch in fp32."""
    found = []
    for exact in (False, True):
        given = [(x.float() if exact else x).detach().requires_grad_() for x in inputs]
        with pytest.MonkeyPatch.context() as patch:
            if exact:
                patch.setattr(recording, "current", None)
            out, lse, _ = call(*given, return_attn_probs=True)
            gradients = torch.autograd.grad(out, given, torch.ones_like(out) * 0.5 + out.detach())
        found.append([out.detach(), lse.detach(), *gradients])
    return found[0], found[1]


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for name, mine, exact in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert_close(name, mine, exact, tiny=0.03 if mine.dtype is BF16 else 5e-3)


DENSE = [
    {},
    {"causal": True},
    {"window_size": (20, 5)},
    {"window_size": (3, 0), "deterministic": True},
    {"alibi": 1},
    {"alibi": 2, "causal": True, "deterministic": True},
    {"alibi": 1, "window_size": (30, 40)},
    {"softmax_scale": 0.3, "causal": True},
]


@pytest.mark.parametrize("options", DENSE, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize(
    ("sq", "sk", "heads", "heads_k", "dim"), [
        (70, 150, 4, 2, 64), (150, 70, 3, 3, 32), (33, 40, 2, 1, 80), (1, 90, 4, 1, 128),
    ],
)  # fmt: skip
def test_dense(
    done: list[ck_planner.Launch], options: dict[str, Any], sq: int, sk: int, heads: int, heads_k: int, dim: int
) -> None:
    options = dict(options)
    alibi = options.pop("alibi", 0)
    slopes = torch.rand((2, heads)[2 - alibi :]) if alibi else None
    inputs = tensors((2, sq, heads, dim), (2, sk, heads_k, dim), (2, sk, heads_k, dim))
    compare(*both(lambda *x, **tail: flash_attn_func(*x, alibi_slopes=slopes, **options, **tail), inputs))
    assert operations(done) == ["fwd", "dot", "dqdkdv", "convert"]


@pytest.mark.parametrize("options", DENSE[:6], ids=lambda options: "-".join(options) or "plain")
def test_varlen(done: list[ck_planner.Launch], options: dict[str, Any]) -> None:
    options = dict(options)
    alibi = options.pop("alibi", 0)
    slopes = torch.rand((3, 4)[2 - alibi :]) if alibi else None
    lengths_q, lengths_k = (
        torch.tensor([0, 20, 20, 75], dtype=torch.int32),
        torch.tensor([0, 50, 60, 99], dtype=torch.int32),
    )
    inputs = tensors((80, 4, 64), (110, 2, 64), (110, 2, 64))  # a few rows behind the last sequence

    def call(*x: torch.Tensor, **tail: Any) -> Any:
        return flash_attn_varlen_func(*x, lengths_q, lengths_k, 55, 50, alibi_slopes=slopes, **options, **tail)

    found, wanted = both(call, inputs)
    assert not found[0][75:].any()
    assert not found[2][75:].any()
    assert not found[3][99:].any()
    for results in (found, wanted):  # the log-sum-exp of rows outside of every sequence is nobody's
        results[1] = results[1][:, :75]
    compare(found, wanted)
    assert {launch.kernel.split("-")[3] for launch in done} == {"group"}


@pytest.mark.parametrize("deterministic", [False, True])
def test_sequences_without_keys(done: list[ck_planner.Launch], deterministic: bool) -> None:
    """A sequence with queries alone beside one of a single block of keys: its gradient is zero."""
    lengths_q, lengths_k = torch.tensor([0, 20, 40], dtype=torch.int32), torch.tensor([0, 0, 30], dtype=torch.int32)
    inputs = tensors((40, 2, 64), (30, 1, 64), (30, 1, 64))

    def call(*x: torch.Tensor, **tail: Any) -> Any:
        return flash_attn_varlen_func(*x, lengths_q, lengths_k, 20, 30, deterministic=deterministic, **tail)

    found, wanted = both(call, inputs)
    assert not found[2][:20].any()
    assert (found[1][:, :20] == torch.inf).all()
    compare(found, wanted)
    assert operations(done) == ["fwd", "dot", "dqdkdv", "convert"]


def test_parts_of_dq_that_span_4_gib(
    done: list[ck_planner.Launch], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deterministic sum of the parts: 63 of them, 2^26 bytes apart and more."""
    if request.config.getoption("--gfx") is None:
        pytest.skip("ck_interpreter has no offsets of 32 bits: needs --gfx")
    rows, keys = 2**18 + 2**15, 63 * 128 + 5
    zeros = torch.zeros

    def lazy_zeros(*shape: int, **options: Any) -> torch.Tensor:
        """Large ones in memory that nothing touched."""
        return torch.from_numpy(np.zeros(shape, np.float32)) if shape[0] > 2**28 else zeros(*shape, **options)

    (q, grad), (k, v) = tensors((20, 1, 64), (20, 1, 64)), tensors((keys, 1, 64), (keys, 1, 64), seed=1)
    lengths_q, lengths_k = torch.tensor([0, 20], dtype=torch.int32), torch.tensor([0, keys], dtype=torch.int32)

    def gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        q = q.detach().requires_grad_()
        out = flash_attn_varlen_func(q, k, v, lengths_q, lengths_k, 20, keys, deterministic=True, softmax_scale=0.3)
        return torch.autograd.grad(out, q, grad)[0]

    padding = zeros(rows - 20, 1, 64, dtype=BF16)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lazy_zeros)
        dq = gradient(torch.cat((q, padding)), k, v, torch.cat((grad, padding)))
    with monkeypatch.context() as patch:
        patch.setattr(recording, "current", None)
        wanted = gradient(*(x.float() for x in (q, k, v, grad)))
    assert_close("dq", dq[:20], wanted, tiny=0.03)
    assert operations(done) == ["fwd", "dot", "dqdkdv", "convert"]


@pytest.mark.parametrize(("total_q", "total_k"), [(0, 5), (5, 0), (0, 0)])
def test_packed_tensors_without_rows(done: list[ck_planner.Launch], total_q: int, total_k: int) -> None:
    """The longest lengths may be the most that a batch could have."""
    inputs = tensors((total_q, 4, 64), (total_k, 2, 64), (total_k, 2, 64))
    lengths_q, lengths_k = (torch.tensor([0, total], dtype=torch.int32) for total in (total_q, total_k))
    found, wanted = both(lambda *x, **tail: flash_attn_varlen_func(*x, lengths_q, lengths_k, 16, 16, **tail), inputs)
    compare(found, wanted)
    assert not done


def test_batch_of_none(done: list[ck_planner.Launch]) -> None:
    inputs = tensors((0, 5, 4, 64), (0, 7, 2, 64), (0, 7, 2, 64))
    compare(*both(lambda *x, **tail: flash_attn_func(*x, **tail), inputs))
    assert not done


def test_strided_inputs_and_packed_gradients(done: list[ck_planner.Launch]) -> None:
    (qkv,) = tensors((2, 40, 3, 4, 64))
    odd = tensors((2, 40, 4, 67))[0][..., 1:65]  # rows that do not start on 16 bytes
    compare(*both(lambda q, k, v, **tail: flash_attn_func(q, k, v, **tail), [*qkv.unbind(2)]))
    compare(*both(lambda q, k, v, **tail: flash_attn_func(q, k, v, **tail), [odd, *qkv.unbind(2)[1:]]))
    assert operations(done) == ["fwd", "dot", "dqdkdv", "convert"] * 2


def test_softcap_forward(done: list[ck_planner.Launch]) -> None:
    inputs = tensors((2, 40, 4, 64), (2, 50, 2, 64), (2, 50, 2, 64))
    out = flash_attn_func(*inputs, softcap=2.0, causal=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "current", None)
        wanted = flash_attn_func(*(x.float() for x in inputs), softcap=2.0, causal=True)
    assert_close("out", out, wanted, tiny=0.03)
    assert [launch.kernel for launch in done] == ["fwd-bf16-d64-batch-mask-softcap"]


@pytest.mark.parametrize("splits", [1, 2, 20])
def test_paged_varlen(done: list[ck_planner.Launch], splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = mock.Mock(return_value=splits)
    monkeypatch.setattr(ck, "splits_of", asked)
    q, k, v = tensors((30, 4, 64), (7, 128, 2, 64), (7, 128, 2, 64))
    table = torch.tensor([[3, 1, 0], [6, 2, 5]], dtype=torch.int32)
    lengths_q, lengths_k = torch.tensor([0, 12, 30], dtype=torch.int32), torch.tensor([0, 200, 500], dtype=torch.int32)
    arguments = (lengths_q, lengths_k, 18, 300)
    out = flash_attn_varlen_func(q, k, v, *arguments, causal=True, block_table=table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "current", None)
        wanted = flash_attn_varlen_func(q.float(), k.float(), v.float(), *arguments, causal=True, block_table=table)
    assert_close("out", out, wanted, tiny=0.03)
    assert [launch.kernel for launch in done] == [
        "splitkv-bf16-d64-group-paged", f"combine-bf16-d64-group-splits{4 if splits <= 16 else 7}"
    ]  # fmt: skip
    assert asked.call_args.args[1:] == (2 * 4, 300)  # blocks without splits, and keys


@pytest.mark.parametrize("alone", [False, True])
def test_few_queries_of_packed_keys(
    done: list[ck_planner.Launch], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding of packed sequences is the Triton kernels', which share out keys that begin at any row."""
    monkeypatch.setattr(ck_calls, "alone", alone)
    q, k, v = tensors((2, 4, 64), (6100, 2, 64), (6100, 2, 64))
    arguments = (torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 90, 6100], dtype=torch.int32), 1, 6010)
    with warnings.catch_warnings(action="error"):
        out = flash_attn_varlen_func(q, k, v, *arguments, causal=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "current", None)
        wanted = flash_attn_varlen_func(q.float(), k.float(), v.float(), *arguments, causal=True)
    assert_close("out", out, wanted, tiny=0.03)
    assert operations(done) == ["fwd" if alone else "triton.forward"]


@pytest.mark.parametrize("seed", range(24))
def test_kvcache(done: list[ck_planner.Launch], seed: int) -> None:
    """Random calls: pages or not, new keys or not, rotation, windows, ALiBi, softcap, splits, chosen rows."""
    chance = random.Random(seed)
    batch, heads_k, dim = 3, chance.choice([1, 2]), chance.choice([32, 64])
    heads, sq = heads_k * chance.choice([1, 4]), chance.choice([1, 1, 5])
    paged, new = chance.random() < 0.5, chance.choice([0, 0, sq])
    q, k, v = tensors(
        (batch, sq, heads, dim), (batch, max(new, 1), heads_k, dim), (batch, max(new, 1), heads_k, dim), seed=seed
    )
    chosen = not paged and chance.random() < 0.5
    cache = (12, 128, heads_k, dim) if paged else (5 if chosen else batch, 300, heads_k, dim)
    k_cache, v_cache = tensors(cache, cache, seed=seed + 100)
    options: dict[str, Any] = {
        "cache_seqlens": torch.tensor([chance.randint(0 if new else 1, 250) for _ in range(batch)], dtype=torch.int32),
        "causal": chance.random() < 0.5,
        "window_size": chance.choice([(-1, -1), (-1, -1), (17, 4)]),
        "num_splits": chance.choice([0, 1, 3, 20]),
        "alibi_slopes": torch.rand(heads) if chance.random() < 0.3 else None,
        "return_softmax_lse": True,
    }
    if options["alibi_slopes"] is None and chance.random() < 0.3:
        options["softcap"] = 3.0
    if paged:
        options["block_table"] = torch.tensor(chance.sample(range(12), 9), dtype=torch.int32).view(3, 3)
    if chosen:
        options["cache_batch_idx"] = torch.tensor(chance.sample(range(5), 3), dtype=torch.int32)
    rotary = new and chance.random() < 0.6
    if rotary:
        angles = torch.rand(400, 8)
        options |= {"rotary_cos": angles.cos().to(BF16), "rotary_sin": angles.sin().to(BF16)}
        options["rotary_interleaved"] = chance.random() < 0.5
    results = []
    for exact in (False, True):
        kind = torch.float32 if exact else BF16
        given = [x.to(kind, copy=True) for x in (q, k_cache, v_cache)]
        fresh = [x.to(kind) for x in (k, v)] if new else [None, None]
        turned = {name: options[name].to(kind) for name in ("rotary_cos", "rotary_sin") if rotary}
        with pytest.MonkeyPatch.context() as patch:
            if exact:
                patch.setattr(recording, "current", None)
            out, lse = flash_attn_with_kvcache(*given, *fresh, **{**options, **turned})
        assert given[0].equal(q.to(kind))  # the query is not the kernel's to turn
        results.append((out, lse, given[1], given[2]))
    for name, mine, wanted in zip(("out", "lse", "k_cache", "v_cache"), *results, strict=True):
        assert_close(name, mine, wanted, tiny=0.04)
    assert operations(done) == [*(["appendkv"] if new else []), "splitkv", "combine"]


def test_rotary_tables_shorter_than_the_cache_are_refused() -> None:
    q, cache = tensors((1, 1, 2, 64), (1, 256, 2, 64))
    table = torch.rand(16, 16).to(BF16)
    lengths = torch.tensor([3], dtype=torch.int32)
    with recording.record("gfx942") as launches, pytest.raises(ValueError, match=r"rotary_cos: got 16 .* at least 256"):
        flash_attn_with_kvcache(q, cache, cache.clone(), q, q, table, table, cache_seqlens=lengths)
    assert not launches


@pytest.mark.filterwarnings("ignore:the CK backend cannot do:RuntimeWarning")
def test_rotary_tables_that_no_kernel_takes(done: list[ck_planner.Launch]) -> None:
    """One strided table of the two, and queries that are turned without a new key."""
    q, cache = tensors((1, 1, 2, 64), (1, 256, 2, 64))
    cos, wide = tensors((256, 16), (256, 32))
    lengths = torch.tensor([3], dtype=torch.int32)
    for new, sin in ((q, wide[:, :16]), (q[:, :0], cos)):
        results = []
        for kind in (BF16, torch.float32):
            given = [x.to(kind, copy=True) for x in (q, cache, cache, new, new)]
            turned = [cos.to(kind), wide.to(kind)[:, :16] if sin is not cos else cos.to(kind)]
            with pytest.MonkeyPatch.context() as patch:
                if kind is torch.float32:
                    patch.setattr(recording, "current", None)
                results.append(flash_attn_with_kvcache(*given, *turned, cache_seqlens=lengths))
        assert_close("out", *results, tiny=0.03)
    assert operations(done) == ["triton.kvcache"] * 2


@pytest.mark.parametrize("causal", [False, True])
def test_few_queries_share_out_the_keys(
    done: list[ck_planner.Launch], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_LEAST_KEYS", 300)
    monkeypatch.setattr(parts, "are_faster", lambda *_: True)
    for seqlen_q in (1, 3):
        q, k, v = tensors((2, seqlen_q, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64), seed=seqlen_q)
        out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        assert operations(done)[-2:] == ["splitkv", "combine"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recording, "current", None)
            wanted, wanted_lse, _ = flash_attn_func(
                q.float(), k.float(), v.float(), causal=causal, return_attn_probs=True
            )
        assert_close("out", out, wanted, tiny=0.03)
        assert_close("lse", lse, wanted_lse, tiny=0.03)
    q, k, v = tensors((2, 1, 4, 48), (2, 300, 2, 48), (2, 300, 2, 48))
    flash_attn_func(q, k, v)
    assert operations(done)[-1] == "fwd"  # of a head dim that the others would need copies for


def test_what_ck_cannot_do_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ck_calls, "_announced", set())
    q, k, v = (x.requires_grad_() for x in tensors((1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64)))
    with recording.record("gfx942") as launches:
        with pytest.warns(
            RuntimeWarning, match="cannot do this backward: softcap: the backward has none. The Triton"
        ) as told:
            flash_attn_func(q, k, v, softcap=3.0).sum().backward()
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flash_attn_func(q, k, v, softcap=3.0).sum().backward()
        with pytest.warns(RuntimeWarning, match=r"cannot do this forward: dtype: torch\.float32 is neither"):
            flash_attn_func(q.float(), k.float(), v.float())
    assert [launch.kernel for launch in launches] == [
        "fwd-bf16-d64-batch-mask-softcap", "triton.backward", "fwd-bf16-d64-batch-mask-softcap", "triton.backward",
        "triton.forward",
    ]  # fmt: skip


def test_ck_alone_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ck_calls, "alone", True)
    q, k, v = tensors((1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64), dtype=torch.float32)
    with (
        recording.record("gfx942") as launches,
        pytest.raises(NotImplementedError, match="cannot do this forward: dtype"),
    ):
        flash_attn_func(q, k, v)
    assert launches == []


@pytest.mark.filterwarnings("ignore:the CK backend cannot do:RuntimeWarning")
def test_forward_and_backward_draw_the_same_random_numbers() -> None:
    """With dropout both go the same way, whatever sends one of them to the Triton kernels."""
    q, k, v = (x.requires_grad_() for x in tensors((1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64)))
    slopes = torch.rand(2)
    for options in ({}, {"softcap": 3.0}, {"softmax_scale": -1.0}, {"alibi_slopes": slopes}, {"deterministic": True}):
        with recording.record("gfx942") as launches:
            flash_attn_func(q, k, v, dropout_p=0.3, **options).sum().backward()
        assert len({launch.kernel.startswith("triton") for launch in launches}) == 1, options


@pytest.mark.filterwarnings("ignore:the CK backend cannot do:RuntimeWarning")
@pytest.mark.parametrize("shape", [(65536, 1, 1, 8), (1, 1, 65536, 8)])
def test_dropout_beyond_a_grid_goes_the_same_way(shape: tuple[int, ...]) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(shape, shape, shape))
    with recording.record("gfx942") as launches:
        flash_attn_func(q, k, v, dropout_p=0.3).sum().backward()
    assert operations(launches) == ["triton.forward", "triton.backward"]


def test_dropout_takes_its_seed_from_torch() -> None:
    q, k, v = tensors((1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64))
    states = []
    with recording.record("gfx942"):
        for _ in range(2):
            torch.manual_seed(5)
            states += [
                torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.3, 1.0, False, -1, -1, 0.0, None, False)[3]
                for _ in "ab"
            ]
    assert states[0].equal(states[2])
    assert not states[0].equal(states[1])


def test_signed_probabilities() -> None:
    torch.manual_seed(0)
    q, k, v = tensors((2, 30, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), dtype=torch.float16)
    slopes = torch.rand(2, 4)
    _, lse, _, _ = torch_backend.forward(
        q, k, v, None, 0.125, True, -1, -1, 0.0, slopes, 0.0, False, None, None, None, 30, 40, None, None, None
    )
    numbers = torch.randint(0, 256, (2, 4, 30, 40), dtype=torch.uint8)
    p = ck_dropout.signed_probabilities(q, k, lse, numbers, 0.125, -1, 0, slopes, 0.2, None, None, 30, 40)
    assert_close("sums", p.float().abs().sum(-1), torch.ones(2, 4, 30), tiny=5e-3)
    seen = torch.arange(40) <= torch.arange(30)[:, None] + 10
    assert torch.equal(p < 0, (numbers > 204) & seen)


@pytest.mark.parametrize(
    ("value", "backend", "expected"),
    [
        ("", "ck", None),
        ("TRUE", "ck", None),
        ("0", "ck", None),
        ("FALSE", "triton", "does not have"),
        ("maybe", "ck", "neither"),
    ],
)
def test_the_environment_asks(monkeypatch: pytest.MonkeyPatch, value: str, backend: str, expected: str | None) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", value)
    monkeypatch.setattr(backends.build_info, "load", lambda: backends.build_info.BuildInfo(backend=backend))
    problem = backends.problem()
    assert problem is None if expected is None else problem is not None and expected in problem


def test_recordings_do_not_nest() -> None:
    with recording.record("gfx942"), pytest.raises(RuntimeError, match="under way already"), recording.record("gfx90a"):
        pass
    assert recording.current is None


@pytest.mark.parametrize("causal", [False, True])
def test_dropout(done: list[ck_planner.Launch], request: pytest.FixtureRequest, causal: bool) -> None:
    """Forward, backward and the S_dmask that PyTorch draws drop the same scores."""
    if request.config.getoption("--gfx") is None:
        pytest.skip("ck_interpreter draws no random numbers: needs --gfx")
    inputs = tensors((1, 150, 2, 64), (1, 201, 1, 64), (1, 201, 1, 64))
    options = {"dropout_p": 0.25, "causal": causal}
    torch.manual_seed(0)
    mine = _with_gradients(lambda *x: flash_attn_func(*x, **options), inputs)
    torch.manual_seed(0)
    with torch.no_grad():
        out, _, dmask = flash_attn_func(*inputs, return_attn_probs=True, **options)
    assert torch.equal(out, mine[0])
    assert operations(done) == ["fwd", "dot", "dqdkdv", "convert", "fwd"]
    exact, rounded = (
        _with_gradients(lambda *x, of=dtype: reference.attention(*x, kept=dmask >= 0, dtype=of, **options)[0], inputs)
        for dtype in (torch.float32, None)
    )
    for name, *results in zip(("out", "dq", "dk", "dv"), mine, exact, rounded, strict=True):
        assert_close(name, results[0], results[1], rough=results[2], tiny=1e-2)


def _with_gradients(call: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    given = [x.detach().requires_grad_() for x in inputs]
    out = call(*given)
    return [out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out) * 0.5 + out.detach())]
