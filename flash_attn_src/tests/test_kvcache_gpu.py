"""What only a GPU can show of a cache of keys and values: real tiles, graphs, races, more than 2^31 elements."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.attention.backends import torch as oracle
from flash_attn.call.calls import cache_call

if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
DIMS = [32, 64, 80, 96, 128, 192, 256]
# batch, queries, capacity, query heads, key heads
SIZES = [(3, 1, 1000, 8, 1), (2, 1, 4097, 32, 4), (2, 4, 777, 6, 6), (1, 40, 3000, 16, 2), (2, 257, 600, 4, 4)]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (300, 20)},
    "causal window": {"causal": True, "window_size": (128, 0)},
}
OPTIONS = ("plain", "softcap", "alibi", "leftpad", "lines", "pages of 16", "pages of 112", "pages of 256", "rotary")


def _index(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_grid(mask: str, option: str, dim: int, dtype: torch.dtype) -> None:
    """Every size of the list and several numbers of splits, within twice the error of PyTorch in the same type."""
    torch.manual_seed(dim)
    for batch, seqlen_q, capacity, heads, heads_k in SIZES:
        q = torch.randn(batch, seqlen_q, heads, dim, device="cuda", dtype=dtype)
        new = [torch.randn(batch, seqlen_q, heads_k, dim, device="cuda", dtype=dtype) for _ in range(2)]
        shape = (batch, capacity, heads_k, dim)
        lengths = _index(*(capacity - seqlen_q - 37 * i for i in range(batch)))
        lines = pad = table = cos = sin = slopes = None
        if option == "lines":
            shape, lines = (2 * batch, *shape[1:]), _index(*range(batch, 0, -1))
        if option.startswith("pages"):
            page = int(option.split()[-1])
            count = -(-capacity // page)
            shape = (batch * count + 3, page, heads_k, dim)
            table = torch.randperm(shape[0], device="cuda")[: batch * count].view(batch, count).int()
        if option == "leftpad":
            pad = _index(*(61 * i + 3 for i in range(batch)))
        if option == "alibi":
            slopes = torch.rand(heads, device="cuda")
        if option == "rotary":
            angles = torch.rand(capacity, dim // 4, device="cuda") * 6
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        caches = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)]
        causal = MASKS[mask].get("causal", False)
        window = MASKS[mask].get("window_size", (-1, -1))
        softcap = 8.0 if option == "softcap" else 0.0

        def by_the_book(compute: torch.dtype) -> list[torch.Tensor]:
            copies = [cache.to(compute, copy=True) for cache in caches]  # noqa: B023
            tables = [None if x is None else x.to(compute) for x in (cos, sin)]  # noqa: B023
            k, v = (x.to(compute) for x in new)  # noqa: B023
            out, lse = oracle.kvcache(cache_call(
                q.to(compute), *copies, softmax_scale=dim**-0.5, k=k, v=v, rotary_cos=tables[0], rotary_sin=tables[1],  # noqa: B023
                cache_seqlens=lengths, cache_batch_idx=lines, cache_leftpad=pad, block_table=table, causal=causal,  # noqa: B023
                window_size=window, softcap=softcap, alibi_slopes=slopes,  # noqa: B023
            ))  # fmt: skip
            return [out, lse, *copies]

        exact, rough = by_the_book(torch.float64 if dtype is torch.float32 else torch.float32), by_the_book(dtype)
        for num_splits in (0, 1, 5):
            copies = [cache.clone() for cache in caches]
            out, lse = flash_attn_with_kvcache(
                q, *copies, *new, cos, sin, lengths, lines, pad, table, causal=causal, window_size=window,
                softcap=softcap, alibi_slopes=slopes, num_splits=num_splits, return_softmax_lse=True,
            )  # fmt: skip
            got = [out, lse, *copies]
            for name, value, best, worse in zip(("out", "lse", "k", "v"), got, exact, rough, strict=True):
                where = f"{name} {batch}x{seqlen_q}x{capacity}, {num_splits} splits"
                # Three times: rotary embedding rounds once more. Upstream's own bar of these tests.
                assert_close(where, value, best, rough=worse, factor=3.0, tiny=2e-5)


def _decoding(batch: int, capacity: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {
        "q": torch.randn(batch, 1, 16, 128, device="cuda", dtype=torch.bfloat16),
        "k": torch.randn(batch, 1, 2, 128, device="cuda", dtype=torch.bfloat16),
        "v": torch.randn(batch, 1, 2, 128, device="cuda", dtype=torch.bfloat16),
        "k_cache": torch.randn(batch, capacity, 2, 128, device="cuda", dtype=torch.bfloat16),
        "v_cache": torch.randn(batch, capacity, 2, 128, device="cuda", dtype=torch.bfloat16),
        "cache_seqlens": torch.randint(0, 50, (batch,), device="cuda", dtype=torch.int32),
    }
    return tensors


def test_a_graph_of_a_step_follows_the_lengths() -> None:
    """One captured step, replayed while cache_seqlens grows, equals eager steps; nothing waits for the device."""
    tensors = _decoding(4, 4096)
    eager = {name: x.clone() for name, x in tensors.items()}
    start = tensors["cache_seqlens"].clone()
    flash_attn_with_kvcache(**{name: x.clone() for name, x in tensors.items()}, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = flash_attn_with_kvcache(**tensors, causal=True)
            tensors["cache_seqlens"] += 301
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in range(10):
        graph.replay()
        eager["cache_seqlens"] = start + 301 * step
        assert torch.equal(out, flash_attn_with_kvcache(**eager, causal=True))
    assert torch.equal(tensors["k_cache"], eager["k_cache"])


def test_a_hundred_repeats_are_equal() -> None:
    tensors = _decoding(5, 9000)
    tensors["cache_seqlens"].fill_(8500)
    first = flash_attn_with_kvcache(**tensors, causal=True)
    for _ in range(100):
        assert torch.equal(first, flash_attn_with_kvcache(**tensors, causal=True))


def test_caches_beyond_32_bits() -> None:
    """The last sequence of a dense cache, and pages at the end of one, both beyond 2^31 elements."""
    torch.manual_seed(1)
    batch, capacity = 40, 65536
    caches = [torch.randn(batch, capacity, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    assert caches[0].numel() > 2**31
    q = torch.randn(batch, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    length = 700
    out = flash_attn_with_kvcache(q, *caches, cache_seqlens=length)
    expected = flash_attn_func(q[-1:], *(cache[-1:, :length] for cache in caches))
    assert_close("dense", out[-1:], expected, tiny=1e-2)
    pages = [cache.view(-1, 64, 8, 128) for cache in caches]
    table = torch.arange(pages[0].shape[0], device="cuda", dtype=torch.int32).view(batch, -1)
    assert_close("paged", flash_attn_with_kvcache(q, *pages, cache_seqlens=length, block_table=table), out, tiny=1e-2)


def test_empty_sequences_and_ragged_batches() -> None:
    """Lengths from 0 to the whole cache in one batch, each as if alone."""
    tensors = _decoding(6, 20000)
    del tensors["k"], tensors["v"]
    tensors["cache_seqlens"] = lengths = _index(0, 1, 63, 64, 5000, 20000)
    out, lse = flash_attn_with_kvcache(**tensors, return_softmax_lse=True)
    assert not out[0].any()
    assert lse[0].isposinf().all()
    for i in range(1, 6):
        keys = slice(0, int(lengths[i]))
        expected = flash_attn_func(*(x[i, None] for x in (tensors["q"],)), *(
            tensors[name][i, None, keys] for name in ("k_cache", "v_cache")
        ))  # fmt: skip
        assert_close(f"sequence {i}", out[i, None], expected, tiny=1e-2)
