"""Attention over ranges of keys and ids: kernels and PyTorch's path against dense attention with the same mask."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn import flash_attn_func
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.attention.backends import triton as triton_backend
from flash_attn.attention.operators import dispatch
from flash_attn.flashmask import flashmask_attention
from flash_attn.magi import flex_flash_attn_func
from flash_attn.ranges import flash_attn_ranges_func, pack_bits
from flash_attn.sparse import BlockMask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, FULL = torch.float16, torch.float32
pytestmark = pytest.mark.usefixtures("interpreter_multiplies_bf16")


@pytest.fixture(params=["triton", "torch"])
def backend(request: pytest.FixtureRequest, fresh_kernels: None) -> Iterator[str]:  # noqa: ARG001
    with backends.using(triton_backend if request.param == "triton" else torch_backend):  # type: ignore[arg-type]
        yield request.param


def _draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, torch.int32)


def _random_ranges(batch: int, heads: int, sq: int, sk: int) -> torch.Tensor:
    """Ranges of any kind: empty, inverted, overlapping, beyond both ends."""
    return _integers(-20, sk + 20, batch, heads, sq, 2, 2)


def _documents(lengths: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(DEVICE, torch.int32)


def _prefix(sq: int, sk: int, prefix: int, wide: int) -> torch.Tensor:
    """A prefix that all see, and a window: two ranges that cross tiles and overlap at the beginning."""
    rows = torch.arange(sq)
    window = torch.stack([rows + sk - sq - wide, rows + sk - sq + 1], -1)
    return torch.stack([torch.tensor([0, prefix]).expand(sq, 2), window], 1)[None, None].to(DEVICE, torch.int32)


def _shuffled(sq: int, sk: int) -> dict[str, torch.Tensor]:
    return {"ids_q": _integers(0, 3, 1, sq, seed=4), "ids_k": _integers(0, 4, 2, sk, seed=5)}


CASES: dict[str, dict[str, Any]] = {
    "any ranges": {"sq": 130, "sk": 200, "mask": lambda: {"ranges": _random_ranges(2, 1, 130, 200)}},
    "for each head": {
        "sq": 70, "sk": 150, "heads": (4, 2), "lse": True, "mask": lambda: {"ranges": _random_ranges(1, 4, 70, 150)},
    },
    "one range": {"sq": 90, "sk": 90, "mask": lambda: {"ranges": _random_ranges(1, 1, 90, 90)[:, :, :, 0]}},
    "prefix and window": {"sq": 300, "sk": 333, "mask": lambda: {"ranges": _prefix(300, 333, 75, 40)}},
    "causal": {"sq": 150, "sk": 150, "causal": True, "mask": lambda: {"ranges": _random_ranges(1, 1, 150, 150)}},
    "window": {"sq": 150, "sk": 210, "window": (40, 9), "mask": lambda: {"ranges": _random_ranges(1, 1, 150, 210)}},
    "documents": {"sq": 300, "sk": 300, "causal": True, "mask": lambda: {"ids_q": _documents([64, 100, 3, 1, 132])}},
    "ids in any order": {"sq": 129, "sk": 193, "mask": lambda: _shuffled(129, 193)},
    "hidden for each key": {
        "sq": 200, "sk": 130, "heads": (4, 2), "mask": lambda: {"hidden": _random_ranges(1, 4, 130, 200)},
    },
    "hidden documents": {"sq": 260, "sk": 260, "causal": True, "mask": lambda: {"hidden": _prefix(260, 260, 0, 90)}},
    "nothing visible": {"sq": 70, "sk": 70, "mask": lambda: {"ranges": _random_ranges(1, 1, 70, 70) * 0}},
    "everything visible": {"sq": 130, "sk": 190, "mask": lambda: {"ranges": _prefix(130, 190, 190, 0)}},
    "one query": {"sq": 1, "sk": 300, "mask": lambda: {"ranges": _random_ranges(2, 2, 1, 300)}},
    "fp32": {"sq": 130, "sk": 200, "dtype": FULL, "mask": lambda: {"ranges": _random_ranges(2, 1, 130, 200)}},
    "bf16": {"sq": 130, "sk": 200, "dtype": torch.bfloat16, "mask": lambda: {"ranges": _prefix(130, 200, 90, 60)}},
    "head dim 44": {"sq": 65, "sk": 70, "dim": 44, "mask": lambda: {"ranges": _random_ranges(1, 1, 65, 70)}},
    "head dim 200": {"sq": 65, "sk": 130, "dim": 200, "mask": lambda: {"ranges": _random_ranges(1, 1, 65, 130)}},
    "sinks": {
        "sq": 130, "sk": 200, "sinks": True, "lse": True,
        "mask": lambda: {"ranges": _random_ranges(2, 1, 130, 200) // 2},
    },
    "whole blocks beside hidden keys": {
        "sq": 200, "sk": 130, "causal": True,
        "mask": lambda: {"hidden": _random_ranges(1, 2, 130, 200),
                         "block_mask": BlockMask(_integers(0, 3, 1, 2, 4, 3).to(torch.uint8), (64, 64))},
    },
    "soft cap": {
        "sq": 65, "sk": 130, "lse": True, "sinks": True, "softcap": 0.7,
        "mask": lambda: {"ranges": _random_ranges(2, 1, 65, 130)},
    },
    "ALiBi and a soft cap": {
        "sq": 70, "sk": 75, "heads": (2, 1), "softcap": 2.0, "alibi": True, "dim": 32,
        "mask": lambda: _shuffled(70, 75),
    },
    "bits": {
        "sq": 66, "sk": 100, "heads": (2, 1), "dim": 32, "dtype": torch.bfloat16, "causal": True,
        "mask": lambda: {"bits": pack_bits(_integers(0, 2, 1, 2, 66, 100).bool()),
                         "block_mask": BlockMask(_integers(0, 3, 1, 2, 2, 2).to(torch.uint8), (64, 64))},
    },
    "negative scale": {
        "sq": 70, "sk": 90, "scale": -0.2, "dtype": torch.bfloat16,
        "mask": lambda: {"ranges": _random_ranges(2, 1, 70, 90)},
    },
    "dropout": {
        "sq": 65, "sk": 70, "heads": (2, 1), "window": (50, 40), "dropout": 0.3, "dim": 32,
        "mask": lambda: {**_shuffled(65, 70),
                         "block_mask": BlockMask(_integers(1, 3, 1, 2, 2, 2).to(torch.uint8), (64, 64))},
    },
    "all parts": {
        "sq": 200, "sk": 260, "heads": (4, 2), "window": (190, 30), "sinks": True,
        "mask": lambda: {"ranges": _prefix(200, 260, 100, 150), **_shuffled(200, 260),
                         "block_mask": BlockMask(_integers(0, 3, 1, 4, 4, 5).to(torch.uint8), (64, 64))},
    },
}  # fmt: skip


def _visible(mask: dict[str, Any], sq: int, sk: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    keys = torch.arange(sk, device=DEVICE)
    distance = keys - torch.arange(sq, device=DEVICE)[:, None] - sk + sq
    visible = torch.ones(1, 1, sq, sk, dtype=torch.bool, device=DEVICE)
    if window[0] >= 0:
        visible = visible & (distance >= -window[0])
    right = 0 if causal else window[1]
    if right >= 0:
        visible = visible & (distance <= right)
    ranges = mask.get("ranges")
    if ranges is not None:
        pairs = ranges.reshape(*ranges.shape[:3], -1, 2)
        visible = visible & ((keys >= pairs[..., :1]) & (keys < pairs[..., 1:])).any(3)
    if "bits" in mask:
        visible = visible & (mask["bits"][..., keys // 32] >> (keys % 32) & 1).bool()
    if "hidden" in mask:
        rows, pairs = torch.arange(sq, device=DEVICE)[:, None], mask["hidden"][:, :, None]
        visible = visible & ~((rows[..., None] >= pairs[..., 0]) & (rows[..., None] < pairs[..., 1])).any(-1)
    if "ids_q" in mask:
        ids_k = mask.get("ids_k", mask["ids_q"])
        visible = visible & (mask["ids_q"][:, None, :, None] == ids_k[:, None, None])
    if "block_mask" in mask:
        blocks = mask["block_mask"].seen.repeat_interleave(64, 2)[:, :, :sq].repeat_interleave(64, 3)[..., :sk]
        visible = (visible & (blocks != 0)) | (blocks == 2)
    return visible


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor | None,
    softmax_scale: float | None = None, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    kept: torch.Tensor | float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention with a dense mask and its logsumexp, in the type of its inputs. kept: factors of the weights."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(group, 1), v.transpose(1, 2)
    scores = q @ k.mT * (softmax_scale or 1.0 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
        scores = scores - (alibi_slopes[:, None, None] * distance.abs().to(DEVICE)).to(q.dtype)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]] * kept
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention_with_the_mask(backend: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    given: dict[str, Any] = {
        "heads": (2, 2), "causal": False, "window": (-1, -1), "dim": 64, "dtype": HALF, "sinks": False, "lse": False,
        "softcap": 0.0, "alibi": False, "scale": None, "dropout": 0.0,
    }  # fmt: skip
    given |= CASES[case]
    sq, sk, dim, dtype, (heads, heads_k) = (given[name] for name in ("sq", "sk", "dim", "dtype", "heads"))
    q = _draw(2, sq, heads, dim, dtype=dtype)
    k, v = (_draw(2, sk, heads_k, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    dout, dlse = _draw(2, sq, heads, dim, dtype=dtype, seed=3), _draw(2, heads, sq, dtype=FULL, seed=5)
    sinks = [_draw(heads, dtype=dtype, seed=4)] if given["sinks"] else []
    mask = given["mask"]()
    visible = _visible(mask, sq, sk, given["causal"], given["window"])

    def results(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, *sinks)]
        out, lse = function(*leaves[:3], leaves[3] if sinks else None)
        outputs, douts = [out], [dout.to(out.dtype)]
        if given["lse"]:  # rows without a key have +inf or -inf, and no gradient
            outputs, douts = [out, lse], [*douts, (dlse * lse.isfinite()).to(lse.dtype)]
        return [out, *torch.autograd.grad(outputs, leaves, douts)]

    scores = {"softmax_scale": given["scale"], "softcap": given["softcap"]}
    scores["alibi_slopes"] = 2.0 ** -torch.arange(1.0, heads + 1, device=DEVICE) if given["alibi"] else None
    options = {"causal": given["causal"], "window_size": given["window"], "dropout_p": given["dropout"], **scores}
    if given["dropout"]:  # attention without a mask tells which weights a seed drops
        monkeypatch.setattr(dispatch, "draw_rng_state", lambda device: torch.tensor([3, 5], device=device))
        *_, probabilities = flash_attn_func(q, k, v, given["dropout"], return_attn_probs=True)
        scores["kept"] = (~probabilities.signbit()).to(dtype) / (1.0 - given["dropout"])
    got = results(lambda *x: flash_attn_ranges_func(*x[:3], **mask, **options, s_aux=x[3], return_lse=True), dtype)
    same = results(lambda *x: _dense(*x[:3], visible, x[3], **scores), dtype)
    expected = results(lambda *x: _dense(*x[:3], visible, x[3], **scores), FULL)
    for name, ours, reference, lowered in zip(("out", "dq", "dk", "dv", "ds_aux"), got, expected, same, strict=False):
        # A sum over rows, rounded at the end, as in test_sinks.
        tiny = 2.0 * torch.finfo(dtype).eps if name == "ds_aux" else 2e-5
        assert_close(name, ours, reference, rough=lowered, tiny=tiny)


def test_second_derivatives() -> None:
    """In float64, which only a CPU has here."""
    shapes = (1, 5, 2, 8), (1, 6, 1, 8), (2,)
    q, k, sinks = (_draw(*shape, dtype=torch.float64).cpu().requires_grad_() for shape in shapes)
    blocks = BlockMask(torch.full((1, 2, 1, 1), 1, dtype=torch.uint8), (64, 64))
    parts = {"ranges": _random_ranges(1, 2, 5, 6) // 4, "ids_q": _integers(0, 2, 1, 5), "ids_k": _integers(0, 2, 1, 6)}
    mask = {name: part.cpu() for name, part in parts.items()}

    def attend(q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor) -> Any:
        return flash_attn_ranges_func(q, k, k, **mask, block_mask=blocks, s_aux=sinks, causal=True, return_lse=True)

    with backends.using(torch_backend):  # type: ignore[arg-type]
        assert torch.autograd.gradcheck(attend, (q, k, sinks), fast_mode=True)
        assert torch.autograd.gradgradcheck(attend, (q, k, sinks), fast_mode=True)


def _hidden_by_flashmask(bounds: torch.Tensor, sq: int, causal: bool) -> torch.Tensor:
    """Which queries each key is hidden from, as FlashMask's documentation says: bool (batch, heads, sq, sk)."""
    batch, heads, sk, count = bounds.shape
    hidden = torch.zeros(batch, heads, sq, sk, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for key in range(sk):
                lower, *others = bounds[b, h, key].tolist()
                hidden[b, h, lower : others[0] if count == 4 or (causal and count == 2) else sq, key] = True
                if not causal:
                    upper = (0, others[0]) if count == 2 else (others[1], others[2])
                    hidden[b, h, slice(*upper), key] = True
    return hidden


@pytest.mark.parametrize(("causal", "count"), [(True, 1), (True, 2), (False, 2), (False, 4)])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_flashmask(causal: bool, count: int, heads: int) -> None:
    q, k, v = (_draw(2, 70, n, 16, dtype=FULL, seed=n) for n in (4, 2, 2))
    bounds = _integers(0, 70, 2, heads, 70, count)
    with backends.using(torch_backend):  # type: ignore[arg-type]
        out, lse = flashmask_attention(q, k, v, bounds, causal=causal, return_softmax_lse=True)
    visible = ~_hidden_by_flashmask(bounds.cpu(), 70, causal).to(DEVICE).repeat_interleave(4 // heads, 1)
    expected, _ = _dense(q, k, v, visible & _visible({}, 70, 70, causal, (-1, -1)), None)
    assert_close("out", out, expected)
    assert lse.shape == (2, 4, 70)


def _seen_in_slices(slices: list[tuple[int, int, int, int, int]], total_q: int, total_k: int) -> torch.Tensor:
    seen = torch.zeros(total_q, total_k, dtype=torch.bool)
    for q_start, q_end, k_start, k_end, kind in slices:
        part = torch.ones(q_end - q_start, k_end - k_start, dtype=torch.bool)
        if kind & 1:
            part = part.tril(part.shape[1] - part.shape[0])
        if kind & 2:
            part = part.triu()
        seen[q_start:q_end, k_start:k_end] |= part
    return seen


SLICES = [
    *[(0, 30, 0, 40, 1), (0, 30, 50, 60, 0), (0, 30, 45, 50, 0), (30, 64, 10, 70, 3), (64, 90, 5, 25, 2)],
    *[(64, 90, 80, 90, 1), (100, 110, 3, 2 + 1, 0)],
]


def test_magi_slices() -> None:
    q, k, v = (_draw(110, n, 16, dtype=FULL, seed=n).requires_grad_() for n in (4, 2, 2))
    table = torch.tensor(SLICES, dtype=torch.int32, device=DEVICE)
    arguments = (table[:, :2], table[:, 2:4], table[:, 4].contiguous())
    with backends.using(torch_backend):  # type: ignore[arg-type]
        out, lse = flex_flash_attn_func(q, k, v, *arguments)
    seen = _seen_in_slices(SLICES, 110, 110).to(DEVICE)
    expected = _dense(q[None], k[None], v[None], seen, None)[0][0]
    assert_close("out", out, expected)
    assert torch.equal(lse == -torch.inf, ~seen.any(1)[:, None].expand(110, 4))
    with backends.using(torch_backend):  # type: ignore[arg-type]
        got = torch.autograd.grad(out.square().sum(), (q, k, v))
    for name, x, y in zip("qkv", got, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        assert_close(f"d{name}", x, y)
    more = torch.cat([table, table.new_tensor([[0, 1, 100, 101, 0]])])
    with pytest.raises(ValueError, match="query 0 has more than two separate ranges of keys"):
        flex_flash_attn_func(q, k, v, more[:, :2], more[:, 2:4], more[:, 4].contiguous())


def test_compiled() -> None:
    def work(q: torch.Tensor, ids: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return 2 * flash_attn_ranges_func(q, q, q, ids_q=ids * 2, causal=True, s_aux=sinks)

    compiled = torch.compile(work, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([100, 30], [20, 50, 30]):
        leaves = [_draw(2, sum(lengths), 2, 64, dtype=FULL).requires_grad_(), _draw(2, dtype=FULL).requires_grad_()]
        outs = [function(leaves[0], _documents(lengths), leaves[1]) for function in (work, compiled)]
        gradients = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
        torch.testing.assert_close(outs[0], outs[1])
        torch.testing.assert_close(*gradients)


Q, K = _draw(2, 13, 4, 16), _draw(2, 20, 2, 16)
IDS = torch.zeros(1, 13, dtype=torch.int32, device=DEVICE)
RANGES = torch.zeros(1, 1, 13, 2, 2, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flash_attn_ranges_func(Q, K, K, RANGES.long()), "ranges: got torch.int64, wanted an int32 tensor"),
        (
            lambda: flash_attn_ranges_func(Q, K, K, RANGES[:, :, :5]),
            "ranges: got shape (1, 1, 5, 2, 2), wanted (1 or 2, 1",
        ),
        (lambda: flash_attn_ranges_func(Q, K, K, RANGES.expand(3, 1, 13, 2, 2)), "ranges: got shape (3, 1, 13, 2, 2)"),
        (lambda: flash_attn_ranges_func(Q, K, K, ids_q=IDS), "ids_k: got None, wanted int32 ids beside ids_q"),
        (lambda: flash_attn_ranges_func(Q, K, K, None, IDS, IDS), "ids_k: got shape (1, 13), wanted (1 or 2, 20)"),
        (lambda: flash_attn_ranges_func(Q, K, K, None, None, IDS), "ids_q: got None"),
        (lambda: flash_attn_ranges_func(Q, K, K, bits=IDS[None]), "bits: got shape (1, 1, 13), wanted (1 or 2, 1 or 4"),
        (lambda: flash_attn_ranges_func(Q, K, K, RANGES, bits=RANGES[..., 0, :1]), "bits: got a tensor beside ranges"),
        (lambda: flash_attn_ranges_func(Q, K, K, hidden=RANGES), "hidden: got shape (1, 1, 13, 2, 2), wanted (1 or 2"),
        (lambda: flash_attn_ranges_func(Q, K, K, RANGES.to("meta")), "ranges: got it on meta"),
        (
            lambda: flash_attn_ranges_func(Q, K, K, RANGES, block_mask=IDS),
            "block_mask: got Tensor, wanted flash_attn.sp",
        ),
        (lambda: flash_attn_ranges_func(Q, K, K, RANGES, s_aux=Q[0, 0, :2, 0]), "s_aux: got shape (2,), wanted (4,)"),
        (lambda: flashmask_attention(Q, K, K, rng_name="x"), "rng_name: got 'x', wanted ''"),
        (lambda: flash_attn_ranges_func(Q, K, K, RANGES, dropout_p=1.0), "dropout_p: got 1.0, wanted"),
        (lambda: flashmask_attention(Q, K, K, RANGES[..., :1, 0]), "got shape (1, 1, 13, 1), wanted 2 or 4 bounds"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=re.escape(message)):
        call()
