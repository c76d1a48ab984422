"""FlashAttention-3's flash_attn_combine: one result of parts of the keys."""

from __future__ import annotations

from unittest import mock

import flash_attn_interface as fa3
import pytest
import torch
from assert_close import assert_close
from fa3_tensors import draw, qkv
from flash_attn.attention import backends
from small_calls import Late, in_one_graph


@pytest.mark.parametrize("packed", [False, True])
def test_combine(packed: bool) -> None:
    """Combining the results of splits of the keys, of which one is empty, equals attention over all keys."""
    q, k, v = qkv()
    expected, wanted_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [fa3.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(4), slice(4, 9))]
    outs = torch.stack([*(out for out, _ in parts), torch.full_like(expected, torch.nan)])
    lses = torch.stack([*(lse for _, lse in parts), torch.full_like(wanted_lse, -torch.inf)]).transpose(2, 3)
    wanted_lse = wanted_lse.transpose(1, 2)
    if packed:
        outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
        expected, wanted_lse = expected.flatten(0, 1), wanted_lse.flatten(0, 1)
    out, lse = fa3.flash_attn_combine(outs, lses)
    assert_close("out", out, expected)
    assert_close("lse", lse, wanted_lse)
    half = fa3.flash_attn_combine(outs, lses, out_dtype=torch.float16)[0]
    assert_close("fp16", half, expected, tiny=2e-3, dtype=torch.float16)
    given = torch.empty_like(expected)
    assert fa3.flash_attn_combine(outs, lses, given)[0] is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("packed", [False, True])
def test_combine_compiled_and_of_parts_on_their_way(packed: bool) -> None:
    shape = (3, 5, 4, 8) if packed else (3, 2, 5, 4, 8)
    parts = draw(*shape), draw(*shape[:-1], seed=1)
    expected = fa3.flash_attn_combine(*parts)
    kernels = mock.Mock()  # which take no address of such parts
    with backends.using(kernels):
        result = in_one_graph(fa3.flash_attn_combine)(*parts), fa3.flash_attn_combine(*map(Late, parts))
    assert not kernels.mock_calls
    for got in result:
        for name, x, y in zip(("out", "lse"), got, expected, strict=True):
            assert_close(name, x, y, tiny=1e-6)
