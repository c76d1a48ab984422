"""Infinite keys and huge scores: rows come out as the mathematics says, or as NaN, never as zeros."""

from __future__ import annotations

import math

import flash_attn
import pytest
import torch
from assert_close import assert_close
from flash_attn.attention.backends import triton as backend
from flash_attn.call.calls import attention_call
from triton_calls import DEVICE, GPU, Options, run


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dim", [40, 64, 72, 80, 96])
def test_a_mask_in_an_extra_channel(dim: int) -> None:
    """The last column of k holds 0 or -inf. Head dims that do not fill their tile give what -3e4 gives."""
    torch.manual_seed(dim)
    q, dout = torch.randn(2, 1, 40, 2, dim, device=DEVICE).half()
    k, v = torch.randn(2, 1, 100, 2, dim, device=DEVICE).half()
    q[..., -1] = 1.0
    hidden = torch.arange(100, device=DEVICE) % 3 == 1
    k[..., -1] = torch.where(hidden, -3e4, 0.0)[:, None]
    expected = run(q, k, v, dout, Options(softmax_scale=0.2), None)
    k[..., -1] = torch.where(hidden, -torch.inf, 0.0)[:, None]
    got = run(q, k, v, dout, Options(softmax_scale=0.2), None)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        if name == "dq":  # the last column is a sum of 0 * inf, in PyTorch too
            a, b = a[..., :-1], b[..., :-1]
        assert torch.equal(a, b), name


def _out(size: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out of scores around `size`, out in fp64, out by PyTorch in fp32)."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 32, 1, 64, generator=generator)
    k, v = torch.randn(2, 1, 256, 1, 64, generator=generator)
    root = min(size**0.5, 3e4)
    q[..., 0] = k[..., 0] = root
    q, k, v = (x.to(DEVICE, dtype) for x in (q, k, v))
    scale = size / root**2
    out = backend.forward(attention_call(q, k, v, softmax_scale=scale)).out
    exact, rough = ((q.to(t)[0, :, 0] @ k.to(t)[0, :, 0].T * scale).softmax(1) @ v.to(t)[0, :, 0]
                    for t in (torch.float64, torch.float32))  # fmt: skip
    return out[0, :, 0], exact, rough


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e3, 1e5, 1e7])
def test_huge_scores(size: float, dtype: torch.dtype) -> None:
    """The largest probability of a row is not 1 where a compiler computes s * c - m * c by one instruction."""
    if dtype is torch.bfloat16 and not GPU:
        pytest.skip("Triton's interpreter multiplies no bf16")
    out, exact, rough = _out(size, dtype)
    assert_close("out", out, exact, rough=rough, tiny=8.0 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", [1e9, 1e11, 1e30])
def test_scores_without_a_bit_for_their_differences(size: float) -> None:
    """Scores beyond the range of the kernels give NaN or infinite rows, never 0 as for a row that sees no key."""
    out, _, _ = _out(size, torch.float16)
    assert not out.eq(0.0).all(1).any()


@pytest.mark.skipif(not GPU, reason="needs a GPU that torch can use")
def test_rows_do_not_depend_on_an_infinity_that_others_see() -> None:
    """Sequences, heads and rows that do not see an infinite key."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 512, 4, 40, device=DEVICE).half()
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    k[0, 300, 1] = torch.inf
    got = flash_attn.flash_attn_func(q, k, v, causal=True)
    got[0, 300:, 1] = expected[0, 300:, 1]
    assert torch.equal(got, expected)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("keys", [1, 17, 35, 100])
def test_keys_past_the_last_key_have_no_weight(keys: int) -> None:
    """Every score is far below 0, the score of the zeros that fill a tile."""
    q, dout = torch.ones(1, 3, 1, 16, device=DEVICE), torch.randn(1, 3, 1, 16, device=DEVICE)
    k, v = -torch.ones(1, keys, 1, 16, device=DEVICE), torch.randn(1, keys, 1, 16, device=DEVICE)
    out, lse, dq, dk, dv = run(q, k, v, dout, Options(softmax_scale=10.0), None)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(keys) - 160.0), rtol=0, atol=1e-4)
    torch.testing.assert_close(dv, dout.sum(1, keepdim=True).expand_as(dv) / keys, rtol=0, atol=1e-5)
    assert dq.abs().max() < 1e-3  # every key is the same
    assert dk.sum(1).abs().max() < 1e-3
