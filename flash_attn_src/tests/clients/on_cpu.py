"""Makes the CPU count as a GPU: whatever is asked for on the device "cuda" is made on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def on_cpu(value: Any) -> Any:
    """The device CPU for a device of CUDA, or for its name. Every other value as it is."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if value.partition(":")[0] == "cuda" else value
    return value


class Cpu(TorchFunctionMode):
    """While it is entered, functions of torch take "cuda" as "cpu", and Tensor.cuda returns the tensor."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(on_cpu, args), **{name: on_cpu(value) for name, value in (kwargs or {}).items()})
