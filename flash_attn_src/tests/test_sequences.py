"""Packed and paged sequences of the pure PyTorch backend:

equal results to separate calls, and errors for wrong indices.
"""

from __future__ import annotations

import itertools
from typing import Any

import flash_attn
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn.attention.backends import torch as backend
from flash_attn.call.calls import attention_call

torch.set_num_threads(2)


def _varlen(lengths_q: list[int], lengths_k: list[int]) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    torch.manual_seed(sum(lengths_q))
    q = torch.randn(sum(lengths_q), 4, 16, requires_grad=True)
    k, v = (torch.randn(sum(lengths_k), 2, 16, requires_grad=True) for _ in range(2))
    cu = [torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (lengths_q, lengths_k)]
    return (q, k, v), (*cu, max(lengths_q), max(lengths_k))


LENGTHS = [([5, 130, 0, 1], [9, 200, 4, 0]), ([300], [7]), ([1, 1, 1], [40, 270, 3])]


@pytest.mark.parametrize(("lengths_q", "lengths_k"), LENGTHS)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (9, 4)}, {"softcap": 3.0, "alibi": True}, {"dropout_p": 0.25}],
    ids=str,
)
def test_varlen_equals_separate_calls(lengths_q: list[int], lengths_k: list[int], options: dict[str, Any]) -> None:
    options = dict(options)
    tensors, lengths = _varlen(lengths_q, lengths_k)
    slopes = torch.rand(len(lengths_q), 4) if options.pop("alibi", False) else None
    out, lse, dmask = flash_attn.flash_attn_varlen_func(
        *tensors, *lengths, alibi_slopes=slopes, return_attn_probs=True, **reference.public(options)
    )
    dout = torch.randn(out.shape)
    got = torch.autograd.grad(out, tensors, dout)
    assert out.shape == tensors[0].shape
    assert lse.shape == (4, sum(lengths_q))
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    outs, lses = [], []
    for i, (parts_q, parts_k, parts_v) in enumerate(
        zip(doubles[0].split(lengths_q), doubles[1].split(lengths_k), doubles[2].split(lengths_k), strict=True)
    ):
        if options.get("dropout_p"):
            options["kept"] = dmask[i, None, :, : lengths_q[i], : lengths_k[i]] >= 0
        o, stat = reference.attention(
            *(x[None] for x in (parts_q, parts_k, parts_v)),
            dtype=torch.float64,
            alibi_slopes=None if slopes is None else slopes[i],
            **options,
        )
        outs.append(o[0])
        lses.append(stat[0])
    expected = torch.autograd.grad(torch.cat(outs), doubles, dout.double())
    assert_close("out", out, torch.cat(outs))
    assert_close("lse", lse, torch.cat(lses, 1))
    for name, value, best in zip(("dq", "dk", "dv"), got, expected, strict=True):
        assert_close(name, value, best)


def test_rows_outside_every_sequence_are_zero() -> None:
    (q, k, v), (cu_q, cu_k, *longest) = _varlen([5, 4], [6, 3])
    q = torch.cat([q, torch.full((3, 4, 16), torch.nan)]).detach().requires_grad_()
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, return_attn_probs=True)
    out.sum().backward()
    assert torch.equal(out[9:], torch.zeros(3, 4, 16))
    assert bool((lse[:, 9:] == torch.inf).all())
    assert torch.equal(q.grad[9:], torch.zeros(3, 4, 16))


def _pages(x: torch.Tensor, lengths: list[int], page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of x (total, h, d) scattered over shuffled pages full of NaN, and the block table."""
    needed = [-(-length // page) for length in lengths]
    torch.manual_seed(page)
    order = torch.randperm(sum(needed) + 2).tolist()
    pages = torch.full((sum(needed) + 2, page, *x.shape[1:]), torch.nan)
    table = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    for i, (sequence, count) in enumerate(zip(x.split(lengths), needed, strict=True)):
        for j in range(count):
            table[i, j] = order.pop()
            rows = sequence[j * page : (j + 1) * page]
            pages[table[i, j], : rows.shape[0]] = rows
    return pages, table


def test_paged() -> None:
    (q, k, v), lengths = _varlen([5, 130, 2], [9, 200, 33])
    pages_k, table = _pages(k.detach(), [9, 200, 33], 32)
    pages_v, _ = _pages(v.detach(), [9, 200, 33], 32)
    out = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, *lengths, causal=True, block_table=table)
    expected = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, causal=True)
    assert_close("out", out, expected)
    with pytest.raises(RuntimeError, match="block_table"):
        out.sum().backward()


def test_seqused_and_leftpad() -> None:
    (q, k, v), lengths = _varlen([5, 130], [90, 200])
    used, pads = torch.tensor([70, 0], dtype=torch.int32), torch.tensor([11, 0], dtype=torch.int32)
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = lengths
    out, lse, _, _ = backend.forward(attention_call(
        q, k, v, softmax_scale=0.25, causal=True, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=longest_q,
        max_seqlen_k=longest_k, seqused_k=used, leftpad_k=pads,
    ))  # fmt: skip
    expected, wanted_lse = reference.attention(
        q[None, :5], k[None, 11:70], v[None, 11:70], softmax_scale=0.25, causal=True
    )
    assert_close("out", out[:5], expected[0])
    assert_close("lse", lse[:, :5], wanted_lse[0])
    assert not bool(out[5:].any())
    dense = torch.stack([q[:5], q[5:10]])
    caches = [torch.stack([x[:90], x[90:180]]) for x in (k, v)]
    out, lse, _, _ = backend.forward(
        attention_call(dense, *caches, softmax_scale=0.25, causal=True, seqused_k=used, leftpad_k=pads)
    )
    assert_close("out", out[0], expected[0])
    assert_close("lse", lse[0], wanted_lse[0])
    assert bool((lse[1] == torch.inf).all())


def test_seqused_gives_the_lengths_of_sequences_with_gaps() -> None:
    """As xformers' masks of keys with gaps, and serving engines with pages: cu_seqlens_k is where room begins."""
    (q, k, v), (cu_seqlens_q, room, _, _) = _varlen([1, 1], [32, 32])
    used = torch.tensor([5, 7], dtype=torch.int32)
    out = flash_attn.flash_attn_interface._flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, room, 1, 7, 0.0, 0.25, True, seqused_k=used
    )[0]
    pages = [x.view(4, 16, *x.shape[1:]) for x in (k, v)]
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    paged = flash_attn.flash_attn_interface._flash_attn_varlen_forward(
        q, *pages, cu_seqlens_q, room.flip(0), 1, 7, 0.0, 0.25, True, seqused_k=used, block_table=table
    )[0]
    for index, (start, length) in enumerate(((0, 5), (32, 7))):
        keys = slice(start, start + length)
        expected, _ = reference.attention(q[None, index : index + 1], k[None, keys], v[None, keys], softmax_scale=0.25)
        assert_close("out", out[index : index + 1], expected[0])
        assert_close("paged", paged[index : index + 1], expected[0])
    with pytest.raises(ValueError, match="seqused_k: got 33 at index 1, wanted 0 to 32"):
        flash_attn.flash_attn_interface._flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, room, 1, 33, 0.0, 0.25, True, seqused_k=used + torch.tensor([0, 26]).int()
        )


def test_sequences_with_used_lengths_start_in_any_order() -> None:
    """As xformers' masks of keys with gaps: the second sequence begins before the first and overlaps the third."""
    (q, k, v), _ = _varlen([2, 1, 3], [32, 32])
    cu_seqlens_q = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    starts, used = [40, 8, 10, 64], [24, 6, 9]
    arguments = (cu_seqlens_q, torch.tensor(starts, dtype=torch.int32), 3, 24, 0.0, 0.25, False)
    forward = flash_attn.flash_attn_interface._flash_attn_varlen_forward
    out = forward(q, k, v, *arguments, seqused_k=torch.tensor(used, dtype=torch.int32))[0]
    for rows, start, length in zip((slice(0, 2), slice(2, 3), slice(3, 6)), starts, used, strict=False):
        keys = slice(start, start + length)
        expected, _ = reference.attention(q[None, rows], k[None, keys], v[None, keys], softmax_scale=0.25)
        assert_close("out", out[rows], expected[0])
    with pytest.raises(ValueError, match="seqused_k: got 25 at index 0, wanted 0 to 24"):
        forward(q, k, v, *arguments, seqused_k=torch.tensor([25, 6, 9], dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cu_seqlens_q", {"cu_q": [0, 5, 4]}),
        ("cu_seqlens_q", {"cu_q": [0, 5, 400]}),
        ("cu_seqlens_k", {"cu_k": [-1, 5, 9]}),
        ("max_seqlen_q", {"max_q": 3}),
    ],
)
def test_bad_sequences_are_named(name: str, change: dict[str, Any]) -> None:
    (q, k, v), _ = _varlen([5, 4], [6, 3])
    values = {"cu_q": [0, 5, 9], "cu_k": [0, 6, 9], "max_q": 5, **change}
    cu_q, cu_k = (torch.tensor(values[key], dtype=torch.int32) for key in ("cu_q", "cu_k"))
    with pytest.raises(ValueError, match=name):
        flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, values["max_q"], 6)


def test_bad_block_table_is_named() -> None:
    (q, k, _), lengths = _varlen([5, 4], [6, 3])
    pages, table = _pages(k.detach(), [6, 3], 8)
    table[1, 0] = pages.shape[0]
    with pytest.raises(ValueError, match="block_table"):
        flash_attn.flash_attn_varlen_func(q, pages, pages, *lengths, block_table=table)
