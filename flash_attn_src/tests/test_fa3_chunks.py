"""FlashAttention-3's attention_chunk: a query sees the keys of its own chunk."""

from __future__ import annotations

import flash_attn_interface as fa3
import pytest
import reference
import torch
from assert_close import assert_close
from fa3_tensors import draw, index, qkv


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_attention_chunk(num_splits: int) -> None:
    q, k, v = qkv()
    out = fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=4, num_splits=num_splits)
    for row in range(6):
        place = row + 3
        keys = slice(place // 4 * 4, place + 1)
        expected, _ = reference.attention(q[:, row, None], k[:, keys], v[:, keys])
        assert_close(f"row {row}", out[:, row, None], expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [3, 4, 100, (1 << 31) - 1])
@pytest.mark.parametrize("lengths", [(6, 9), (9, 6), (5, 0), (1, 8)], ids=str)
def test_attention_chunk_has_gradients_dense_and_packed(causal: bool, chunk: int, lengths: tuple[int, int]) -> None:
    """Compare each row with attention over its own chunk; the queries before key 0 see no key."""
    seqlen_q, seqlen_k = lengths
    q, k, v = draw(2, seqlen_q, 4, 16), draw(2, seqlen_k, 2, 16), draw(2, seqlen_k, 2, 16)
    dout = draw(2, seqlen_q, 4, 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rows = []
    for row in range(seqlen_q):
        place = row + seqlen_k - seqlen_q
        keys = slice(0, 0)
        if place >= 0:
            keys = slice(place // chunk * chunk, place + 1 if causal else (place // chunk + 1) * chunk)
        result = reference.attention(q[:, row, None], k[:, keys], v[:, keys])[0] if place >= 0 else q[:, row, None] * 0
        rows.append(result)
    expected = torch.cat(rows, 1)
    gradients = torch.autograd.grad(expected, leaves, dout, allow_unused=True)
    options = {"causal": causal, "attention_chunk": chunk, "return_attn_probs": True}
    dense, lse = fa3.flash_attn_func(q, k, v, **options)
    cu_seqlens = index(0, seqlen_q, 2 * seqlen_q), index(0, seqlen_k, 2 * seqlen_k)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed, packed_lse = fa3.flash_attn_varlen_func(*flat, *cu_seqlens, seqlen_q, seqlen_k, **options)
    assert lse.shape == (2, 4, seqlen_q)
    assert torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)
    for name, out in (("dense", dense), ("packed", packed.view(q.shape))):
        assert_close(name, out, expected)
        for part, got, want in zip("qkv", torch.autograd.grad(out, leaves, dout), gradients, strict=True):
            assert_close(f"{name} d{part}", got, torch.zeros_like(got) if want is None else want)
