"""Caches, pages and few queries on the Composable Kernel backend, run as in test_ck_backend.py."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from assert_close import assert_close
from ck_recorded import BF16, operations, running, tensors
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.attention import backends
from flash_attn.attention.backends import recording, split_kv
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.attention.backends.ck import attention as ck_attention
from flash_attn.core import ck_planner
from flash_attn.kernels import planning

torch.set_num_threads(2)
pytestmark = pytest.mark.usefixtures("planner")


@pytest.fixture(scope="session", autouse=True)
def _simulated() -> None:
    """Nothing here goes to the Triton kernels of --gfx."""


@pytest.mark.parametrize("splits", [1, 2, 20])
def test_paged_varlen(done: list[ck_planner.Launch], splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = mock.Mock(return_value=splits)
    monkeypatch.setattr(ck_attention, "num_splits_of", asked)
    q, k, v = tensors((30, 4, 64), (7, 128, 2, 64), (7, 128, 2, 64))
    table = torch.tensor([[3, 1, 0], [6, 2, 5]], dtype=torch.int32)
    lengths_q, lengths_k = torch.tensor([0, 12, 30], dtype=torch.int32), torch.tensor([0, 200, 500], dtype=torch.int32)
    arguments = (lengths_q, lengths_k, 18, 300)
    out = flash_attn_varlen_func(q, k, v, *arguments, causal=True, block_table=table)
    with backends.using(torch_backend):
        expected = flash_attn_varlen_func(q.float(), k.float(), v.float(), *arguments, causal=True, block_table=table)
    assert_close("out", out, expected, tiny=0.03)
    assert [launch.kernel for launch in done] == [
        "splitkv-bf16-d64-group-paged", f"combine-bf16-d64-group-splits{4 if splits <= 16 else 7}"
    ]  # fmt: skip
    assert asked.call_args.args[1:] == (2 * 4, 300)  # blocks without splits, and keys


@pytest.mark.parametrize("alone", [False, True])
def test_few_queries_of_packed_keys(request: pytest.FixtureRequest, alone: bool) -> None:
    """Decoding of packed sequences is the Triton kernels', which split keys that begin at any row."""
    q, k, v = tensors((2, 4, 64), (6100, 2, 64), (6100, 2, 64))
    arguments = (torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 90, 6100], dtype=torch.int32), 1, 6010)
    with running(request, alone=alone) as done, warnings.catch_warnings(action="error"):
        out = flash_attn_varlen_func(q, k, v, *arguments, causal=True)
    with backends.using(torch_backend):
        expected = flash_attn_varlen_func(q.float(), k.float(), v.float(), *arguments, causal=True)
    assert_close("out", out, expected, tiny=0.03)
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
        "window_size": (-1, -1) if paged else chance.choice([(-1, -1), (17, 4)]),
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
        with backends.using(torch_backend) if exact else nullcontext():
            out, lse = flash_attn_with_kvcache(*given, *fresh, **{**options, **turned})
        assert given[0].equal(q.to(kind))  # the kernel does not rotate the query
        results.append((out, lse, given[1], given[2]))
    for name, mine, expected in zip(("out", "lse", "k_cache", "v_cache"), *results, strict=True):
        assert_close(name, mine, expected, tiny=0.04)
    assert operations(done) == [*(["appendkv"] if new else []), "splitkv", "combine"]


def test_a_window_over_pages_is_served_by_triton(done: list[ck_planner.Launch]) -> None:
    """Composable Kernel would multiply NaN in the pages before the window by weights of 0."""
    q, k, v = tensors((1, 1, 2, 64), (3, 128, 2, 64), (3, 128, 2, 64))
    k[0], v[0] = torch.nan, torch.nan
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    lengths = torch.tensor([300], dtype=torch.int32)
    with pytest.warns(RuntimeWarning, match="window_size: not over pages"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True, window_size=(40, 0))
    assert operations(done) == ["triton.kvcache"]


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
            with backends.using(torch_backend) if kind is torch.float32 else nullcontext():
                results.append(flash_attn_with_kvcache(*given, *turned, cache_seqlens=lengths))
        assert_close("out", *results, tiny=0.03)
    assert operations(done) == ["triton.kvcache"] * 2


@pytest.mark.parametrize("causal", [False, True])
def test_few_queries_share_out_the_keys(
    done: list[ck_planner.Launch], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SPLIT_KV", planning.SPLIT_KV._replace(least_keys=300))
    monkeypatch.setattr(split_kv, "are_faster", lambda *_: True)
    for seqlen_q in (1, 3):
        q, k, v = tensors((2, seqlen_q, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64), seed=seqlen_q)
        out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        assert operations(done)[-2:] == ["splitkv", "combine"]
        with backends.using(torch_backend):
            expected, wanted_lse, _ = flash_attn_func(
                q.float(), k.float(), v.float(), causal=causal, return_attn_probs=True
            )
        assert_close("out", out, expected, tiny=0.03)
        assert_close("lse", lse, wanted_lse, tiny=0.03)
    q, k, v = tensors((2, 1, 4, 48), (2, 300, 2, 48), (2, 300, 2, 48))
    flash_attn_func(q, k, v)
    assert operations(done)[-1] == "fwd"  # of a head dim that the others would need copies for
