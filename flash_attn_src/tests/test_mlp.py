"""Activations and the layers made of them, against PyTorch in fp64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn.modules import mlp
from flash_attn.modules.mlp import GatedMlp, Mlp
from flash_attn.ops import activations, fused_dense
from torch.nn import functional

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TINY = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6, torch.float64: 1e-12}


def _draw(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype) * 2


def _gradients(function: Callable[..., Any], g: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x.double().requires_grad_() for x in given]
    return torch.autograd.grad(function(*leaves), leaves, g.double())


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype: torch.dtype) -> None:
    x, y, g = (_draw(5, 7, seed=seed, dtype=dtype) for seed in range(3))
    expected = functional.silu(x.double()) * y.double()
    gradients = _gradients(lambda a, b: functional.silu(a) * b, g, x, y)
    leaves = x.clone().requires_grad_(), y.clone().requires_grad_()
    for name, function in (("swiglu", activations.swiglu), ("apply", activations.SwiGLUFunction.apply)):
        out = function(*leaves)
        assert out.dtype is dtype
        assert_close(name, out, expected, tiny=TINY[dtype], dtype=dtype)
        for part, got, want in zip("xy", torch.autograd.grad(out, leaves, g), gradients, strict=True):
            assert_close(f"{name}: d{part}", got, want, tiny=TINY[dtype], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_forward_and_backward(dtype: torch.dtype) -> None:
    x, g = (_draw(5, 7, seed=seed, dtype=dtype) for seed in range(2))
    bias = _draw(7, seed=2, dtype=dtype)
    (dx,) = _gradients(_tanh_gelu, g, x)
    dy, dbias = _gradients(lambda y, b: _tanh_gelu(y + b), g, x, bias)
    found_dy, found_dbias = activations.bias_gelu_back(g, x, bias)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "gelu_fwd": (activations.gelu_fwd(x), _tanh_gelu(x.double())),
        "gelu_bwd": (activations.gelu_bwd(g, x), dx),
        "bias_gelu": (activations.bias_gelu_impl(x, bias), _tanh_gelu(x.double() + bias.double())),
        "bias_gelu_back": (found_dy, dy),
        "bias": (found_dbias, dbias),
        "relu_bwd": (activations.relu_bwd(g, x), _gradients(functional.relu, g, x)[0]),
        "sqrelu_fwd": (activations.sqrelu_fwd(x), functional.relu(x.double()).square()),
        "sqrelu_bwd": (activations.sqrelu_bwd(g, x), _gradients(lambda a: functional.relu(a).square(), g, x)[0]),
    }
    for name, (got, expected) in pairs.items():
        assert got.dtype is dtype, name
        assert_close(name, got, expected, tiny=4 * TINY[dtype], dtype=dtype)


def test_swiglu_requires_equal_shapes() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"y: got shape \(3,\), wanted \(2, 3\)"):
        activations.swiglu(x, x[0])
    with pytest.raises(TypeError, match=r"y: got torch\.float16"):
        activations.swiglu(x, x.half())


@pytest.mark.parametrize("activation", [functional.gelu, activations.sqrelu_fwd])
def test_mlp(activation: Any) -> None:
    layer, x = Mlp(6, activation=activation, bias2=False), torch.randn(2, 3, 6)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "fc1.weight": (24, 6), "fc1.bias": (24,), "fc2.weight": (6, 24),
    }  # fmt: skip
    assert torch.equal(layer(x), layer.fc2(activation(layer.fc1(x))))
    y, residual = Mlp(6, 10, 4, return_residual=True)(x)
    assert y.shape == (2, 3, 4)
    assert residual is x


@pytest.mark.parametrize("activation", [functional.sigmoid, functional.silu, functional.gelu])
def test_gated_mlp(activation: Any) -> None:
    """As bonito builds it, too: any multiple, no biases."""
    x = torch.randn(2, 3, 6)
    layer = GatedMlp(6, activation=activation)
    assert tuple(layer.fc1.weight.shape) == (256, 6)
    y, gate = layer.fc1(x).chunk(2, -1)
    assert_close("gated", layer(x), layer.fc2(y * activation(gate)))
    slim = GatedMlp(6, 10, activation=activation, bias1=False, bias2=False, multiple_of=1, return_residual=True)
    assert {name: tuple(p.shape) for name, p in slim.named_parameters()} == {
        "fc1.weight": (20, 6), "fc2.weight": (6, 10),
    }  # fmt: skip
    assert slim(x)[1] is x


def test_the_order_of_arguments() -> None:
    tail = ["return_residual", "device", "dtype"]
    head = ["in_features", "hidden_features", "out_features", "activation", "bias1", "bias2"]
    assert list(inspect.signature(Mlp).parameters) == head + tail
    assert list(inspect.signature(GatedMlp).parameters) == [*head, "multiple_of", *tail]


def test_fused_mlp_layers_come_from_fused_dense() -> None:
    assert mlp.FusedMLP is fused_dense.FusedMLP
    assert mlp.ParallelFusedMLP is fused_dense.ParallelFusedMLP
