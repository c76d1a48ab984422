"""Packed sequences, unequal lengths and pages through the Triton kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from assert_close import assert_close
from flash_attn.attention.backends import triton as backend
from flash_attn.attention.backends.triton import attention as triton_attention
from flash_attn.attention.backends.triton import gradients as triton_gradients
from flash_attn.attention.backends.triton import kernels as triton_kernels
from flash_attn.call.calls import attention_call
from triton_calls import DEVICE, Lengths, Options, run


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([37, 0, 5, 20], [30, 9, 0, 61]), ([1, 0, 5, 2, 70, 3, 1], [1, 0, 9, 75, 40, 0, 2])],
    ids=["as long as the longest", "packed blocks"],
)
def test_varlen_equals_dense_calls(
    monkeypatch: pytest.MonkeyPatch, lengths_q: list[int], lengths_k: list[int], causal: bool
) -> None:
    """A packed call gives the bits of one dense call for each sequence, also with empty sequences, where both split the
    query heads alike."""
    monkeypatch.setattr(triton_gradients, "splits_of", lambda *_: 2 if causal else 1)
    torch.manual_seed(0)
    q, dout = torch.randn(2, sum(lengths_q), 4, 16, device=DEVICE)
    k, v = torch.randn(2, sum(lengths_k), 2, 16, device=DEVICE)
    cu = [
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
        for lengths in (lengths_q, lengths_k)
    ]
    options = Options(causal=causal)
    got = run(q, k, v, dout, options, None, Lengths(*cu, max(lengths_q), max(lengths_k)))
    parts = zip(*(x.split(lengths_q) for x in (q, dout)), *(x.split(lengths_k) for x in (k, v)), strict=True)
    one_by_one = [run(*(x[None] for x in (q, k, v, dout)), options, None) for q, dout, k, v in parts]
    for index, name in enumerate(("out", "lse", "dq", "dk", "dv")):
        pieces = [result[index][0] for result in one_by_one]
        assert torch.equal(got[index], torch.cat(pieces, dim=1 if name == "lse" else 0)), name


@pytest.fixture
def _unwritten_is_nan() -> Iterator[None]:
    """Memory that no kernel writes is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_tiles", "_unwritten_is_nan")
@pytest.mark.parametrize("dim", [64, 72])
@pytest.mark.parametrize(
    "bounds",
    [[0, 5, 9], [3, 40, 40, 77], [*range(50, 60), 59, 130], [0, 0], [100, 100], [0]],
    ids=str,
)
def test_rows_outside_every_sequence(monkeypatch: pytest.MonkeyPatch, bounds: list[int], dim: int) -> None:
    """Their results and gradients are 0, as for rows without keys, and the other rows do not change.

    The splits of dk and dv have no other rows either.
    """
    monkeypatch.setattr(triton_gradients, "splits_of", lambda *_: 2 if dim == 72 else 1)
    q, dout = (torch.randn(200, 2, dim, device=DEVICE, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(220, 1, dim, device=DEVICE, dtype=torch.float16) for _ in range(2))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    longest = max((b - a for a, b in itertools.pairwise(bounds)), default=0)
    result = run(q, k, v, dout, Options(), None, Lengths(cu_seqlens, cu_seqlens, longest, longest))
    for name, tensor in zip(("out", "lse", "dq", "dk", "dv"), result, strict=True):
        rows = tensor.T if name == "lse" else tensor
        outside = torch.ones(rows.shape[0], dtype=torch.bool)
        outside[bounds[0] : bounds[-1]] = False
        assert (rows[outside] == (torch.inf if name == "lse" else 0.0)).all(), name
        assert rows[~outside].isfinite().all(), name


@pytest.mark.usefixtures("_tiles")
def test_more_sequences_than_are_looked_at_at_once() -> None:
    """A program finds its own among them: one key is the whole result, which a few long sequences interrupt."""
    lengths = [1] * 260
    lengths[0], lengths[255], lengths[259] = 40, 33, 70
    torch.manual_seed(9)
    q, k, v = torch.randn(3, sum(lengths), 1, 16, device=DEVICE)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    lengths_of = Lengths(cu_seqlens, cu_seqlens, 70, 70)
    out, lse, _, _ = backend.forward(attention_call(q, k, v, softmax_scale=0.25, causal=True, **lengths_of._asdict()))
    pieces = zip(lengths, *(x.split(lengths) for x in (q, k, v, out)), lse.split(lengths, dim=1), strict=True)
    for length, one_q, one_k, one_v, one_out, one_lse in pieces:
        if length == 1:
            torch.testing.assert_close(one_out, one_v)
            torch.testing.assert_close(one_lse[0, 0], 0.25 * (one_q * one_k).sum())
        else:
            dense = (x[None] for x in (one_q, one_k, one_v))
            expected, wanted_lse, _, _ = backend.forward(attention_call(*dense, softmax_scale=0.25, causal=True))
            assert torch.equal(one_out, expected[0])
            assert torch.equal(one_lse, wanted_lse[0])


@pytest.mark.usefixtures("_tiles")
def test_seqused_and_leftpad_choose_the_keys() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 40, 2, 16, device=DEVICE) for _ in range(3))
    used = torch.tensor([33, 20], dtype=torch.int32, device=DEVICE)
    pad = torch.tensor([4, 0], dtype=torch.int32, device=DEVICE)
    out, lse, _, _ = backend.forward(
        attention_call(q, k, v, softmax_scale=0.25, causal=True, seqused_k=used, leftpad_k=pad)
    )
    for entry in range(2):
        keys = slice(int(pad[entry]), int(used[entry]))
        expected, wanted_lse, _, _ = backend.forward(
            attention_call(q[entry, None], k[entry, None, keys], v[entry, None, keys], softmax_scale=0.25, causal=True)
        )
        assert torch.equal(out[entry], expected[0])
        assert torch.equal(lse[entry], wanted_lse[0])


@pytest.mark.parametrize(
    ("page_size", "dim", "softcap", "tiles", "whole"),
    [
        (16, 24, 0.0, "_tiles", False),
        (7, 72, 2.0, "_tiles", False),
        (64, 24, 2.0, "_tiles", False),
        (16, 24, 2.0, "_deep_tiles", False),
        (16, 80, 0.0, "_deep_tiles", False),
        (64, 24, 0.0, "_tiles", True),
        (128, 72, 2.0, "_tiles", True),
        (64, 80, 2.0, "_deep_tiles", True),
    ],
)
def test_pages_are_followed(
    page_size: int, dim: int, softcap: float, tiles: str, whole: bool, request: pytest.FixtureRequest
) -> None:
    """Shuffled pages, unequal lengths, padding on the left: the bits of the same keys laid out in a row. whole: no
    padding, in a type of 16 bits, which has a kernel for blocks of keys within a page."""
    request.getfixturevalue(tiles)
    torch.manual_seed(6)
    dtype = torch.float16 if whole else torch.float32
    lengths_q, lengths_k, pads = [9, 33], [50, 71], [0 if whole else 3, 0]
    pages = [-(-length // page_size) for length in lengths_k]
    order = torch.randperm(sum(pages) + 2)
    table = torch.zeros(2, max(pages), dtype=torch.int32)
    table[0, : pages[0]], table[1, : pages[1]] = order[: pages[0]], order[pages[0] : sum(pages)]
    k, v = torch.randn(2, len(order), page_size, 2, dim, device=DEVICE).to(dtype)
    q = torch.randn(sum(lengths_q), 4, dim, device=DEVICE).to(dtype)

    def offsets(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)

    pad = None if whole else torch.tensor(pads, dtype=torch.int32, device=DEVICE)
    lengths = Lengths(offsets(lengths_q), offsets(lengths_k), max(lengths_q), max(lengths_k))
    call = attention_call(
        q,
        k,
        v,
        softmax_scale=0.2,
        causal=True,
        window_size=(30, -1),
        softcap=softcap,
        **lengths._asdict(),
        leftpad_k=pad,
        block_table=table.to(DEVICE),
    )
    out, lse, _, _ = backend.forward(call)
    ops = triton_attention.forward_ops(call, triton_kernels.score_kind(call))
    assert ops == (("fwd-paged-whole",) if whole else ("fwd-paged",))
    rows = [
        x[table[entry].to(DEVICE)].flatten(0, 1)[pads[entry] : lengths_k[entry]] for x in (k, v) for entry in (0, 1)
    ]
    plain_k, plain_v = torch.cat(rows[:2]), torch.cat(rows[2:])
    lengths = lengths._replace(cu_seqlens_k=offsets([n - p for n, p in zip(lengths_k, pads, strict=True)]))
    plain = attention_call(
        q, plain_k, plain_v, softmax_scale=0.2, causal=True, window_size=(30, -1), softcap=softcap, **lengths._asdict()
    )
    expected, wanted_lse, _, _ = backend.forward(plain)
    if whole and softcap:  # the plain keys' kernel is one of its own for softcap
        assert_close("out", out, expected, tiny=1e-3)
        assert_close("lse", lse, wanted_lse, tiny=1e-5)
    else:
        assert torch.equal(out, expected)
        assert torch.equal(lse, wanted_lse)
