"""PyTorch's causal_lower_right as the causal mask of these kernels, which ends in the last query and the last key.

PyTorch's class of causal biases chooses between operators of its own before the dispatcher sees the call, so the class
is asked. Its module loads torch._dynamo, which takes seconds: it is changed when the program imports it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.compiler import is_compiling

_MODULE = "torch.nn.attention.bias"


def serve(attend: Callable[..., torch.Tensor | None]) -> None:
    """Asks `attend` first, now or from the import of PyTorch's module on: for calls with causal_lower_right and fewer
    queries than keys, outside of compiled functions. It gets query, key, value, dropout_p, scale and enable_gqa, and
    returns None for what PyTorch computes."""
    if _MODULE in sys.modules:
        _change(attend, sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder(attend))


class _Finder(MetaPathFinder):
    """Finds the module once, and changes it after it was loaded."""

    def __init__(self, attend: Callable[..., torch.Tensor | None]) -> None:
        self._attend = attend

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load, attend = spec.loader.exec_module, self._attend

            def load_and_change(module: ModuleType) -> None:
                load(module)
                _change(attend, module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _change(attend: Callable[..., torch.Tensor | None], module: Any) -> None:
    pytorch = module.CausalBias._dispatch

    @functools.wraps(pytorch)
    def dispatch(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        rows, keys = attn_mask.seq_len_q, attn_mask.seq_len_kv
        is_lower = attn_mask.variant == module.CausalVariant.LOWER_RIGHT
        if is_lower and rows < keys and not is_causal and not is_compiling():
            is_whole = query.dim() == 4 and (query.shape[-2], key.shape[-2]) == (rows, keys)
            out = attend(query, key, value, dropout_p, scale, enable_gqa) if is_whole else None
            if out is not None:
                return out
        return pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    module.CausalBias._dispatch = staticmethod(dispatch)
