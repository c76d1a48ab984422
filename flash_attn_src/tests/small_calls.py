"""Small arguments for tests of the public functions, and how to compile them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def qkv(dtype: torch.dtype = torch.float32, dim: int = 16) -> tuple[torch.Tensor, ...]:
    """q (2, 6, 4, dim), k and v (2, 9, 2, dim)."""
    torch.manual_seed(0)
    return tuple(torch.randn(2, n, h, dim, dtype=dtype) for n, h in ((6, 4), (9, 2), (9, 2)))


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def in_one_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


class Late(torch.Tensor):
    """A tensor whose memory only torch's operations can access, as if another rank were still sending it."""

    def __new__(cls, value: torch.Tensor) -> Late:
        return cls._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda late: late.value, (args, kwargs or {}))
        return func(*args, **kwargs)
