"""Tests that name a GPU, run on the CPU: see upstream.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

# What upstream's tests ask of a GPU: its capability, by which they choose cases, and its memory.
_CAPABILITY = (9, 0)
_PROPERTIES = SimpleNamespace(total_memory=80 * 2**30, multi_processor_count=132, major=9, minor=0)


def _moved(value: Any) -> Any:
    """Replaces a GPU device, or text that names a GPU, by the CPU."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {name: _moved(value) for name, value in (kwargs or {}).items()}
        return func(*map(_moved, args), **given)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Makes torch's functions create tensors on the CPU if a GPU is requested."""
    torch.set_num_threads(1)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=_CAPABILITY),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=_PROPERTIES),
        mock.patch.object(torch.cuda, "synchronize"),
        _OnCpu(),
    ):
        yield
