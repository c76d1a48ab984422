"""Block-sparse attention: kernels and PyTorch's path against dense attention with the same mask."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.attention.backends import triton as triton_backend
from flash_attn.attention.backends.triton import sparse as lists
from flash_attn.call.block_mask import seen_in_lists
from flash_attn.call.calls import attention_call
from flash_attn.call.mask import Mask
from flash_attn.kernels import launches, targets, tuning
from flash_attn.kernels.operation import SPARSE_BLOCK
from flash_attn.kernels.variants import Variant
from flash_attn.sparse import BlockMask, flash_attn_block_sparse_func, patterns

from amdgpu_simulator import gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, FULL = torch.float16, torch.float32
pytestmark = pytest.mark.usefixtures("interpreter_multiplies_bf16")


@pytest.fixture(params=["triton", "torch"])
def backend(request: pytest.FixtureRequest, fresh_kernels: None) -> Iterator[str]:  # noqa: ARG001
    with backends.using(triton_backend if request.param == "triton" else torch_backend):  # type: ignore[arg-type]
        yield request.param


def _draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _mask(batch: int, heads: int, lengths: tuple[int, int], block: tuple[int, int], density: float) -> BlockMask:
    shape = (batch, heads, *(-(-length // size) for length, size in zip(lengths, block, strict=True)))
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < density
    return BlockMask(seen.to(DEVICE), block)


def _visible(mask: BlockMask, sq: int, sk: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    distance = torch.arange(sk, device=DEVICE) - torch.arange(sq, device=DEVICE)[:, None] - sk + sq
    visible = mask.tokens(sq, sk)
    if window[0] >= 0:
        visible = visible & (distance >= -window[0])
    right = 0 if causal else window[1]
    return visible & (distance <= right) if right >= 0 else visible


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Attention with a dense mask, in the type of its inputs."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(group, 1), v.transpose(1, 2)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1)).transpose(1, 2)


CASES: dict[str, dict[str, Any]] = {
    "one mask for all": {"sq": 300, "sk": 300, "mask": (1, 1)},
    "a mask for each head": {"sq": 200, "sk": 333, "heads": (4, 2), "mask": (2, 4), "block": (64, 64)},
    "a mask for each entry": {"sq": 129, "sk": 65, "mask": (2, 1), "block": (64, 128)},
    "causal": {"sq": 257, "sk": 257, "heads": (2, 1), "mask": (1, 2), "causal": True, "block": (128, 64)},
    "window": {"sq": 150, "sk": 260, "mask": (1, 1), "window": (70, 20), "block": (64, 64)},
    "head dim 40": {"sq": 130, "sk": 130, "mask": (1, 1), "dim": 40},
    "head dim 100": {"sq": 130, "sk": 130, "mask": (1, 1), "dim": 100},
    "head dim 44": {"sq": 130, "sk": 70, "mask": (1, 1), "dim": 44},
    "head dim 200": {"sq": 80, "sk": 130, "mask": (1, 1), "dim": 200, "heads": (1, 1)},
    "fp32": {"sq": 130, "sk": 200, "mask": (1, 2), "dtype": FULL, "block": (64, 64)},
    "bf16": {"sq": 130, "sk": 200, "mask": (1, 2), "dtype": torch.bfloat16, "block": (64, 64)},
    "a queried block of 192": {"sq": 400, "sk": 400, "mask": (1, 1), "block": (192, 192)},
    "nothing visible": {"sq": 70, "sk": 70, "mask": (1, 1), "density": 0.0},
    "everything visible": {"sq": 130, "sk": 190, "mask": (1, 1), "density": 1.1},
    "one query": {"sq": 1, "sk": 300, "mask": (1, 1)},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention_with_the_mask(backend: str, case: str) -> None:  # noqa: ARG001
    given = {"heads": (2, 2), "block": (128, 128), "causal": False, "window": (-1, -1), "dim": 64, "dtype": HALF}
    given |= {"density": 0.5} | CASES[case]
    sq, sk, dim, dtype, (heads, heads_k) = (given[name] for name in ("sq", "sk", "dim", "dtype", "heads"))
    q = _draw(2, sq, heads, dim, dtype=dtype).requires_grad_()
    k, v = (_draw(2, sk, heads_k, dim, dtype=dtype, seed=seed).requires_grad_() for seed in (1, 2))
    dout = _draw(2, sq, heads, dim, dtype=dtype, seed=3)
    mask = _mask(*given["mask"], (sq, sk), given["block"], given["density"])
    visible = _visible(mask, sq, sk, given["causal"], given["window"])

    def results(function: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]

    options = {"causal": given["causal"], "window_size": given["window"]}
    got = results(lambda *x: flash_attn_block_sparse_func(*x, mask, **options), q, k, v)
    same = results(lambda *x: _dense(*x, visible), q, k, v)
    expected = results(lambda *x: _dense(*x, visible), *(x.detach().float().requires_grad_() for x in (q, k, v)))
    for name, ours, reference, lowered in zip(("out", "dq", "dk", "dv"), got, expected, same, strict=True):
        assert_close(name, ours, reference, rough=lowered)


def test_the_logsumexp(backend: str) -> None:  # noqa: ARG001
    q, k, v = _draw(1, 130, 2, 64), _draw(1, 200, 2, 64, seed=1), _draw(1, 200, 2, 64, seed=2)
    mask = _mask(1, 2, (130, 200), (64, 64), 0.4)
    _, lse = flash_attn_block_sparse_func(q, k, v, mask, return_lse=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / 8.0
    expected = scores.masked_fill(~mask.tokens(130, 200), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse, torch.where(expected == -torch.inf, torch.inf, expected), rtol=0, atol=2e-3)


def _listed(tiles: list[int], full: int, every: int) -> list[int]:
    """The tiles of a list, those without a key to hide first."""
    return tiles[:full] + tiles[-1 - every + full : -1][::-1]


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("tile", [(64, 64), (128, 32), (32, 128)])
def test_lists_have_each_visible_tile_once(tile: tuple[int, int], by_keys: bool) -> None:
    sq, sk, block = 300, 420, (64, 128)
    mask = BlockMask(_mask(1, 2, (sq, sk), block, 0.4).seen.byte(), block)
    mask.seen[:, 1] *= 2  # whole blocks, which the window does not hide
    call = attention_call(
        _draw(1, sq, 2, 64), _draw(1, sk, 2, 64), _draw(1, sk, 2, 64), softmax_scale=1.0, window_size=(90, 200)
    )
    call.options.mask = Mask(mask)
    values, _ = lists.lists_of(call, *tile, by_keys=by_keys)
    order, counts = values["tiles"], values["tile_counts"]
    visible = _visible(mask, sq, sk, False, (90, 200))[0]
    visible |= BlockMask(mask.seen == 2, block).tokens(sq, sk)[0]
    rows, cols = -(-sq // tile[0]), -(-sk // tile[1])
    for head in range(2):
        for index in range(cols if by_keys else rows):
            full, every = counts[0, head, index].tolist()
            listed = _listed(order[0, head, index].tolist(), full, every)
            assert len(set(listed)) == every
            for other in range(rows if by_keys else cols):
                m, n = (other, index) if by_keys else (index, other)
                here = visible[head, m * tile[0] : (m + 1) * tile[0], n * tile[1] : (n + 1) * tile[1]]
                assert bool(here.any()) <= (other in listed)
                if other in listed[:full]:
                    assert bool(here.all())
                    assert (n + 1) * tile[1] <= sk
                    assert not by_keys or (m + 1) * tile[0] <= sq
    assert (values["block_q"], values["block_k"]) == block


@pytest.mark.parametrize("target", [None, "gfx942"])
@pytest.mark.parametrize("has_full", [False, True])
def test_bytes_of_lists(target: str | None, has_full: bool, fresh_kernels: None) -> None:  # noqa: ARG001
    """Counts above the width, indices of no block, behind the counts and in both lists."""
    generator = torch.Generator().manual_seed(6)

    def draw(least: int, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, most, shape, generator=generator).to(torch.int32)

    pairs = [(draw(0, width + 3, 1, 2, 5), draw(-2, 75, 1, 2, 5, width)) for width in (21, 9)]
    partial, full = (seen_in_lists(*pair, 70)[:, :, :4] for pair in pairs)
    expected = torch.where(full & has_full, 2, partial.byte())
    given = [tuple(x.to(DEVICE) for x in pair) for pair in pairs]
    with gpu.pretend(target) if target else contextlib.nullcontext():
        seen = lists.mark_blocks(given[0], given[1] if has_full else None, 4, 70)
    assert torch.equal(seen.cpu(), expected)


@pytest.mark.parametrize("target", [None, "gfx942"])
@pytest.mark.parametrize("factor", [1 << 30, (1 << 33) + 1])
def test_ids_of_32_bits(target: str | None, factor: int, fresh_kernels: None) -> None:  # noqa: ARG001
    """Narrow and wide ids beside each other, below 0 too, and ids of queries that no key has."""
    queries, keys = (
        torch.randint(-6, most, (2, n), generator=torch.Generator().manual_seed(n)).to(DEVICE)
        for most, n in ((9, 70), (6, 131))
    )
    queries, keys = (torch.where(x % 2 == 0, x * factor, x) for x in (queries, keys))
    with gpu.pretend(target) if target else contextlib.nullcontext():
        of_query, of_key = lists.narrow_ids(queries, keys), lists.narrow_ids(keys, keys)
    assert of_query.dtype == of_key.dtype == torch.int32
    assert torch.equal(of_query[:, :, None] == of_key[:, None], queries[:, :, None] == keys[:, None])
    assert torch.equal(of_key[:, :, None] == of_key[:, None], keys[:, :, None] == keys[:, None])


def _write(x: torch.Tensor, y: torch.Tensor) -> None:
    """Changes the content of x and no version of it, as a kernel or a collective does."""
    x.data.copy_(y)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("backend", "mode"),
    [("aot_eager", torch.inference_mode), pytest.param("inductor", torch.no_grad, marks=pytest.mark.long)],
)
def test_a_mask_counts_as_it_is_at_the_call(backend: str, mode: Any) -> None:
    """Inductor computes the second mask in the memory of the first one."""
    q = _draw(1, 256, 2, 32, dtype=FULL)
    noise = [torch.rand(1, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).to(DEVICE) for seed in (1, 2)]

    def attend(seen: torch.Tensor) -> torch.Tensor:
        return flash_attn_block_sparse_func(q, q, q, BlockMask(seen, (64, 64)))

    def layers(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = attend(a * 2 > 0.7)
        return first, attend(b + first.mean() * 0 > 0.5)

    with backends.using(triton_backend), mode():  # type: ignore[arg-type]
        outs = torch.compile(layers, backend=backend, fullgraph=True)(*noise)
        buffer = noise[0] * 2 > 0.7
        for out, seen in zip(outs, (buffer.clone(), noise[1] > 0.5), strict=True):
            _write(buffer, seen)
            visible = BlockMask(seen, (64, 64)).tokens(256, 256)
            torch.testing.assert_close(out, _dense(q, q, q, visible))
            torch.testing.assert_close(attend(buffer), out)


@pytest.mark.parametrize(("target", "by_keys"), [("gfx942", False), ("gfx1100", True)])
def test_lists_on_an_amd_gpu(target: str, by_keys: bool) -> None:
    sq, sk, block = 150, 300, (64, 128)
    q, k = torch.zeros(1, sq, 2, 64), torch.zeros(1, sk, 2, 64)
    call = attention_call(q, k, k, softmax_scale=1.0, window_size=(90, 120))
    call.options.mask = Mask(
        BlockMask(torch.arange(18).view(1, 2, 3, 3).remainder(4).clamp_max(2).byte(), block),
        torch.stack([torch.zeros(sq), 2 * torch.arange(sq), torch.full((sq,), 200), torch.full((sq,), 250)], -1)
        .view(1, 1, sq, 2, 2).int(),
        torch.arange(sq)[None].int() // 120, torch.arange(sk)[None].int() // 180,
    )  # fmt: skip
    expected = lists.lists_of(call, 64, 64, by_keys=by_keys)[0]
    with gpu.pretend(target) as launched:
        tensors = lists.lists_of(call, 64, 64, by_keys=by_keys)[0]
    assert launched == ["sparse-lists-fp16-d64"]
    assert torch.equal(tensors["tile_counts"], expected["tile_counts"])
    assert expected["tile_counts"][..., 0].any()
    for got, same, counts in zip(
        *(x[0].flatten(0, 1).tolist() for x in (tensors["tiles"], expected["tiles"], expected["tile_counts"])),
        strict=True,
    ):
        assert _listed(got, *counts) == _listed(same, *counts)


def test_a_tile_of_the_inner_loop_lies_in_a_block() -> None:
    """Otherwise a kernel would read one element of the mask for two blocks."""
    for target in (*targets.TARGETS, "sm_90"):
        for op in ("sparse-fwd", "sparse-bwd-dq", "sparse-bwd-dkdv"):
            for dtype in ("fp16", "bf16", "fp32"):
                for size in (64, 128, 256):
                    variant = Variant(op, dtype, size, "blocks")
                    constants = launches.specification(variant, target, tuning.config(target, variant)).constants
                    inner = constants["BLOCK_M" if op.endswith("dkdv") else "BLOCK_N"]
                    assert SPARSE_BLOCK % inner == 0, (target, variant)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    def work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        mask = BlockMask(seen, (64, 64))
        return 2 * flash_attn_block_sparse_func(q, k, v, mask, causal=True)

    compiled = torch.compile(work, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (130, 200):
        inputs = [_draw(1, length, 2, 64, seed=seed, dtype=FULL).requires_grad_() for seed in range(3)]
        seen = _mask(1, 1, (length, length), (64, 64), 0.6).seen
        outs = [function(*inputs, seen) for function in (work, compiled)]
        gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in outs]
        torch.testing.assert_close(outs[0], outs[1])
        torch.testing.assert_close(*gradients)


Q = _draw(2, 130, 4, 64)
K = _draw(2, 200, 2, 64)
MASK = BlockMask(torch.ones(1, 1, 2, 2, dtype=torch.bool, device=DEVICE))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockMask(torch.ones(1, 1, 2, 2)), "seen: got torch.float32, wanted a tensor of bool or uint8"),
        (lambda: BlockMask(True), "seen: got bool, wanted a tensor"),
        (lambda: BlockMask(torch.ones(2, 2, dtype=torch.bool)), r"seen: got shape (2, 2), wanted (1 or batch"),
        (lambda: BlockMask(MASK.seen, (96, 128)), "block_size: got (96, 128), wanted (queries, keys), two multiples"),
        (lambda: BlockMask(MASK.seen, 128), "block_size: got 128, wanted"),
        (lambda: flash_attn_block_sparse_func(Q, K, K, MASK.seen), "block_mask: got Tensor, wanted flash_attn.sparse"),
        (lambda: flash_attn_block_sparse_func(Q, K, K, BlockMask(MASK.seen, (64, 128))), "block_mask: got shape (1, 1"),
        (
            lambda: flash_attn_block_sparse_func(Q, K, K, BlockMask(MASK.seen.expand(1, 3, 2, 2))),
            "wanted (1 or 2, 1 or 4, 2, 2) for 130 queries and 200 keys",
        ),
        (lambda: flash_attn_block_sparse_func(Q, K, K, MASK, return_lse=1), "return_lse: got 1"),
        (lambda: flash_attn_block_sparse_func(Q, K, K[..., :32], MASK), "head_dim: got 64 and 32 for v"),
        (lambda: flash_attn_block_sparse_func(Q.float(), K, K, MASK), "k: got torch.float16"),
        (lambda: patterns.sliding_tiles((2, 4, 4), (3, 3, 3), 128), "window: got (3, 3, 3) for (2, 4, 4) tiles"),
        (lambda: patterns.sliding_tiles((3, 4, 4), (3, 3, 3), 100), "tokens_per_tile: got 100"),
        (lambda: patterns.either(MASK, BlockMask(MASK.seen, (64, 64))), "block_size: got masks of (128, 128)"),
        (lambda: patterns.bands(10, 10, (0,), 0), "width: got 0"),
    ],
)
def test_what_does_not_fit_is_named(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


def test_a_mask_of_tokens_and_of_lists() -> None:
    mask = _mask(2, 3, (300, 200), (64, 64), 0.5)
    again = BlockMask.of_tokens(mask.tokens(300, 200), (64, 64))
    assert torch.equal(again.seen, mask.seen)
    with pytest.raises(ValueError, match="changes inside a block of 128 x 128"):
        BlockMask.of_tokens(mask.tokens(300, 200))
    counts = mask.seen.sum(-1)
    indices = mask.seen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(BlockMask.of_lists(counts, indices, 4, (64, 64)).seen, mask.seen)
    with pytest.raises(IndexError, match="outside of the 2 blocks"):
        BlockMask.of_lists(counts.cpu(), indices.cpu(), 2, (64, 64))


def test_tiles_of_a_video() -> None:
    video, tile, window = (4, 8, 8), (2, 4, 8), (1, 1, 1)
    order = patterns.tile_order(video, tile)
    assert sorted(order.tolist()) == list(range(256))
    mask = patterns.sliding_tiles((2, 2, 1), window, 64, text=70, block=64)
    assert mask.seen.shape == (1, 1, 6, 6)
    assert torch.equal(mask.seen[0, 0, :4, :4], torch.eye(4, dtype=torch.bool))
    assert bool(mask.seen[0, 0, 4:].all())
    assert bool(mask.seen[0, 0, :, 4:].all())
    wide = patterns.sliding_tiles((5, 1, 1), (3, 1, 1), 64, block=64).seen[0, 0]
    assert wide.sum(-1).tolist() == [3] * 5  # a window at a border moves inside
    frames = [int(token) // 64 for token in order[:64]]
    assert set(frames) == {0, 1}


@pytest.mark.parametrize("decay", [1.0, 0.02])
def test_radial_masks_show_each_block_with_a_visible_pair(decay: float) -> None:
    frames, tokens, block = 6, 50, 64
    seen = patterns.radial(frames, tokens, block=block, decay=decay).seen[0, 0]
    place = torch.arange(frames * tokens)
    apart = (place[:, None] // tokens - place // tokens).abs().clamp_min(1)
    width = tokens * decay / torch.exp2(torch.floor(torch.log2(apart.double())))
    near = (place[:, None] % tokens - place % tokens).abs()
    pairs = torch.where(width >= 1, near < width, (near == 0) & (apart % torch.ceil(1 / width).long() == 0))
    pairs |= place < tokens
    expected = BlockMask(torch.ones(1, 1, 5, 5, dtype=torch.bool), (64, 64)).seen[0, 0].clone()
    for m in range(5):
        for n in range(5):
            expected[m, n] = pairs[m * block : (m + 1) * block, n * block : (n + 1) * block].any()
    assert torch.equal(seen, expected)


def test_negative_distances_are_no_lines() -> None:
    """They lie above the diagonal. A block on the diagonal would otherwise show them."""
    none = torch.full((1, 1, 2), -1)
    assert not patterns.vertical_slash(300, none, torch.tensor([[[-1, -100]]])).seen.any()
    lines = patterns.vertical_slash(300, none, torch.tensor([[[-3, 100]]]))
    assert torch.equal(lines.seen, patterns.vertical_slash(300, none, torch.tensor([[[100, 100]]])).seen)


def test_bands_and_lines() -> None:
    place = torch.arange(300)
    expected = ((place[:, None] - place).abs() < 10) | ((place - place[:, None] - 150).abs() < 10)
    seen = patterns.bands(300, 300, (0, 150), 10, block_size=(64, 64)).seen[0, 0]
    lines = patterns.vertical_slash(300, torch.tensor([[[5, 170]]]), torch.tensor([[[0, 100]]])).seen[0, 0]
    distance = place[:, None] - place
    shown = (place == 5) | (place == 170) | (distance == 0) | (distance == 100)
    shown = shown & (distance >= 0)
    for m in range(5):
        for n in range(5):
            here = (slice(64 * m, 64 * m + 64), slice(64 * n, 64 * n + 64))
            assert bool(seen[m, n]) == bool(expected[here].any())
            assert bool(lines[m, n]) == bool(shown[here].any())


def test_lists_of_a_captured_graph_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = _mask(1, 1, (128, 128), (64, 64), 0.5)
    call = attention_call(*(_draw(1, 128, 1, 64) for _ in range(3)), softmax_scale=1.0)
    call.options.mask = Mask(mask)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    captured, _ = lists.lists_of(call, 64, 64)
    monkeypatch.undo()
    assert lists.lists_of(call, 64, 64)[0]["tiles"] is not captured["tiles"]


@pytest.mark.parametrize("target", ["gfx942", "gfx1100", "gfx1201", "sm_90"])
def test_a_search_tries_no_tile_that_spans_two_blocks(target: str) -> None:
    for op, inner in (("sparse-fwd", "block_n"), ("sparse-bwd-dq", "block_n"), ("sparse-bwd-dkdv", "block_m")):
        for size in (64, 128, 256):
            tried = launches.candidates(Variant(op, "bf16", size, "blocks"), target)
            assert len(tried) > 1
            assert all(SPARSE_BLOCK % getattr(tile, inner) == 0 for tile in tried)


@pytest.mark.parametrize(("sq", "sk"), [(0, 64), (64, 0), (0, 0)])
def test_empty_sequences(backend: str, sq: int, sk: int) -> None:  # noqa: ARG001
    q, k = _draw(1, sq, 2, 64).requires_grad_(), _draw(1, sk, 2, 64).requires_grad_()
    mask = BlockMask(torch.ones(1, 1, -(-sq // 64), -(-sk // 64), dtype=torch.bool, device=DEVICE), (64, 64))
    out, lse = flash_attn_block_sparse_func(q, k, k, mask, return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((1, 2, sq), torch.inf, device=DEVICE))
    for x, gradient in zip((q, k), torch.autograd.grad(out.sum(), (q, k)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_is_refused() -> None:
    q = _draw(1, 64, 1, 64, dtype=FULL)
    mask = BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE), (64, 64))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            flash_attn_block_sparse_func(dual, q, q, mask)


def test_autocast() -> None:
    q = _draw(1, 64, 1, 64, dtype=FULL)
    mask = BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE), (64, 64))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert flash_attn_block_sparse_func(q, q, q, mask).dtype is torch.bfloat16
