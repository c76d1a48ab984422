"""Dropout of the Composable Kernel backend, done as in test_ck_backend.py."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from assert_close import assert_close
from ck_recorded import operations, tensors
from flash_attn import flash_attn_func
from flash_attn.attention.backends import recording
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.attention.backends.ck import dropout as ck_dropout
from flash_attn.call.calls import attention_call, replace
from flash_attn.core import ck_planner

torch.set_num_threads(2)
pytestmark = pytest.mark.usefixtures("planner")


@pytest.fixture(scope="session", autouse=True)
def _simulated() -> None:
    """Nothing here goes to the Triton kernels of --gfx."""


@pytest.mark.filterwarnings("ignore:the CK backend cannot do:RuntimeWarning")
def test_forward_and_backward_draw_the_same_random_numbers() -> None:
    """With dropout, forward and backward run on one backend, also where an option of one needs Triton."""
    q, k, v = (x.requires_grad_() for x in tensors((1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64)))
    slopes = torch.rand(2)
    for options in ({}, {"softcap": 3.0}, {"softmax_scale": -1.0}, {"alibi_slopes": slopes}, {"deterministic": True}):
        with recording.record("gfx942") as launches:
            flash_attn_func(q, k, v, dropout_p=0.3, **options).sum().backward()
        assert len({launch.kernel.startswith("triton") for launch in launches}) == 1, options


@pytest.mark.filterwarnings("ignore:the CK backend cannot do:RuntimeWarning")
@pytest.mark.parametrize("shape", [(65536, 1, 1, 8), (1, 1, 65536, 8)])
def test_dropout_beyond_a_grid_goes_the_same_way(shape: tuple[int, ...]) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(shape, shape, shape))
    with recording.record("gfx942") as launches:
        flash_attn_func(q, k, v, dropout_p=0.3).sum().backward()
    assert operations(launches) == ["triton.forward", "triton.backward"]


def test_dropout_takes_its_seed_from_torch() -> None:
    q, k, v = tensors((1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64))
    states = []
    with recording.record("gfx942"):
        for _ in range(2):
            torch.manual_seed(5)
            states += [
                torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.3, 1.0, False, -1, -1, 0.0, None, False)[3]
                for _ in "ab"
            ]
    assert states[0].equal(states[2])
    assert not states[0].equal(states[1])


def test_signed_probabilities() -> None:
    torch.manual_seed(0)
    q, k, v = tensors((2, 30, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), dtype=torch.float16)
    slopes = torch.rand(2, 4)
    call = attention_call(q, k, v, softmax_scale=0.125, causal=True, alibi_slopes=slopes)
    lse = torch_backend.forward(call).softmax_lse
    numbers = torch.randint(0, 256, (2, 4, 30, 40), dtype=torch.uint8)
    p = ck_dropout.signed_probabilities(replace(call, dropout_p=0.2), lse, numbers)
    assert_close("sums", p.float().abs().sum(-1), torch.ones(2, 4, 30), tiny=5e-3)
    seen = torch.arange(40) <= torch.arange(30)[:, None] + 10
    assert torch.equal(p < 0, (numbers > 204) & seen)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout(done: list[ck_planner.Launch], request: pytest.FixtureRequest, causal: bool) -> None:
    """Forward, backward and the S_dmask that PyTorch draws drop the same scores."""
    if request.config.getoption("--gfx") is None:
        pytest.skip("ck_interpreter draws no random numbers: needs --gfx")
    inputs = tensors((1, 150, 2, 64), (1, 201, 1, 64), (1, 201, 1, 64))
    options = {"dropout_p": 0.25, "causal": causal}
    torch.manual_seed(0)
    mine = _with_gradients(lambda *x: flash_attn_func(*x, **options), inputs)
    torch.manual_seed(0)
    with torch.no_grad():
        out, _, dmask = flash_attn_func(*inputs, return_attn_probs=True, **options)
    assert torch.equal(out, mine[0])
    assert operations(done) == ["fwd", "dot", "dqdkdv", "convert", "fwd"]
    exact, rounded = (
        _with_gradients(lambda *x, of=dtype: reference.attention(*x, kept=dmask >= 0, dtype=of, **options)[0], inputs)
        for dtype in (torch.float32, None)
    )
    for name, *results in zip(("out", "dq", "dk", "dv"), mine, exact, rounded, strict=True):
        assert_close(name, results[0], results[1], rough=results[2], tiny=1e-2)


def _with_gradients(call: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    given = [x.detach().requires_grad_() for x in inputs]
    out = call(*given)
    return [out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out) * 0.5 + out.detach())]
