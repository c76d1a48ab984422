"""The two layers between attention and attention: plain, and gated.

device, dtype: of the parameters. FusedMLP and ParallelFusedMLP are None, as upstream's are where its extension
fused_dense_lib is not installed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from flash_attn.ops.activations import swiglu
from flash_attn.ops.checks import check_int, check_switches

Activation = Callable[[torch.Tensor], torch.Tensor]

FusedMLP = None
ParallelFusedMLP = None


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
        """hidden_features, made a multiple of multiple_of: default 8 / 3 * in_features. out_features: in_features."""
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
