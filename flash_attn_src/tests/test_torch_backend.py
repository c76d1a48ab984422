"""The pure PyTorch backend, through the public functions, compared with reference attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import flash_attn
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn.attention.backends import torch as backend
from flash_attn.attention.backends.torch import tiles
from flash_attn.call.calls import GradientCall, attention_call, replace
from torch.utils._python_dispatch import TorchDispatchMode

torch.set_num_threads(2)


def _tensors(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    heads_k: int,
    dim: int,
    dtype: torch.dtype,
    dim_v: int | None = None,
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seqlen_q * 1000 + seqlen_k * 10 + dim)
    shapes = [(batch, seqlen_q, heads, dim), *((batch, seqlen_k, heads_k, wide) for wide in (dim, dim_v or dim))]
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


def _check(tensors: tuple[torch.Tensor, ...], call: dict[str, Any], expected: dict[str, Any]) -> None:
    """Forward, lse and the three gradients, within twice the error of PyTorch in the same type."""
    q, k, v = tensors
    dtype = q.dtype
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **call)
    dout = torch.randn(out.shape).to(dtype)
    got = torch.autograd.grad(out, tensors, dout)

    def run(compute: torch.dtype) -> tuple[torch.Tensor, ...]:
        o, stat = reference.attention(q, k, v, dtype=compute, **expected)
        return o, stat, *torch.autograd.grad(o, tensors, dout.to(compute))

    exact, rough = run(torch.float64), run(dtype)
    assert_close("out", out, exact[0], rough=rough[0], dtype=dtype)
    assert_close("lse", lse, exact[1], tiny=2e-6, dtype=torch.float32)
    for name, value, best, worse in zip(("dq", "dk", "dv"), got, exact[2:], rough[2:], strict=True):
        assert_close(name, value, best, rough=worse, dtype=dtype)


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window": (20, -1)},
    "right": {"window": (-1, 5)},
    "both": {"window": (30, 11)},
    "causal window": {"causal": True, "window": (17, 40)},
    "diagonal": {"window": (0, 0)},
}
SIZES = [(1, 1), (1, 300), (131, 131), (64, 333), (300, 65), (257, 7)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SIZES)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, seqlen_q: int, seqlen_k: int) -> None:
    tensors = _tensors(2, seqlen_q, seqlen_k, 2, 1, 16, torch.float32)
    _check(tensors, reference.public(MASKS[mask]), MASKS[mask])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [1, 12, 40, 64, 256])
def test_dtypes_and_head_dims(dtype: torch.dtype, dim: int) -> None:
    _check(_tensors(2, 70, 90, 3, 3, dim, dtype), {"causal": True}, {"causal": True})


@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (20, 12), (12, 40)])
def test_values_with_a_head_dim_of_their_own(dim: int, dim_v: int) -> None:
    _check(_tensors(2, 70, 90, 4, 2, dim, torch.float16, dim_v), {"causal": True}, {"causal": True})


@pytest.mark.parametrize(("heads", "heads_k"), [(6, 1), (6, 2), (6, 3), (4, 4)])
def test_grouped_heads(heads: int, heads_k: int) -> None:
    _check(_tensors(2, 33, 47, heads, heads_k, 24, torch.bfloat16), {}, {})


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.5},
        {"softcap": 30.0, "causal": True},
        {"softmax_scale": 0.7},
        {"alibi": 1},
        {"alibi": 2, "causal": True},
        {"alibi": 2, "window": (25, 3), "softcap": 2.0},
    ],
    ids=str,
)
def test_scores(options: dict[str, Any]) -> None:
    options = dict(options)
    tensors = _tensors(2, 140, 301, 4, 2, 16, torch.float32)
    rank = options.pop("alibi", 0)
    if rank:
        options["alibi_slopes"] = torch.rand((2, 4) if rank == 2 else (4,)) * 0.3
    _check(tensors, reference.public(options), options)


@pytest.mark.parametrize(
    ("dim", "block", "extra"),
    [(16, 128, {}), (64, 64, {"causal": True, "softcap": 2.0}), (96, 64, {}), (128, 32, {"window": (40, 10)})],
    ids=str,
)
def test_dropout(dim: int, block: int, extra: dict[str, Any]) -> None:
    tensors = _tensors(2, 150, 270, 4, 2, dim, torch.float32)
    state = torch.get_rng_state()
    _, _, dmask = flash_attn.flash_attn_func(*tensors, dropout_p=0.3, return_attn_probs=True, **reference.public(extra))
    assert dmask.shape == (2, 4, 150, 270)
    kept = dmask >= 0
    seen = reference.visible(150, 270, extra.get("causal", False), extra.get("window", (-1, -1)))
    fraction = float(kept[:, :, seen].float().mean())
    assert abs(fraction - 0.7) < 0.01
    plain, _ = reference.attention(*tensors, **extra)
    identity = torch.eye(270)[None, :, None].expand(2, 270, 2, 270)
    probabilities, _ = reference.attention(tensors[0], tensors[1], identity, **extra)
    assert_close("|S_dmask|", undone(dmask.abs(), probabilities.transpose(1, 2), block), probabilities, tiny=1e-6)
    # The same state of the generator gives the same mask, forward and backward.
    torch.set_rng_state(state)
    _check(tensors, {"dropout_p": 0.3, **reference.public(extra)}, {"dropout_p": 0.3, "kept": kept, **extra})
    assert not torch.allclose(flash_attn.flash_attn_func(*tensors, dropout_p=0.3), plain)


def undone(dmask: torch.Tensor, probabilities: torch.Tensor, block: int = 128) -> torch.Tensor:
    """The probabilities (b, s, h, s_k) from |S_dmask|, as upstream's tests get them: its scale comes from the scores.

    A block of keys is scaled by the largest score of it and those behind; scores are log(probabilities) + a constant.
    """
    parts = []
    for start in range(0, dmask.shape[-1], block):
        largest = probabilities[..., start:].amax(-1, keepdim=True)
        parts.append(dmask[..., start : start + block] * largest)
    return torch.cat(parts, -1).transpose(1, 2)


def test_dropout_differs_between_calls_sequences_and_heads() -> None:
    q = torch.randn(2, 64, 2, 8)
    masks = [flash_attn.flash_attn_func(q, q, q, dropout_p=0.5, return_attn_probs=True)[2] >= 0 for _ in range(2)]
    views = [mask[b, h] for mask in masks for b in range(2) for h in range(2)]
    for a, b in itertools.combinations(views, 2):
        assert 0.4 < float((a == b).float().mean()) < 0.6


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    """Sets PyTorch's default dtype for the duration of a test."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def test_dropout_takes_no_notice_of_the_default_dtype(default_dtype: Callable[[torch.dtype], None]) -> None:
    q = torch.randn(1, 40, 2, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for dtype in (torch.float32, torch.float16, torch.float64):
        default_dtype(dtype)
        torch.manual_seed(0)
        out, _, dmask = flash_attn.flash_attn_func(q, q, q, dropout_p=0.3, return_attn_probs=True)
        results.append((out, dmask, torch.autograd.grad(out.sum(), q)[0]))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    kept = (results[0][1] > 0) / torch.tensor(0.7, dtype=torch.float64)
    weights = (torch.einsum("bihd,bjhd->bhij", q, q) * 8**-0.5).softmax(-1) * kept
    expected = torch.einsum("bhij,bjhd->bihd", weights, q)
    assert_close("out", results[0][0], expected, tiny=1e-14)
    assert_close("dq", results[0][2], torch.autograd.grad(expected.sum(), q)[0], tiny=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_autocast_leaves_the_products_alone(dtype: torch.dtype) -> None:
    """Kernels know nothing of it either."""
    tensors = _tensors(1, 9, 20, 4, 2, 16, dtype)
    caches = [x.detach() for x in tensors[1:]]

    def run() -> tuple[torch.Tensor, ...]:
        out = flash_attn.flash_attn_func(*tensors)
        return out, flash_attn.flash_attn_with_kvcache(tensors[0], *caches), *torch.autograd.grad(out.sum(), tensors)

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run()
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


def test_dropout_sign_survives_underflow() -> None:
    q = torch.full((1, 32, 1, 8), 30.0, dtype=torch.float16)
    k = q.clone()
    k[:, 1:] = -30.0
    dmask = flash_attn.flash_attn_func(q, k, k, dropout_p=0.5, return_attn_probs=True)[2]
    assert 0.3 < float((dmask < 0).float().mean()) < 0.7


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)])
def test_empty(seqlens: tuple[int, int]) -> None:
    q, k, v = _tensors(2, *seqlens, 2, 2, 8, torch.float16)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    out.sum().backward()
    assert not bool(out.any())
    assert bool((lse == torch.inf).all())
    for x in (q, k, v):
        assert not bool(x.grad.any())


def test_no_sequences() -> None:
    tensors = _tensors(0, 5, 7, 2, 2, 8, torch.float16)
    assert flash_attn.flash_attn_func(*tensors).shape == (0, 5, 2, 8)


def test_scores_without_end() -> None:
    """-inf scores count as masked, huge ones do not overflow, +inf ones give NaN in their row alone."""
    q, k, v = (x.detach() for x in _tensors(1, 4, 5, 1, 1, 8, torch.float32))
    q = q.abs()
    k[0, :, 0] = torch.tensor([-torch.inf, -torch.inf, 1e4, 1e5, -1e5])[:, None]
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert bool(out.isfinite().all())
    assert_close("out", out[0, :, 0], v[0, 3].expand(4, 8))
    k[0, :] = -torch.inf
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert not bool(out.any())
    assert bool((lse == torch.inf).all())
    k[0, 1] = torch.inf
    q[0, 0] = -q[0, 0]
    k[0, 0] = 0.0
    k[0, 2:] = 0.0
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert bool(out[0, 0].isfinite().all())
    assert bool(out[0, 1:].isnan().all())
    assert bool(lse[0, 0, 0].isfinite())
    assert bool(lse[0, 0, 1:].isnan().all())  # +inf says that a row sees no key


def test_strides() -> None:
    """Transposed, strided and expanded inputs give the same results as their copies."""
    torch.manual_seed(0)
    q = torch.randn(2, 3, 40, 16).transpose(1, 2)
    k = torch.randn(2, 50, 3, 32)[..., ::2]
    v = torch.randn(1, 50, 1, 16).expand(2, 50, 3, 16)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    copies = [x.detach().contiguous().requires_grad_() for x in inputs]
    results = []
    for tensors in (inputs, copies):
        out = flash_attn.flash_attn_func(*tensors)
        results.append((out, *torch.autograd.grad(out.sum(), tensors)))
    for got, expected in zip(*results, strict=True):
        assert_close("strides", got, expected)


GRADCHECK = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"softcap": 1.0, "causal": True},
    {"softmax_scale": 0.3, "alibi": True},
]


@pytest.mark.parametrize("options", GRADCHECK, ids=str)
def test_gradcheck(options: dict[str, Any]) -> None:
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(4)
    torch.manual_seed(1)
    q = torch.randn(1, 5, 4, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 6, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *x: flash_attn.flash_attn_func(*x, **options), (q, k, v))


def test_gradcheck_dropout() -> None:
    q = torch.randn(1, 5, 2, 3, dtype=torch.float64, requires_grad=True)

    def attend(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return flash_attn.flash_attn_func(x, x, x, dropout_p=0.4)

    assert torch.autograd.gradcheck(attend, (q,))


def test_gradcheck_packed_and_varlen() -> None:
    torch.manual_seed(2)
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    qkv = torch.randn(7, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x, cu, 4, causal=True), (qkv,)
    )
    q = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(7, 2, 1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, y: flash_attn.flash_attn_varlen_kvpacked_func(x, y, cu, cu, 4, 4), (q, kv)
    )


class _LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any op makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_memory_is_linear() -> None:
    """No op of a causal 1200 x 1200 forward and backward makes more than a tile or the inputs' size."""
    seqlen = 1200
    q, k, v, dout = (torch.randn(1, seqlen, 1, 8) for _ in range(4))
    call = attention_call(q, k, v, softmax_scale=0.3, causal=True, dropout_p=0.1)
    with _LargestTensor() as largest:
        out, lse, _, rng_state = backend.forward(call)
        gradients = [torch.empty_like(q) for _ in range(3)]
        backend.backward(GradientCall(replace(call, rng_state=rng_state), dout, out, lse, *gradients))
    assert largest.elements <= tiles.QUERY_TILE * tiles.KEY_TILE
    assert all(bool(x.isfinite().all()) for x in gradients)


def test_wide_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of the batch change nothing, dropout aside from its mask."""
    tensors = _tensors(5, 20, 30, 2, 2, 8, torch.float32)
    monkeypatch.setattr(tiles, "MAX_TILE_ELEMENTS", 2 * 2 * 20 * 30)
    slopes = torch.rand(5, 2)
    _check(tensors, {"alibi_slopes": slopes}, {"alibi_slopes": slopes})
    dmask = flash_attn.flash_attn_func(*tensors, dropout_p=0.5, return_attn_probs=True)[2] >= 0
    assert not torch.equal(dmask[0], dmask[2])
