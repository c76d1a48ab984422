"""Pages before a window that hold NaN or infinity, as pools have them after their blocks were freed.

No query sees these pages, so a call gives the same bits as with zeros in them.
"""

from __future__ import annotations

from typing import Any

import flash_attn_interface as fa3
import pytest
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton
from flash_attn.call.calls import cache_call

torch.set_num_threads(2)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HEADS, DIM, LEFT = 2, 32, 40
LENGTHS = (200, 0, 77, 41)
STALE = {"NaN": torch.nan, "infinity": torch.inf}


def _pool(page: int, queries: int, stale: float, left: int = LEFT) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k, v, block table) of sequences of LENGTHS keys. Page 0 is stale: tables name it for pages that no query
    sees, and for pages after a sequence."""
    generator = torch.Generator().manual_seed(page)
    width = -(-max(LENGTHS) // page) + 2
    k, v = torch.randn(2, 1 + len(LENGTHS) * width, page, HEADS, DIM, generator=generator)
    k[0], v[0] = stale, stale
    table = torch.zeros(len(LENGTHS), width, dtype=torch.int32)
    for row, length in enumerate(LENGTHS):
        first = max(length - queries - left, 0) // page
        last = -(-length // page)
        table[row, first:last] = 1 + row * width + torch.arange(first, last, dtype=torch.int32)
    return k.to(DEVICE), v.to(DEVICE), table.to(DEVICE)


def _decoded(queries: int, page: int, stale: float, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    k, v, table = _pool(page, queries, stale)
    q = torch.randn(len(LENGTHS), queries, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    return flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, block_table=table, causal=True, window_size=(LEFT, 0), return_softmax_lse=True,
        **options,
    )  # fmt: skip


# Queries, tokens of a page, options: one query, few and many, pages of whole blocks and odd ones.
CACHES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "decode": (1, 16, {}),
    "decode, odd pages": (1, 7, {"num_splits": 1}),
    "decode in splits, sinks": (1, 64, {"num_splits": 3, "s_aux": torch.tensor([0.5, -1.0, 0.0, 2.0], device=DEVICE)}),
    "extend, ALiBi": (5, 16, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE)}),
    "extend, odd pages": (5, 5, {"softcap": 3.0}),
    "prefill": (70, 64, {}),
    "prefill, odd pages": (70, 9, {}),
}


@pytest.mark.parametrize("stale", STALE.values(), ids=list(STALE))
@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
@pytest.mark.parametrize("case", CACHES.values(), ids=list(CACHES))
def test_a_cache(case: tuple[int, int, dict[str, Any]], backend: Any, stale: float) -> None:
    if GPU and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    queries, page, options = case
    with backends.using(backend):
        clean = _decoded(queries, page, 0.0, **options)
        for got, expected in zip(_decoded(queries, page, stale, **options), clean, strict=True):
            assert torch.equal(got, expected)
    assert clean[0].isfinite().all()


@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
@pytest.mark.parametrize("page", [64, 9])
def test_packed_queries(page: int, backend: Any) -> None:
    if GPU and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    queries = (70, 0, 77, 1)
    q = torch.randn(sum(queries), 2 * HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ends_q, ends_k = (
        torch.tensor((0, *lengths), dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
        for lengths in (queries, LENGTHS)
    )
    results = []
    for stale in (0.0, torch.nan):
        k, v, table = _pool(page, max(queries), stale)
        with backends.using(backend):
            results.append(
                flash_attn_varlen_func(
                    q, k, v, ends_q, ends_k, 77, 200, causal=True, window_size=(LEFT, 0), block_table=table
                )
            )
    assert torch.equal(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
def test_chunks(backend: Any) -> None:
    """Queries 195 to 199 are in the chunk from key 192 on: pages before it are stale."""
    if GPU and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    q = torch.randn(len(LENGTHS), 3, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    lengths = torch.tensor((200, 0, 76, 40), dtype=torch.int32, device=DEVICE)
    results = []
    for stale in (0.0, torch.nan):
        k, v, table = _pool(16, 0, stale, left=8)
        with backends.using(backend):
            results.append(
                fa3.flash_attn_with_kvcache(
                    q, k, v, cache_seqlens=lengths, page_table=table, causal=True, attention_chunk=8
                )
            )
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def test_left_padding_before_a_window() -> None:
    """A cache without pages whose padding and whose first keys, which no query sees, hold NaN."""
    results = []
    for stale in (0.0, torch.nan):
        k, v = torch.randn(2, 2, 128, HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        k[:, :50], v[:, :50] = stale, stale
        q = torch.randn(2, 2, HEADS, DIM, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        lengths, padding = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((120, 99), (5, 0)))
        with backends.using(triton):
            results.append(
                flash_attn_with_kvcache(
                    q, k, v, cache_seqlens=lengths, cache_leftpad=padding, causal=True, window_size=(LEFT, 0)
                )
            )
    assert torch.equal(*results)
    assert results[0].isfinite().all()


@pytest.mark.skipif(GPU, reason="the interpreter reads FP8 of the type that it is given")
@pytest.mark.parametrize("page", [16, 7])
def test_an_fp8_cache(page: int) -> None:
    results = []
    for stale in (0.0, torch.nan):
        k, v, table = _pool(page, 1, stale)
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
        q = torch.randn(len(LENGTHS), 1, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(1)).half()
        ones = torch.ones(len(LENGTHS), HEADS)
        call = cache_call(
            q, k, v, softmax_scale=0.2, cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32), block_table=table,
            causal=True, window_size=(LEFT, 0), descales=(ones, ones, ones),
        )  # fmt: skip
        results.append(triton.kvcache(call)[0])
    assert torch.equal(*results)
    assert results[0].isfinite().all()
