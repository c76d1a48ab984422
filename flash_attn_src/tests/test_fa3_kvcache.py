"""FlashAttention-3's cache of keys and values, and the metadata of its splits."""

from __future__ import annotations

import flash_attn_interface as fa3
import pytest
import torch
from assert_close import assert_close
from fa3_tensors import DEVICE, draw, index, qkv
from small_calls import in_one_graph


def test_kvcache_arguments_of_version_3() -> None:
    """Packed queries, packed new keys and rotary places of their own, one sequence at a time."""
    caches = [draw(2, 32, 2, 16, seed=i) for i in (3, 4)]
    alone = [cache.clone() for cache in caches]
    q, k, v = draw(5, 4, 16), draw(3, 2, 16, seed=5), draw(3, 2, 16, seed=6)
    angles = torch.rand(64, 4, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False}
    out, lse, *rest = fa3.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=index(7, 20), cu_seqlens_q=index(0, 2, 5), cu_seqlens_k_new=index(0, 1, 3),
        max_seqlen_q=3, rotary_seqlens=index(40, 2), causal=True, return_softmax_lse=True, **rotary,
    )  # fmt: skip
    assert lse.shape == (4, 5)
    assert [x.numel() for x in rest] == [0, 0]
    alone_as = [(slice(0, 2), slice(0, 1), 7, 40), (slice(2, 5), slice(1, 3), 20, 2)]
    for i, (rows, new, length, origin) in enumerate(alone_as):
        expected = fa3.flash_attn_with_kvcache(
            q[None, rows], *(cache[i, None] for cache in alone), k[None, new], v[None, new], cache_seqlens=length,
            rotary_seqlens=index(origin), causal=True, **rotary,
        )  # fmt: skip
        assert_close("out", out[rows], expected[0])
    for cache, wanted_cache in zip(caches, alone, strict=True):
        assert torch.equal(cache, wanted_cache)


def test_pages_and_metadata() -> None:
    q, k, v = qkv()
    pages = [x.reshape(6, 3, 2, 16) for x in (k, v)]
    table = index(*range(6)).view(2, 3)
    lengths = index(9, 9)
    metadata = fa3.get_scheduler_metadata(2, 6, 9, 4, 2, 16, lengths)
    out = fa3.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, page_table=table, scheduler_metadata=metadata)
    assert_close("out", out, fa3.flash_attn_func(q, k, v))
    assert metadata.dtype is torch.int32
    assert int(fa3.get_scheduler_metadata(2, 6, 9, 4, 2, 16, lengths, num_splits=5)) == 5


def test_metadata_splits_calls_that_leave_compute_units_idle() -> None:
    def parts(batch: int, *shape: int, **options: int) -> int:
        return int(fa3.get_scheduler_metadata(batch, *shape, 128, index(*[0] * batch), **options))

    assert parts(1, 1, 64, 8, 1) == 1 < parts(1, 1, 1 << 16, 8, 1)
    assert parts(1, 1, 64, 8, 1, max_seqlen_k_new=1 << 16) > 1
    assert parts(1 << 14, 1, 1 << 16, 8, 1) == parts(1, 1 << 12, 1 << 16, 64, 1) == 1  # for all GPUs of today
    with pytest.raises(ValueError, match="num_heads_q: got 4, wanted a multiple of num_heads_kv = 0"):
        parts(1, 1, 64, 4, 0)


def test_cache_batch_idx_chooses_rows_of_the_page_table() -> None:
    q, k, v = qkv()
    options = {"cache_seqlens": index(9, 9), "page_table": index(*range(6)).view(2, 3)}
    pages = [x.reshape(6, 3, 2, 16) for x in (k, v)]
    out = fa3.flash_attn_with_kvcache(q, *pages, **options, cache_batch_idx=index(1, 0))
    assert_close("out", out, fa3.flash_attn_func(q, k.flip(0), v.flip(0)))
    # Reading them on a GPU would wait for it: PyTorch's own assertion ends the program there.
    for wrong in ((-1, 0), (0, 2)) if DEVICE == "cpu" else ():
        with pytest.raises(ValueError, match=r"cache_batch_idx: got \[.*\], wanted 0 to 1, rows of page_table"):
            fa3.flash_attn_with_kvcache(q, *pages, **options, cache_batch_idx=index(*wrong))
    options["page_table"] = [[0, 1, 2]]
    with pytest.raises(TypeError, match="page_table: got list, wanted an int32 tensor"):
        fa3.flash_attn_with_kvcache(q, *pages, **options, cache_batch_idx=index(0, 0))


def test_compiled_with_used_lengths_and_rows_of_pages() -> None:
    q, cu = draw(12, 2, 8), index(0, 4, 12)
    used = index(3, 5)
    pages, table = draw(4, 6, 2, 8, seed=1), index(0, 1, 2, 3).view(2, 2)

    def block(q: torch.Tensor, used: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = fa3.flash_attn_varlen_func(q, q, q, cu, cu, 8, 8, seqused_q=used, seqused_k=used)
        more = fa3.flash_attn_with_kvcache(
            q[:2, None], pages, pages.clone(), cache_seqlens=used, page_table=table, cache_batch_idx=rows
        )
        return out, more

    rows = index(1, 0)
    for x, y in zip(in_one_graph(block)(q, used, rows), block(q, used, rows), strict=True):
        assert torch.equal(x, y)
