"""The pure PyTorch module: masks on the right axes, dropout, memory, gradients."""

from __future__ import annotations

import flash_attention_amd
import flash_attn
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attention_amd import FlashAttention, FlashAttentionInterface, flash_attn_func


def _draw(sq: int = 7, sk: int = 9, heads: int = 4, heads_k: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(sq)
    return tuple(
        torch.randn(2, n, h, 8, dtype=torch.float64, requires_grad=True)
        for n, h in ((sq, heads), (sk, heads_k), (sk, heads_k))
    )


@pytest.fixture(params=[1, 3, None], ids=["row by row", "three rows", "one block"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(flash_attention_amd, "_BLOCK_SCORES", request.param * 2 * 4 * 9)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(7, 9), (9, 9), (9, 4), (1, 9)])
def test_equals_attention_by_the_book(sq: int, sk: int, causal: bool) -> None:
    q, k, v = _draw(sq, sk)
    out = FlashAttention(causal=causal)(q, k, v)
    expected, _ = reference.attention(q, k, v, causal=causal, dtype=torch.float64)
    assert_close("out", out, expected, tiny=1e-12)
    dout = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout), strict=True
    ):
        assert_close("gradient", got, want, tiny=1e-12)


MASKS = {
    "batch, keys": (2, 9),
    "batch, queries, keys": (2, 7, 9),
    "batch, 1, queries, keys": (2, 1, 7, 9),
    "batch, heads, queries, keys": (2, 4, 7, 9),
    "1, 1, queries, keys": (1, 1, 7, 9),
    "batch, 1, 1, keys": (2, 1, 1, 9),
}


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_masks(mask: str, dtype: torch.dtype) -> None:
    q, k, v = _draw()
    shape = MASKS[mask]
    visible = torch.rand(shape) < 0.6
    visible[..., 0] = True
    out = FlashAttention()(q, k, v, visible.to(dtype))
    full = {2: visible[:, None, None], 3: visible[:, None] if visible.dim() == 3 else visible}.get(len(shape), visible)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), *(x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v)), full.expand(2, 4, 7, 9)
    )
    assert_close("out", out, expected.transpose(1, 2), tiny=1e-12)


def test_a_query_that_sees_nothing_gives_zero_and_no_nan() -> None:
    q, k, v = _draw()
    visible = torch.ones(2, 7, 9, dtype=torch.bool)
    visible[0, 3] = False
    out = FlashAttention()(q, k, v, visible)
    assert out[0, 3].eq(0).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_dropout_is_of_training_and_the_same_in_the_backward() -> None:
    q, k, _ = _draw(heads=2)
    v = torch.eye(9, 9)[None, :, None].expand(2, 9, 2, 9).double().requires_grad_()
    q, k = (torch.cat((x.detach(), torch.zeros(*x.shape[:3], 1)), -1).requires_grad_() for x in (q, k))
    module = FlashAttention(dropout=0.4)
    exact, p = flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(module.eval()(q, k, v), exact)
    out = module.train()(q, k, v)
    kept = out != 0
    assert 0.4 < kept.double().mean() < 0.8
    # v is the identity, so out is the dropped probabilities themselves.
    expected = torch.where(kept, p.transpose(1, 2), 0.0) / 0.6
    assert_close("out", out, expected, tiny=1e-12)
    weights = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, (q, k), weights), torch.autograd.grad(expected, (q, k), weights), strict=True
    ):
        assert_close("gradient", got, want, tiny=1e-12)
    assert flash_attn_func(q, k, v, dropout_p=0.4).eq(0).any()


def test_functions_agree_with_flash_attn() -> None:
    q, k, v = _draw()
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert_close("out", flash_attn_func(q, k, v, causal=True), expected, tiny=1e-12)
    assert_close("out", FlashAttentionInterface.apply(q, k, v, 0.0, True), expected, tiny=1e-12)
    assert_close("out", FlashAttentionInterface.forward(None, q, k, v, causal=True), expected, tiny=1e-12)
    _, p = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert p.shape == (2, 4, 7, 9)
    assert_close("p", p.sum(-1), torch.ones(2, 4, 7), tiny=1e-12)
    low, _ = flash_attn_func(*(x.bfloat16() for x in (q, k, v)), return_attn_probs=True)
    assert low.dtype is torch.bfloat16


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd keeps grows as the sequence does, not as its square."""
    monkeypatch.setattr(flash_attention_amd, "_BLOCK_SCORES", 1 << 12)
    kept = []
    for seqlen in (64, 128):
        x = torch.randn(1, seqlen, 1, 8, requires_grad=True)
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()  # noqa: B023
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            FlashAttention(causal=True)(x, x, x).sum().backward()
        kept.append(sum(sizes.values()))
    assert kept[1] < 3 * kept[0]


ERRORS = {
    "q": ({"q": 3}, TypeError, "q: got int"),
    "rank": ({"k": torch.zeros(2, 9, 8)}, ValueError, "k: got shape"),
    "dtype": ({"v": torch.zeros(2, 9, 2, 8).half()}, TypeError, "v: got torch.float16"),
    "device": ({"k": torch.zeros(2, 9, 2, 8, device="meta")}, ValueError, "k: got a tensor on meta"),
    "v": ({"v": torch.zeros(2, 8, 2, 8)}, ValueError, "v: got shape"),
    "batch": ({"q": torch.zeros(3, 7, 4, 8)}, ValueError, "k: got shape"),
    "heads": ({"q": torch.zeros(2, 7, 3, 8)}, ValueError, "q: got 3 heads"),
    "mask type": ({"mask": [1]}, TypeError, "mask: got list"),
    "mask dtype": ({"mask": torch.zeros(2, 9)}, TypeError, "mask: got torch.strided of torch.float32"),
    "mask shape": ({"mask": torch.zeros(2, 7, dtype=torch.bool)}, ValueError, r"mask: got shape \(2, 7\)"),
    "mask heads": ({"mask": torch.zeros(2, 3, 7, 9, dtype=torch.bool)}, ValueError, "mask: got shape"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    change, error, match = ERRORS[case]
    shapes = {"q": (2, 7, 4, 8), "k": (2, 9, 2, 8), "v": (2, 9, 2, 8)}
    arguments = {**{name: torch.zeros(shape) for name, shape in shapes.items()}, **change}
    with pytest.raises(error, match=match):
        FlashAttention()(**arguments)


def test_dropout_is_checked() -> None:
    with pytest.raises(ValueError, match=r"dropout: got 1\.0"):
        FlashAttention(dropout=1.0)
    with pytest.raises(TypeError, match="dropout_p: got 'a'"):
        flash_attn_func(*(torch.zeros(1, 1, 1, 8),) * 3, dropout_p="a")


def test_autocast_leaves_the_scores_in_fp32() -> None:
    torch.manual_seed(0)
    q, k, v = ((torch.randn(1, 64, 2, 64) * factor).bfloat16().requires_grad_() for factor in (4, 4, 1))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = flash_attention_amd.flash_attn_func(q, k, v, causal=True)
            both = flash_attention_amd.flash_attn_func(q, k, v, return_attn_probs=True)
        results.append((out, *both, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


@pytest.mark.parametrize("keys", [0, 5])
def test_no_queries_keep_the_history(keys: int) -> None:
    q = torch.randn(1, 0, 2, 8, requires_grad=True)
    k, v = (torch.randn(1, keys, 2, 8, requires_grad=True) for _ in range(2))
    for causal in (False, True):
        out = flash_attention_amd.flash_attn_func(q, k, v, causal=causal)
        assert out.shape == q.shape
        assert all(not x.any() for x in torch.autograd.grad(out.sum(), (q, k, v)))
    _, probabilities = flash_attention_amd.flash_attn_func(q, k, v, return_attn_probs=True)
    assert probabilities.shape == (1, 2, 0, keys)
