"""flash_attn.ops.fused_dense and the modules on it, alone and over two processes, against torch.nn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from assert_close import assert_close
from flash_attn.modules.mha import MHA, ParallelMHA
from flash_attn.modules.mlp import GatedMlp, Mlp, ParallelGatedMlp, ParallelMLP
from flash_attn.ops.fused_dense import (
    ColumnParallelLinear,
    FusedDense,
    FusedMLP,
    ParallelFusedMLP,
    RowParallelLinear,
    fused_mlp_func,
)
from two_ranks import both

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_approx": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "sqrelu": lambda x: torch.relu(x).square(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_fused_dense(residual: bool, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = FusedDense(24, 16, bias=bias, return_residual=residual, dtype=dtype)
    x = torch.randn(2, 5, 24, dtype=dtype, requires_grad=True)
    result = layer(x)
    out = result[0] if residual else result
    if residual:
        assert result[1] is x
    wide = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert_close("out", out, wide.to(dtype))
    dout = torch.randn_like(out)
    inputs = [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(out, inputs, dout), torch.autograd.grad(wide, inputs, dout.double()), strict=True
    ):
        assert_close("gradient", one, other)


@pytest.mark.parametrize("checkpoint_lvl", [0, 1, 2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_mlp(activation: str, checkpoint_lvl: int) -> None:
    torch.manual_seed(0)
    layer = FusedMLP(16, 32, 8, activation=activation, return_residual=True, checkpoint_lvl=checkpoint_lvl)
    x = torch.randn(3, 16, requires_grad=True)
    out, same = layer(x)
    assert same is x
    expected = layer.fc2(ACTIVATIONS[activation](layer.fc1(x)))
    assert_close("out", out, expected)
    inputs = [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        assert_close("gradient", one, other)


def test_wrong_arguments_are_refused() -> None:
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    with pytest.raises(ValueError, match="activation: got 'silu', wanted gelu_approx, relu, sqrelu"):
        fused_mlp_func(x, weight, weight.t(), activation="silu")
    with pytest.raises(ValueError, match=r"x: got shape \(2, 5\), wanted \(\.\.\., 4\)"):
        fused_mlp_func(torch.randn(2, 5), weight, weight.t())
    with pytest.raises(ValueError, match="process_group: got None"):
        ParallelFusedMLP(4)


def _cut(whole: torch.Tensor, rank: int, parts: int, dim: int = 0) -> torch.Tensor:
    """A rank's half of each of `parts` parts of a dimension."""
    return torch.cat([part.chunk(2, dim)[rank] for part in whole.detach().chunk(parts, dim)], dim)


def _run(layer: Any, x: torch.Tensor, rank: int | None) -> list[torch.Tensor]:
    """out and dx, where out is summed with a weight for each place; rank: its half of the rows, None all of them."""
    part = (x if rank is None else x.chunk(2)[rank]).clone().requires_grad_()
    out = layer(part)
    rows = out.shape[0] * (1 if rank is None else 2)
    weights = torch.cos(torch.arange(1.0 * rows * out.shape[1])).view(rows, -1)
    (out * (weights if rank is None else weights.chunk(2)[rank])).sum().backward()
    return [out.detach(), part.grad]


def _compared(layer: Any, whole: Any, x: torch.Tensor, rank: int, sequence_parallel: bool) -> list[torch.Tensor]:
    """out and dx of the layer, and what they should be."""
    expected = [y.chunk(2)[rank] if sequence_parallel else y for y in _run(whole, x, None)]
    return _run(layer, x, rank if sequence_parallel else None) + expected


def _layers(rank: int, sequence_parallel: bool) -> list[torch.Tensor]:
    group, x = dist.group.WORLD, torch.linspace(-1.0, 1.0, 4 * 12).view(4, 12)
    some = {"sequence_parallel": sequence_parallel}
    torch.manual_seed(0)
    pairs: list[tuple[Any, Any, int]] = [
        (ParallelMLP(12, 16, process_group=group, **some), Mlp(12, 16), 1),
        (ParallelFusedMLP(12, 16, process_group=group, checkpoint_lvl=1, **some), FusedMLP(12, 16), 1),
        (ParallelGatedMlp(12, group, 16, multiple_of=4, **some), GatedMlp(12, 16, multiple_of=4), 2),
    ]
    result = []
    for layer, whole, parts in pairs:
        for parameter in whole.parameters():
            parameter.data.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view(parameter.shape).sin())
        given = dict(whole.named_parameters())
        for name, parameter in layer.named_parameters():
            full = given[name].detach()
            if name.startswith("fc2"):
                parameter.data.copy_(full if name.endswith("bias") else _cut(full, rank, 1, 1))
            else:
                parameter.data.copy_(_cut(full, rank, parts))
        result += _compared(layer, whole, x, rank, sequence_parallel)
    assert (RowParallelLinear(4, 2, group).bias is not None) == (rank == 0)
    assert ColumnParallelLinear(4, 6, group, multiple_of=2).out_features == (4, 2)[rank]
    return result


def _attention(rank: int, sequence_parallel: bool) -> list[torch.Tensor]:
    group, result = dist.group.WORLD, []
    x = torch.linspace(-1.0, 1.0, 2 * 4 * 32).view(8, 32).sin()
    for heads_kv, flash, rotary in ((4, True, 8), (2, True, 0), (4, False, 0)):
        torch.manual_seed(0)
        options: dict[str, Any] = {
            "num_heads_kv": heads_kv,
            "causal": True,
            "use_flash_attn": flash,
            "rotary_emb_dim": rotary,
        }
        whole = MHA(32, 4, use_alibi=flash and not rotary, **options)
        layer = ParallelMHA(
            32, 4, group, use_alibi=flash and not rotary, sequence_parallel=sequence_parallel, **options
        )
        for name, parameter in layer.named_parameters():
            full = dict(whole.named_parameters())[name].detach()
            if name.startswith("Wqkv"):
                q, kv = full.tensor_split((32,))
                value = torch.cat((_cut(q, rank, 1), _cut(kv, rank, 2)))
            else:
                value = full if name.endswith("bias") else _cut(full, rank, 1, 1)
            parameter.data.copy_(value)
        rows = [functools.partial(layer, seqlen=4), lambda y, whole=whole: whole(y.view(2, 4, 32)).flatten(0, 1)]
        result += _compared(*rows, x, rank, sequence_parallel)
        assert layer.allocate_inference_cache(2, 5).shape == (2, 5, 2, heads_kv // 2, 8)
    return result


def _all(rank: int) -> list[torch.Tensor]:
    return [
        x
        for work in (_layers, _attention)
        for sequence_parallel in (True, False)
        for x in work(rank, sequence_parallel)
    ]


def test_over_two_processes(tmp_path: Path) -> None:
    for result in both(tmp_path, _all):
        for out, dx, expected, wanted_dx in zip(*(result[i::4] for i in range(4)), strict=True):
            assert_close("out", out, expected)
            assert_close("dx", dx, wanted_dx)
