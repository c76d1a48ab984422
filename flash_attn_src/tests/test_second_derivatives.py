"""Second derivatives are right, or they raise. They never come out too small.

A gradient penalty finds both ways in which they can be lost: the incoming gradient is constant, and `autograd.grad`
with respect to a weight before the operation prunes what does not lead to that weight.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import flash_attn
import pytest
import torch
import torch.distributed as dist
from assert_close import assert_close
from flash_attn import cute
from flash_attn.ops.triton import add_norm, cross_entropy
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from two_ranks import both

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _penalty(function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """d/dW of |d(function(tanh(x W)) . w) / dx|^2: a gradient penalty, whose incoming gradient w is constant."""
    torch.manual_seed(1)
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    weight = (torch.randn(shape[-1], shape[-1], device=DEVICE) / shape[-1] ** 0.5).requires_grad_()
    out = function(torch.tanh(x @ weight))
    w = torch.randn(out.shape, device=DEVICE)
    (gradient,) = torch.autograd.grad((out.float() * w).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), weight)[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: flash_attn.flash_attn_func(x, x, x),
        lambda x: flash_attn.flash_attn_fp8_func(x, x, x),
        lambda x: flash_attn.flash_attn_qkvpacked_fp8_func(torch.stack((x, x, x), 2)),
        lambda x: cute.flash_attn_func(x, x, x, return_lse=True)[1],
    ],
    ids=["attention", "fp8", "fp8 packed", "lse of FlashAttention-4"],
)
def test_attention_refuses(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="has no second derivative"):
        _penalty(function, (1, 16, 2, 16))


@pytest.mark.parametrize("residual", [None, torch.float32], ids=["alone", "residual"])
@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
def test_norms(is_rms: bool, residual: torch.dtype | None) -> None:
    """By the kernels, against PyTorch's own operations, for every input of the norm and for what it keeps."""
    weight, bias, other = (torch.randn(24, device=DEVICE, requires_grad=True) for _ in range(3))

    def total(norm: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]) -> list[torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            added = None if residual is None else (x * other).sin()
            y, z = norm(x, added, weight + x.mean((0, 1)), bias, 1e-5, torch.float32, True, is_rms)
            return y if residual is None else y + z.cos()

        first = _penalty(function, (3, 5, 24))
        x = torch.randn(3, 5, 24, device=DEVICE, requires_grad=True)
        leaves = (x, weight, bias) if residual is None else (x, weight, bias, other)
        gradients = torch.autograd.grad(function(x).sin().sum(), leaves, create_graph=True)
        return [first, *torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)]

    got, wanted = total(add_norm._AddNorm.apply), total(add_norm.reference)
    for name, a, b in zip(("penalty", "x", "weight", "bias", "other"), got, wanted, strict=False):
        assert_close(name, a, b, tiny=2e-5)


@pytest.mark.parametrize("known", [False, True], ids=["lse computed", "lse known"])
def test_cross_entropy(known: bool) -> None:
    """By the kernels, against PyTorch's own operations; a row is ignored, its logits are NaN."""
    labels = torch.tensor([0, 11, -100, 5], device=DEVICE)
    options = (0.0, 1.0, 0.01, -100) if known else (0.1, 0.8, 0.01, -100)

    def total(loss: Callable[..., tuple[torch.Tensor, torch.Tensor]], *more: object) -> list[torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            x = torch.where(labels[:, None] == -100, torch.nan, x)
            lse = x.logsumexp(1).detach() if known else None
            return loss(x, labels, lse, *options, *more)[0]

        x = torch.linspace(-1.0, 2.0, 4 * 12, device=DEVICE).reshape(4, 12).requires_grad_()
        factor = torch.linspace(1.0, 2.0, 4, device=DEVICE).requires_grad_()
        (gradient,) = torch.autograd.grad((function(x) * factor).sum(), x, create_graph=True)
        return [_penalty(function, (4, 12)), *torch.autograd.grad(gradient.square().sum(), (x, factor))]

    got = total(cross_entropy._CrossEntropy.apply, False, None)
    wanted = total(cross_entropy.reference)
    for name, a, b in zip(("penalty", "x", "factor"), got, wanted, strict=True):
        assert b.isfinite().all()
        assert_close(name, a, b, tiny=1e-5)


def _penalty_over_two_processes(rank: int) -> list[torch.Tensor]:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    losses, _ = cross_entropy_loss(logits, torch.tensor([0, 9, 4, 5]), process_group=dist.group.WORLD)
    (gradient,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="cross entropy over several processes has no second derivative"):
        torch.autograd.grad(gradient.square().sum(), logits)
    return [gradient.detach()]


def test_cross_entropy_over_processes_refuses(tmp_path: Path) -> None:
    both(tmp_path, _penalty_over_two_processes)


def test_a_gradient_in_place_of_the_logits_serves_one_backward() -> None:
    """The second backward would read the gradient as logits."""
    logits = torch.randn(4, 12, device=DEVICE)
    x = logits.clone().requires_grad_()
    losses, _ = cross_entropy._CrossEntropy.apply(
        x * 1.0, torch.arange(4, device=DEVICE), None, 0.0, 1.0, 0.0, -100, True, None
    )
    (first,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
    wanted = logits.softmax(1) - torch.nn.functional.one_hot(torch.arange(4, device=DEVICE), 12)
    assert_close("first", first, wanted, tiny=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()
