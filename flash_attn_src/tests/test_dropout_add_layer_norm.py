"""flash_attn.ops.layer_norm against PyTorch in float64: dropout, residual, scales, rows of a subset, two branches."""

from __future__ import annotations

import pytest
import torch
from assert_close import assert_close
from flash_attn.ops import layer_norm as ops
from flash_attn.ops import rms_norm
from torch.nn import functional

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prenorm", [True, False])
def test_dropout_add_layer_norm(prenorm: bool, dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    x0, residual = (torch.randn(3, 4, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    module = ops.DropoutAddLayerNorm(24, prenorm=prenorm, p=p, residual_in_fp32=True)
    module.weight.data.uniform_(0.5, 1.5)
    scale = torch.rand(24, requires_grad=True)
    result = ops.dropout_add_layer_norm(
        x0, residual, module.weight, module.bias, p, module.eps, layerscale=scale, prenorm=prenorm,
        return_dropout_mask=True,
    )  # fmt: skip
    y, mask = result[0], result[-1]
    assert mask.dtype is torch.uint8
    assert bool(mask.all()) == (p == 0.0)
    z = x0.double() * scale.to(dtype).double() * mask / (1.0 - p) + residual.double()
    expected = functional.layer_norm(z, (24,), module.weight.double(), module.bias.double(), module.eps)
    tiny = 0.0 if dtype is torch.float32 else 2e-2
    assert_close("y", y, expected.to(dtype), tiny=max(tiny, 1e-5))
    if prenorm:
        assert_close("z", result[1], z.to(dtype), tiny=max(tiny, 1e-5))
    inputs = [x0, residual, scale, module.weight, module.bias]
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, inputs, dy)
    for one, other in zip(gradients, torch.autograd.grad(expected, inputs, dy.double()), strict=True):
        assert_close("gradient", one, other, tiny=max(8 * tiny, 1e-4))
    module.eval()
    plain = ops.dropout_add_layer_norm(x0, residual, module.weight, module.bias, 0.0, 1e-5, prenorm=prenorm)
    for one, other in zip(module(x0, residual), plain, strict=True):
        assert_close("without dropout", one, other)


def test_rows_of_a_subset() -> None:
    torch.manual_seed(0)
    x0 = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.rand(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    of, into = torch.tensor([1, 0, 2, 3, 0]), torch.tensor([0, 1, 0, 2, 3])
    y, z, mask = ops.dropout_add_layer_norm_subset(
        x0, residual, weight, bias, 0.0, 1e-5, x0_subset=of, out_subset=into, rowscale_const=2.0, out_numrows=3,
        prenorm=True, return_dropout_mask=True,
    )  # fmt: skip
    wide = torch.zeros(5, 8, dtype=torch.float64).index_copy(0, torch.tensor([0, 2, 3]), 2.0 * x0) + residual
    assert_close("z", z, wide)
    expected = functional.layer_norm(wide, (8,), weight, bias, 1e-5)[[1, 3, 4]]
    assert_close("y", y, expected)
    assert mask.shape == x0.shape
    rms = rms_norm.dropout_add_rms_norm_subset(x0, residual, weight, bias, 0.0, 1e-5, None, of, into, 2.0, 3)
    assert_close("rms", rms, (functional.rms_norm(wide, (8,), weight, 1e-5) + bias)[[1, 3, 4]])
    for one, other in zip(
        torch.autograd.grad(y.square().sum(), (x0, residual)),
        torch.autograd.grad(expected.square().sum(), (x0, residual)), strict=True,
    ):  # fmt: skip
        assert_close("gradient", one, other)


def test_the_mask_of_a_subset_has_the_rows_of_x0() -> None:
    x0, weight, bias = torch.ones(3, 2, 8), torch.ones(8), torch.zeros(8)
    of = torch.tensor([[4, 0], [0, 1], [6, 0]])
    y, z, mask = ops.dropout_add_layer_norm_subset(
        x0, None, weight, bias, 0.5, 1e-5, x0_subset=of, prenorm=True, return_dropout_mask=True
    )
    assert y.shape == z.shape == mask.shape == (3, 2, 8)
    rows = mask.reshape(6, 8)
    assert_close("z", z.reshape(6, 8)[[0, 3, 4]], rows[[3, 0, 5]] * 2.0)
    assert 0 < int(rows[[3, 0, 5]].sum()) < 24
    assert rows[[1, 2, 4]].all()  # rows that are not taken


@pytest.mark.parametrize("tied", [True, False])
def test_parallel_residual(tied: bool) -> None:
    torch.manual_seed(0)
    x0, x1, residual = torch.randn(3, 2, 16, dtype=torch.float64)
    weights = [torch.rand(16, dtype=torch.float64) for _ in range(4)]
    second = (None, None) if tied else (weights[2], weights[3])
    y0, y1, z, mask0, mask1 = ops.dropout_add_layer_norm_parallel_residual(
        x0, x1, residual, weights[0], weights[1], *second, 0.3, 1e-5, prenorm=True, return_dropout_mask=True
    )
    wide = (x0 * mask0 + x1 * mask1) / 0.7 + residual
    assert_close("z", z, wide)
    assert_close("y0", y0, functional.layer_norm(wide, (16,), weights[0], weights[1], 1e-5))
    assert (y1 is None) == tied
    if not tied:
        assert_close("y1", y1, functional.layer_norm(wide, (16,), *second, 1e-5))


def test_layer_norm() -> None:
    x, weight, bias = torch.randn(4, 8), torch.rand(8), torch.randn(8)
    assert_close("y", ops.layer_norm(x, weight, bias, 1e-5), functional.layer_norm(x, (8,), weight, bias, 1e-5))
