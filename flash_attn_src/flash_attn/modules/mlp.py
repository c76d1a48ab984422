"""The two layers between attention and attention: plain, and gated; and shared out over a tensor-parallel group.

device, dtype: of the parameters. process_group, sequence_parallel: flash_attn.ops.fused_dense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from flash_attn.ops.activations import swiglu
from flash_attn.ops.checks import check_int, check_switches
from flash_attn.ops.fused_dense import ColumnParallelLinear, FusedMLP, ParallelFusedMLP, RowParallelLinear

__all__ = ["FusedMLP", "GatedMlp", "Mlp", "ParallelFusedMLP", "ParallelGatedMlp", "ParallelMLP"]

Activation = Callable[[torch.Tensor], torch.Tensor]


class Mlp(nn.Module):
    """fc2(activation(fc1(x))) of x (..., in_features)."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = functional.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """hidden_features: default 4 * in_features. out_features: default in_features."""
        super().__init__()
        check_switches(bias1=bias1, bias2=bias2, return_residual=return_residual)
        hidden = check_int("in_features", in_features, 1) * 4 if hidden_features is None else hidden_features
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        out_features = in_features if out_features is None else out_features
        self.fc2 = nn.Linear(hidden, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(..., out_features); with return_residual, x too."""
        y = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class GatedMlp(nn.Module):
    """fc2(y * activation(gate)) of x (..., in_features), fc1(x) being y and gate end to end."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = functional.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """hidden_features (default 8 / 3 * in_features) is rounded up to a multiple of multiple_of.

        out_features: default in_features.
        """
        super().__init__()
        check_switches(bias1=bias1, bias2=bias2, return_residual=return_residual)
        hidden = check_int("in_features", in_features, 1) * 8 // 3 if hidden_features is None else hidden_features
        hidden = -(-hidden // check_int("multiple_of", multiple_of, 1)) * multiple_of
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        out_features = in_features if out_features is None else out_features
        self.fc2 = nn.Linear(hidden, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(..., out_features); with return_residual, x too."""
        y, gate = self.fc1(x).chunk(2, -1)
        y = swiglu(gate, y) if self.activation is functional.silu else y * self.activation(gate)
        y = self.fc2(y)
        return (y, x) if self.return_residual else y


class ParallelMLP(nn.Module):
    """Mlp with the hidden features shared out over process_group."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = functional.gelu,
        process_group: Any = None,
        sequence_parallel: bool = True,
        bias1: bool = True,
        bias2: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """hidden_features: default 4 * in_features. out_features: default in_features."""
        super().__init__()
        hidden = check_int("in_features", in_features, 1) * 4 if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fc1 = ColumnParallelLinear(in_features, hidden, process_group, bias1, sequence_parallel, **place)
        self.activation = activation
        self.fc2 = RowParallelLinear(hidden, out_features, process_group, bias2, sequence_parallel, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., out_features)."""
        y: torch.Tensor = self.fc2(self.activation(self.fc1(x)))
        return y


class ParallelGatedMlp(nn.Module):
    """GatedMlp with the hidden features shared out over process_group: each rank has its y and its gate."""

    def __init__(
        self,
        in_features: int,
        process_group: Any,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = functional.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """hidden_features (default 8 / 3 * in_features) is rounded up to a multiple of multiple_of.

        out_features: default in_features.
        """
        super().__init__()
        hidden = check_int("in_features", in_features, 1) * 8 // 3 if hidden_features is None else hidden_features
        hidden = -(-hidden // check_int("multiple_of", multiple_of, 1)) * multiple_of
        out_features = in_features if out_features is None else out_features
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        # As even as pairs of a column of y and one of the gate go.
        self.fc1 = ColumnParallelLinear(
            in_features, 2 * hidden, process_group, bias1, sequence_parallel, multiple_of=2, **place
        )
        self.activation = activation
        self.fc2 = RowParallelLinear(hidden, out_features, process_group, bias2, sequence_parallel, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., out_features)."""
        y, gate = self.fc1(x).chunk(2, -1)
        y = swiglu(gate, y) if self.activation is functional.silu else y * self.activation(gate)
        y = self.fc2(y)
        return y
