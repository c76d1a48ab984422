"""The module block_sparse_attn against a mask of single queries and keys, by the definition of its head types."""

from __future__ import annotations

from typing import Any

import block_sparse_attn
import pytest
import reference
import torch
from assert_close import assert_close
from block_sparse_attn.bert_padding import pad_input, unpad_input
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton

torch.set_num_threads(2)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BLOCK = 128


def _ends(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths), device=DEVICE).cumsum(0).int()


def _inputs(queries: tuple[int, ...], keys: tuple[int, ...], heads: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(queries))
    shapes = ((sum(queries), heads, 16), (sum(keys), 1, 16), (sum(keys), 1, 16))
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def _seen(kind: int, info: list[int], lengths: tuple[int, int], mask: Any, causal: bool, exact: bool) -> torch.Tensor:
    """bool (queries, keys) of a head."""
    seqlen_q, seqlen_k = lengths
    sinks, local = info
    shift = seqlen_k - seqlen_q
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    row, col = i // BLOCK, j // BLOCK
    if kind == 0:
        seen = torch.ones(lengths, dtype=torch.bool)
    elif kind > 0:
        seen = mask[row, col]
    elif exact:
        seen = (j < sinks) | (j > i + shift - local)
    else:  # the last block of a row of blocks, and the blocks before it
        last = (
            row - max(-shift // BLOCK, 0) - -max(shift, 0) // BLOCK if causal else -(-seqlen_k // BLOCK) - 1 + 0 * row
        )
        seen = (last >= 0) & ((col < sinks) | ((col > last - local) & (col <= last)))
    return seen & (j <= i + shift) if causal else seen.expand(lengths)


TYPES = torch.tensor([1, 0, -1, 1, -1], dtype=torch.int32, device=DEVICE)
# Lengths of queries and of keys, is_causal, exact_streaming, (sinks, local) of the streaming heads.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool, bool, list[int]]] = {
    "blocks": ((300,), (300,), False, False, [0, 0, 0, 0, 1, 1, 0, 0, 0, 2]),
    "causal, two sequences": ((260, 70), (260, 200), True, False, [0, 0, 0, 0, 1, 1, 0, 0, 0, 2]),
    "more queries than keys": ((300,), (150,), True, False, [0, 0, 0, 0, 1, 1, 0, 0, 2, 1]),
    "tokens": ((150, 0, 40), (150, 9, 130), True, True, [0, 0, 0, 0, 3, 20, 0, 0, 0, 7]),
}


@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_head_types(case: tuple[Any, ...], backend: Any) -> None:
    if GPU and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    queries, keys, causal, exact, info = case
    leaves = _inputs(queries, keys)
    blocks = (len(queries), 2, -(-max(queries) // BLOCK), -(-max(keys) // BLOCK))
    mask = torch.rand(blocks, generator=torch.Generator().manual_seed(7)) < 0.6
    with backends.using(backend):
        out, lse, _ = block_sparse_attn.block_sparse_attn_func(
            *leaves, _ends(queries), _ends(keys), TYPES, torch.tensor(info, device=DEVICE).int(), mask.to(DEVICE),
            max(queries), max(keys), 0.0, is_causal=causal, exact_streaming=exact, return_attn_probs=True,
        )  # fmt: skip
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        got = torch.autograd.grad(out, leaves, dout)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    parts = []
    of_entries = zip(*(x.split(n) for x, n in zip(wide, (queries, keys, keys), strict=True)), strict=True)
    for entry, rows in enumerate(of_entries):
        lengths = (queries[entry], keys[entry])
        masks = iter(mask[entry])
        of_heads = [
            _seen(kind, info[2 * head : 2 * head + 2], lengths, next(masks) if kind > 0 else None, causal, exact)
            for head, kind in enumerate(TYPES.tolist())
        ]
        seen = torch.stack(of_heads)[None].to(DEVICE)
        bias = torch.zeros(seen.shape, dtype=torch.float64, device=DEVICE).masked_fill(~seen, -torch.inf)
        best, best_lse = reference.attention(*(x[None] for x in rows), attn_bias=bias, dtype=torch.float64)
        parts.append(best[0])
        assert_close("lse", lse[entry, :, : lengths[0]], best_lse[0], tiny=1e-5)
        assert (lse[entry, :, lengths[0] :] == torch.inf).all()
    expected = torch.cat(parts)
    assert_close("out", out, expected, tiny=1e-5)
    for name, value, exact_value in zip("qkv", got, torch.autograd.grad(expected, wide, dout.double()), strict=True):
        assert_close(f"d{name}", value, exact_value, tiny=3e-5)


def test_the_functions_for_streaming_heads() -> None:
    q, k, v = _inputs((200,), (200,))
    ends, types = _ends((200,)), torch.tensor([-1, 0, -1, -1, 0], dtype=torch.int32, device=DEVICE)
    info = torch.tensor([1, 1] * 5, dtype=torch.int32, device=DEVICE)
    by_block, by_token = (
        block_sparse_attn.block_sparse_attn_func(
            q, k, v, ends, ends, types, info, None, 200, 200, 0.0, is_causal=True, exact_streaming=exact
        )
        for exact in (False, True)
    )
    blocks = block_sparse_attn.block_streaming_attn_func(q, k, v, ends, ends, types, info, 200, 200, 0.0)
    tokens = block_sparse_attn.token_streaming_attn_func(q, k, v, ends, ends, types, info, 200, 200)
    assert torch.equal(blocks, by_block)
    assert torch.equal(tokens, by_token)
    assert not torch.equal(by_block, by_token)


def test_rows_behind_the_last_sequence_are_zeros() -> None:
    q, k, v = _inputs((20,), (20,))
    ends, types = _ends((15,)), torch.zeros(5, dtype=torch.int32, device=DEVICE)
    out = block_sparse_attn.block_sparse_attn_func(q, k, v, ends, ends, types, None, None, 15, 15, 0.0)
    assert not out[15:].any()
    assert out[:15].any()


def test_padding_as_before_flash_attn_2_7() -> None:
    hidden = torch.randn(2, 5, 3)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    packed, indices, ends, longest = unpad_input(hidden, mask)
    assert ends.tolist() == [0, 3, 8]
    assert longest == 5
    assert torch.equal(pad_input(packed, indices, 2, 5), hidden * mask[..., None])


# What is wrong, and the message.
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dropout": ({"p_dropout": 0.1}, NotImplementedError, "p_dropout: got 0.1, wanted 0"),
    "types": ({"head_mask_type": torch.ones(3).int()}, ValueError, "head_mask_type: got 3 types, wanted 5"),
    "no mask": ({"base_blockmask": None}, ValueError, "base_blockmask: got None, wanted a block mask"),
    "mask": (
        {"base_blockmask": torch.ones(1, 4, 1, 1)},
        ValueError,
        r"base_blockmask: got shape \(1, 4, 1, 1\), wanted",
    ),
    "lengths": (
        {"cu_seqlens_k": torch.tensor([0, 21]).int()},
        ValueError,
        r"cu_seqlens_k: got \[0, 21\], wanted 0 first",
    ),
    "longest": ({"max_seqlen_q_": 19}, ValueError, "max_seqlen_q_: got 19, wanted at least 20"),
    "streaming": ({"head_mask_type": -torch.ones(5).int()}, TypeError, "streaming_info: got NoneType"),
    "exact": ({"exact_streaming": True}, ValueError, "exact_streaming: got True without is_causal"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument(name: str) -> None:
    changes, kind, says = WRONG[name]
    q, k, v = _inputs((20,), (20,))
    arguments = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": _ends((20,)), "cu_seqlens_k": _ends((20,)),
        "head_mask_type": torch.ones(5).int().to(DEVICE), "streaming_info": None,
        "base_blockmask": torch.ones(1, 5, 1, 1, device=DEVICE), "max_seqlen_q_": 20, "max_seqlen_k_": 20,
        "p_dropout": 0.0,
    }  # fmt: skip
    moved = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    with pytest.raises(kind, match=says):
        block_sparse_attn.block_sparse_attn_func(**(arguments | moved))
