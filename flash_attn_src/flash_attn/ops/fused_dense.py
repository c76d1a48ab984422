"""Linear layers and MLPs by upstream's names, whole or shared out over a tensor-parallel group, on PyTorch's matmul.

process_group is one of torch.distributed, None for one rank alone. With sequence_parallel a rank has its part of the
first dimension of the input, and gets its part of the result; without it every rank has all of both. A weight's shares
are as even as multiples of multiple_of go, the first ranks having more. checkpoint_lvl, heuristic and save_pre_act
change no result. Under autocast everything is in its type. The bias of a RowParallelLinear is the first rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flash_attn.ops.activations import gelu_fwd, sqrelu_fwd
from flash_attn.ops.checks import check_int, check_switches, check_tensor
from flash_attn.utils.distributed import (
    all_gather,
    all_reduce,
    all_reduce_raw,
    get_dim_for_local_rank,
    reduce_scatter,
)

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_approx": gelu_fwd,
    "relu": functional.relu,
    "sqrelu": sqrelu_fwd,
}
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class _Copied(torch.autograd.Function):
    """A tensor that every rank has, whose gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, process_group: Any) -> torch.Tensor:
        ctx.process_group = process_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradient.clone(memory_format=torch.contiguous_format)  # autograd may share the incoming one
        return all_reduce_raw(summed, ctx.process_group)[0], None


def _whole(x: torch.Tensor, process_group: Any, sequence_parallel: bool) -> torch.Tensor:
    """The input that all ranks share."""
    if process_group is None:
        return x
    return all_gather(x, process_group) if sequence_parallel else _Copied.apply(x, process_group)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str = "") -> None:
    check_tensor("x", x)
    check_tensor(f"weight{name}", weight, ("out_features", "in_features"), like=x)
    if not name or name == "1":
        width = weight.shape[1]
        if x.dim() == 0 or x.shape[-1] != width:
            raise ValueError(f"x: got shape {tuple(x.shape)}, wanted (..., {width}), as weight{name} has")
    if bias is not None:
        check_tensor(f"bias{name}", bias, like=x, shape=(weight.shape[0],))


def fused_dense_func(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    return_residual: bool = False,
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Result:
    """x (..., in_features) @ weight (out_features, in_features)^T + bias; with return_residual, x too."""
    check_switches(return_residual=return_residual, sequence_parallel=sequence_parallel)
    _check(x, weight, bias)
    out = functional.linear(_whole(x, process_group, sequence_parallel), weight, bias)
    return (out, x) if return_residual else out


def fused_mlp_func(
    x: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int = 0,
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Result:
    """linear(activation(linear(x))) by both weights and biases; with return_residual, x too. With a process_group the
    result is this rank's part of a sum.

    activation: gelu_approx, relu or sqrelu. checkpoint_lvl > 0: the activation is computed again in the backward.
    """
    check_switches(
        save_pre_act=save_pre_act, return_residual=return_residual, sequence_parallel=sequence_parallel
    )  # fmt: skip
    _check_options(activation, checkpoint_lvl)
    check_int("heuristic", heuristic, -1, 4)
    _check(x, weight1, bias1, "1")
    _check(x, weight2, bias2, "2")
    whole = _whole(x, process_group, sequence_parallel)

    def hidden(y: torch.Tensor) -> torch.Tensor:
        return _ACTIVATIONS[activation](functional.linear(y, weight1, bias1))

    again = checkpoint_lvl > 0 and torch.is_grad_enabled()
    inner = checkpoint(hidden, whole, use_reentrant=False) if again else hidden(whole)
    out = functional.linear(inner, weight2, bias2)
    return (out, x) if return_residual else out


def _check_options(activation: str, checkpoint_lvl: int) -> None:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, wanted {', '.join(_ACTIVATIONS)}")
    check_int("checkpoint_lvl", checkpoint_lvl, 0, 2)


class FusedDense(nn.Linear):
    """A linear layer; with return_residual, x too."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_switches(return_residual=return_residual)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x: torch.Tensor, process_group: Any = None) -> Result:  # type: ignore[override]
        """(..., out_features). process_group: x is this rank's part of the first dimension, the result has all."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


def _share(name: str, features: int, multiple_of: int, process_group: Any) -> int:
    """This rank's part of a dimension."""
    check_int("multiple_of", multiple_of, 1)
    if check_int(name, features, 1) % multiple_of:
        raise ValueError(f"{name}: got {features}, wanted a multiple of {multiple_of}")
    return get_dim_for_local_rank(
        features, dist.get_world_size(process_group), dist.get_rank(process_group), multiple_of
    )


class ColumnParallelLinear(nn.Linear):
    """A rank's part of the outputs of a linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: Any,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_switches(bias=bias, sequence_parallel=sequence_parallel)
        part = _share("out_features", out_features, multiple_of, process_group)
        super().__init__(in_features, part, bias=bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., this rank's outputs)."""
        out = fused_dense_func(
            x, self.weight, self.bias, process_group=self.process_group, sequence_parallel=self.sequence_parallel
        )
        assert isinstance(out, torch.Tensor)
        return out


class RowParallelLinear(nn.Linear):
    """A linear layer of a rank's part of the inputs, summed over the ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: Any,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_switches(bias=bias, sequence_parallel=sequence_parallel)
        part = _share("in_features", in_features, multiple_of, process_group)
        first = dist.get_rank(process_group) == 0
        super().__init__(part, out_features, bias=bias and first, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., out_features) of x (..., this rank's inputs)."""
        out = fused_dense_func(x, self.weight, self.bias)
        assert isinstance(out, torch.Tensor)
        return (reduce_scatter if self.sequence_parallel else all_reduce)(out, self.process_group)


class FusedMLP(nn.Module):
    """fc2(activation(fc1(x))); with return_residual, x too. heuristic: -1 to 4 or "auto", which change no result."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_switches(bias1=bias1, bias2=bias2, return_residual=return_residual)
        _check_options(activation, checkpoint_lvl)
        hidden = hidden_features or check_int("in_features", in_features, 1) * 4
        self.activation = activation
        self.return_residual = return_residual
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = -1 if activation == "sqrelu" else heuristic
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, process_group: Any = None) -> Result:
        """(..., out_features). process_group: x is this rank's part of the first dimension, as the result is."""
        out = fused_mlp_func(
            x, self.fc1.weight, self.fc2.weight, self.fc1.bias, self.fc2.bias, self.activation,
            checkpoint_lvl=self.checkpoint_lvl, process_group=process_group,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        if process_group is not None:
            out = reduce_scatter(out, process_group)
        return (out, x) if self.return_residual else out


class ParallelFusedMLP(nn.Module):
    """FusedMLP with the hidden features shared out over process_group."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: str = "gelu_approx",
        process_group: Any = None,
        bias1: bool = True,
        bias2: bool = True,
        sequence_parallel: bool = True,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if process_group is None:
            raise ValueError("process_group: got None, wanted one of torch.distributed")
        check_switches(sequence_parallel=sequence_parallel)
        _check_options(activation, checkpoint_lvl)
        hidden = hidden_features or check_int("in_features", in_features, 1) * 4
        self.activation = activation
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = -1 if activation == "sqrelu" else heuristic
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fc1 = ColumnParallelLinear(in_features, hidden, process_group, bias1, sequence_parallel, **place)
        self.fc2 = RowParallelLinear(
            hidden, out_features or in_features, process_group, bias2, sequence_parallel, **place
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., out_features)."""
        out = fused_mlp_func(
            x, self.fc1.weight, self.fc2.weight, self.fc1.bias, self.fc2.bias, self.activation,
            checkpoint_lvl=self.checkpoint_lvl, process_group=self.process_group,
            sequence_parallel=self.sequence_parallel,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return (reduce_scatter if self.sequence_parallel else all_reduce)(out, self.process_group)
