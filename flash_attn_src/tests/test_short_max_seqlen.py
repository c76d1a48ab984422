"""max_seqlen_q or max_seqlen_k too small: the host sizes grids by them, the kernels alone see the true lengths.

On a CPU it is an error. The kernels give what the true lengths say, or NaN for the rows that no program takes.
"""

from __future__ import annotations

from typing import Any

import flash_attn
import pytest
import torch
from assert_close import assert_close
from flash_attn.attention.backends import triton as backend
from flash_attn.attention.backends.triton import gradients as triton_gradients
from flash_attn.call.calls import attention_call, cache_call
from flash_attn.ops.triton import rotary
from triton_calls import DEVICE, GPU, Lengths, Options, run

NAMES = ("out", "lse", "dq", "dk", "dv")


def _offsets(lengths: list[int], before: int = 0) -> torch.Tensor:
    return torch.tensor([before, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)


def _draw(rows: int, heads: int, dim: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(
    ("short", "window", "splits"),
    [((5, 60), (-1, -1), 1), ((60, 5), (4, 0), 1), ((33, 5), (10, 3), 2), ((0, 0), (-1, -1), 1)],
    ids=["q", "k", "splits of dk and dv", "none"],
)
def test_right_or_nan(
    monkeypatch: pytest.MonkeyPatch, short: tuple[int, int], window: tuple[int, int], splits: int
) -> None:
    """Rows of a sequence within max_seqlen are right; every other one is right or NaN. Rows outside stay 0."""
    monkeypatch.setattr(triton_gradients, "splits_of", lambda *_: splits)
    lengths_q, lengths_k = [50, 3, 36], [40, 5, 60]
    q, dout = _draw(3 + sum(lengths_q) + 9, 2), _draw(3 + sum(lengths_q) + 9, 2, seed=1)
    k, v = (_draw(3 + sum(lengths_k) + 9, 1, seed=seed) for seed in (2, 3))
    cu = _offsets(lengths_q, 3), _offsets(lengths_k, 3)
    options = Options(window=window)
    expected = run(q, k, v, dout, options, None, Lengths(*cu, 60, 60))
    got = run(q, k, v, dout, options, None, Lengths(*cu, *short))
    for name, a, b in zip(NAMES, got, expected, strict=True):
        lengths = lengths_k if name in ("dk", "dv") else lengths_q
        a, b = (x.T if name == "lse" else x for x in (a, b))
        lost = a.isnan()
        assert_close(name, torch.where(lost, b, a), b, tiny=1e-5)
        longest = short[1] if name in ("dk", "dv") else short[0]
        if min(short) >= 5:  # the second sequence is no longer than told
            assert not lost[3 + lengths[0] :][: lengths[1]].any(), name
        assert not lost[:3].any(), name
        assert not lost[3 + sum(lengths) :].any(), name
        # Without a GPU tiles are small. A GPU's tile of 128 rows holds each of these sequences whole.
        assert GPU or lost.any() or longest > 0 or name not in ("out", "lse"), name


@pytest.mark.skipif(not GPU, reason="on a CPU it is an error, as the next test says")
@pytest.mark.parametrize("window", [(-1, -1), (40, 0)], ids=str)
def test_public_function_on_a_gpu(window: tuple[int, int]) -> None:
    lengths = [700, 30, 200]
    q, k, v = (_draw(sum(lengths), 2, 64, seed).half() for seed in range(3))
    cu = _offsets(lengths)
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 700, 700, causal=True, window_size=window)
    for longest in ((700, 30), (30, 700), (30, 30)):
        got = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, *longest, causal=True, window_size=window)
        assert_close("out", torch.where(got.isnan(), expected, got), expected, tiny=2e-3)
        assert longest[0] < 700 or not got.isnan().any()


def test_a_short_max_seqlen_is_an_error_on_the_cpu() -> None:
    cu = torch.tensor([0, 9], dtype=torch.int32)
    q = torch.randn(9, 2, 16)
    for longest, match in (((5, 9), "max_seqlen_q: got 5"), ((9, 5), "max_seqlen_k: got 5")):
        with pytest.raises(ValueError, match=match):
            flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, *longest)


def _cache_call(max_seqlen_q: int, num_splits: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lengths_q, lengths_k = [9, 2, 23], [300, 200, 90]
    q = _draw(sum(lengths_q), 4)
    k, v = (_draw(3 * 320, 2, seed=seed).view(3, 320, 2, 16) for seed in (2, 3))
    used = torch.tensor(lengths_k, dtype=torch.int32, device=DEVICE)
    return backend.kvcache(cache_call(
        q, k, v, softmax_scale=0.25, cache_seqlens=used, causal=True, num_splits=num_splits,
        cu_seqlens_q=_offsets(lengths_q),
        max_seqlen_q=max_seqlen_q, **more,
    ))  # fmt: skip


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "rotary"])
def test_a_cache(splits: int, turned: bool) -> None:
    """No rows of a sequence that is longer than max_seqlen_q are 0, as if they saw no key."""
    angles = torch.rand(400, 8, device=DEVICE)
    new = [_draw(3 * 2, 2, seed=seed).view(3, 2, 2, 16) for seed in (4, 5)]
    more = {"k": new[0], "v": new[1], "rotary_cos": angles.cos(), "rotary_sin": angles.sin()} if turned else {}
    expected, wanted_lse = _cache_call(23, splits, **more)
    got, lse = _cache_call(2, splits, **more)
    for name, a, b in (("out", got, expected), ("lse", lse.T, wanted_lse.T)):
        assert_close(name, torch.where(a.isnan(), b, a), b, tiny=1e-5)
        assert not a[9:11].isnan().any()
        assert a[-1].isnan().all()


def test_rotary() -> None:
    """Rotary gives the same result for a max_seqlen that is too small: it does not read it."""
    x, lengths = _draw(400, 2), [300, 4, 90]
    angles = torch.rand(300, 8, device=DEVICE)
    arguments = (angles.cos(), angles.sin(), 0, None, _offsets(lengths))
    expected, got = torch.empty_like(x), torch.empty_like(x)
    rotary.launch(x, expected.copy_(x), *arguments, 300, False, False)
    rotary.launch(x, got.copy_(x), *arguments, 4, False, False)
    assert not torch.equal(expected, x)
    assert torch.equal(got, expected)


def test_fp8() -> None:
    """Its casts need every row."""
    if GPU and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with matrix units for FP8")
    lengths = [300, 4, 90]
    q, k, v = (_draw(sum(lengths), 2, 32, seed) for seed in range(3))
    cu = _offsets(lengths)

    def attend(longest: int) -> torch.Tensor:
        return backend.fp8_forward(attention_call(
            q, k, v, softmax_scale=0.2, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest,
            max_seqlen_k=longest, descales=(None, None, None),
        )).out  # fmt: skip

    assert torch.equal(attend(4), attend(300))
