"""Dropout in the Triton kernels, compared with a reference that uses their mask."""

from __future__ import annotations

import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn.attention.backends import triton as backend
from flash_attn.call.calls import attention_call, replace
from triton_calls import DEVICE, Options, compare, differentiate


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(
    ("dtype", "alibi"), [(torch.float16, False), (torch.float16, True), (torch.float32, False)], ids=str
)
def test_dropout_drops_the_same_in_forward_and_backward(dtype: torch.dtype, alibi: bool) -> None:
    """out and the gradients are those of the reference under the mask that the kernels drew."""
    torch.manual_seed(4)
    heads, size, dropout_p = 2, 48, 0.3
    q, k, v, dout = torch.randn(4, 1, size, heads, 64, device=DEVICE).to(dtype)
    slopes = torch.rand(heads, device=DEVICE) / 8 if alibi else None
    call = attention_call(q, k, v, softmax_scale=0.125, alibi_slopes=slopes, dropout_p=dropout_p)
    # With v the identity, out shows which probabilities were kept.
    eye = torch.zeros_like(v)
    eye[0, :, :, :size] = torch.eye(size, device=DEVICE)[:, None].expand(size, heads, size)
    shown, _, _, state = backend.forward(replace(call, v=eye))
    assert state is not None
    kept = (shown[..., :size] != 0).permute(0, 2, 1, 3)
    assert 0.65 < kept.float().mean() < 0.75
    assert not torch.equal(kept[0, 0], kept[0, 1])

    call = replace(call, rng_state=state)
    out, lse, _, again = backend.forward(call)
    assert again is state
    grads = differentiate(call, dout, out, lse)

    def wanted(compute: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = tuple(x.detach().to(compute).requires_grad_() for x in (q, k, v))
        out, lse = reference.attention(*leaves, alibi_slopes=slopes, dropout_p=dropout_p, kept=kept, dtype=compute)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(compute))

    compare((out, lse, *grads), wanted(torch.float64), wanted(dtype))


@pytest.mark.usefixtures("_tiles")
def test_dropout_draws_new_numbers_at_each_call() -> None:
    q, k, v = torch.randn(3, 1, 48, 2, 16, device=DEVICE, dtype=torch.float16)
    call = attention_call(q, k, v, softmax_scale=0.25, dropout_p=0.3)
    torch.manual_seed(5)
    first, second = backend.forward(call).out, backend.forward(call).out
    torch.manual_seed(5)
    assert not torch.equal(first, second)
    assert torch.equal(first, backend.forward(call).out)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_dmask_holds_probabilities_and_dropped_elements(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    q, k, v = torch.randn(3, 2, 40, 2, 48, device=DEVICE, dtype=dtype)
    slopes = torch.rand(2, 2, device=DEVICE)
    options = Options(causal=True, window=(25, -1), softcap=5.0)
    out, lse, dmask, _ = backend.forward(
        attention_call(
            q,
            k,
            v,
            softmax_scale=48**-0.5,
            causal=True,
            window_size=(25, -1),
            softcap=5.0,
            alibi_slopes=slopes,
            dropout_p=0.4,
            return_softmax=True,
        )
    )
    seen = reference.visible(40, 40, True, (25, -1)).to(DEVICE)
    assert dmask.dtype == dtype
    assert dmask.shape == (2, 2, 40, 40)
    assert not dmask.masked_select(~seen).any()
    kept = seen & (dmask >= 0)  # one that is kept may underflow to 0, one that is dropped may not
    assert 0.5 < kept.sum() / seen.expand_as(dmask).sum() < 0.7
    expected, wanted_lse = reference.attention(
        q, k, v, causal=True, window=options.window, softcap=5.0, alibi_slopes=slopes, dropout_p=0.4, kept=kept,
        dtype=torch.float64,
    )  # fmt: skip
    assert_close("out", out, expected, tiny=2e-3 if dtype is torch.float16 else 1e-5)
    # Without the mask the sum over v = identity is the probability itself.
    sums = dmask.abs().double().sum(-1)
    assert_close("sum of probabilities", sums, torch.ones_like(sums), tiny=2e-3 if dtype is torch.float16 else 1e-5)
    assert_close("lse", lse, wanted_lse, tiny=2e-5)
