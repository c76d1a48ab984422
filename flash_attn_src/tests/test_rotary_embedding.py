"""The module RotaryEmbedding: its tables, that they grow and serve, xPos, under torch.compile."""

from __future__ import annotations

import pytest
import torch
from assert_close import assert_close
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb_torch


def test_a_fraction_of_the_head_dim_is_a_dim() -> None:
    assert RotaryEmbedding(64 * 0.5).dim == 32
    with pytest.raises(TypeError, match=r"dim: got 32\.5, wanted an int"):
        RotaryEmbedding(32.5)


def test_module_tables_grow_and_serve() -> None:
    torch.manual_seed(2)
    module = RotaryEmbedding(8, base=100.0)
    angles = torch.outer(torch.arange(30.0), 100.0 ** (-torch.arange(0, 8, 2) / 8))
    q, kv = torch.randn(2, 6, 3, 16), torch.randn(2, 6, 2, 3, 16)
    for offset in (0, 20):
        cos, sin = (table[offset : offset + 6] for table in (angles.cos(), angles.sin()))
        wanted_q = apply_rotary_emb_torch(q, cos, sin)
        wanted_k = apply_rotary_emb_torch(kv[:, :, 0], cos, sin)
        got_q, got_kv = module(q.clone(), kv.clone(), seqlen_offset=offset)
        assert_close("q", got_q, wanted_q, tiny=1e-5)
        assert_close("k", got_kv[:, :, 0], wanted_k, tiny=1e-5)
        assert torch.equal(got_kv[:, :, 1], kv[:, :, 1])
    packed = module(torch.cat((q, kv.flatten(2, 3)), 2), seqlen_offset=20, num_heads_q=3)
    assert torch.equal(packed, torch.cat((got_q, got_kv.flatten(2, 3)), 2))
    assert module._seq_len_cached == 26
    rows = torch.tensor([3, 11])
    got, _ = module(q.clone(), kv.clone(), seqlen_offset=rows)
    assert torch.equal(got[1], module(q.clone(), kv.clone(), seqlen_offset=11)[0][1])
    half = RotaryEmbedding(8).bfloat16()
    exact = torch.outer(torch.arange(500.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8)).cos()
    assert_close("cos", half.tables(500, exact.device, torch.bfloat16)[0], exact, tiny=5e-3)
    before = module(q.clone(), kv.clone(), seqlen_offset=20)[0]
    module.inv_freq.data.mul_(0.5)  # moves no version
    assert not torch.equal(module(q.clone(), kv.clone(), seqlen_offset=20)[0], before)
    with pytest.raises(ValueError, match="max_seqlen: got None"):
        RotaryEmbedding(8)(q, kv, seqlen_offset=rows)


def test_xpos_scores_decay_with_the_distance_alone() -> None:
    """Queries and keys scaled against each other: their product depends on the distance, as without xPos."""
    module = RotaryEmbedding(8, scale_base=16)
    q = torch.randn(8).expand(1, 40, 1, 8)
    k = torch.randn(8).expand(1, 40, 1, 8)
    turned_q, turned_kv = module(q.clone(), torch.stack((k, k), 2))
    scores = torch.einsum("qd,kd->qk", turned_q[0, :, 0], turned_kv[0, :, 0, 0])
    for distance in (0, 3, 17):
        diagonal = scores.diagonal(-distance)
        assert_close("scores", diagonal, diagonal[:1].expand_as(diagonal), tiny=1e-4)
    qkv = module(torch.stack((q, k, k), 2).clone())
    assert torch.equal(qkv[:, :, 0], turned_q)
    assert torch.equal(qkv[:, :, 1], turned_kv[:, :, 0])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("scale_base", [None, 16.0])
def test_the_module_compiles_whole(scale_base: float | None, split: bool) -> None:
    torch.manual_seed(4)
    torch.compiler.reset()
    module = RotaryEmbedding(8, scale_base=scale_base)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, kv = (x * 1.0).split([1, 2], 2)
        return module(q.squeeze(2), kv) if split else (module(x * 1.0),)

    x = torch.randn(2, 9, 3, 2, 8, requires_grad=True)
    results = [function(x) for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager"))]
    for got, expected in zip(*results, strict=True):
        assert_close("turned", got, expected, tiny=1e-6)
    gradients = [torch.autograd.grad(sum(each.sin().sum() for each in result), x)[0] for result in results]
    assert_close("dx", *gradients, tiny=1e-6)
