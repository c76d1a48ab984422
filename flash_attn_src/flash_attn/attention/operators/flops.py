"""Formulas of the custom ops for torch.utils.flop_counter, with the counts of PyTorch's math path.

A forward has two products for each pair of a query and a key, a backward four. What a kernel computes twice counts
once, masked pairs count, as in PyTorch. Head dims count as the kernels get them, which is as multiples of 8.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"
# op -> products of its kind in units of a forward's
_COSTS = {
    "_flash_attn_forward": 1, "_flash_attn_varlen_forward": 1, "_extended_forward": 1, "_fp8_forward": 1,
    "_flash_attn_with_kvcache": 1, "_int8_forward": 1, "_int8_varlen_forward": 1,
    "_flash_attn_backward": 2, "_flash_attn_varlen_backward": 2, "_extended_backward": 2,
}  # fmt: skip


def flops(arguments: dict[str, Any]) -> int:
    """Floating-point operations of a forward by the arguments of its op, by name."""
    q = arguments["q"]
    v = arguments["v_cache" if "v_cache" in arguments else "v"]
    pairs = _cache_pairs(arguments) if "k_cache" in arguments else _pairs(arguments)
    heads, head_dim = q.shape[-2:]
    count: int = 2 * heads * pairs * (head_dim + v.shape[-1])
    return count


def _lengths(starts: torch.Tensor | None, batch: int, longest: int) -> list[int]:
    """Length of each sequence. Where a trace has no values: `longest`."""
    if starts is None or starts.is_meta or type(starts).__module__.startswith("torch._subclasses"):
        return [longest] * batch
    lengths: list[int] = starts.diff().tolist()
    return lengths


def _pairs(arguments: dict[str, Any]) -> int:
    q, k = arguments["q"], arguments["k"]
    starts_q, starts_k = arguments.get("cu_seqlens_q"), arguments.get("cu_seqlens_k")
    if starts_q is None:
        pairs: int = q.shape[0] * q.shape[1] * k.shape[1]
        return pairs
    batch = starts_q.shape[0] - 1
    rows = _lengths(starts_q, batch, arguments["max_seqlen_q"])
    keys = _lengths(starts_k, batch, arguments["max_seqlen_k"])
    return sum(m * n for m, n in zip(rows, keys, strict=True))


def _cache_pairs(arguments: dict[str, Any]) -> int:
    q, cache, table, new = (arguments.get(name) for name in ("q", "k_cache", "block_table", "k"))
    assert q is not None
    assert cache is not None
    lengths, starts_q, starts_new = (
        arguments.get(name) for name in ("cache_seqlens", "cu_seqlens_q", "cu_seqlens_k_new")
    )
    batch = q.shape[0] if starts_q is None else starts_q.shape[0] - 1
    capacity = cache.shape[1] * (1 if table is None else table.shape[1])
    rows = _lengths(starts_q, batch, q.shape[1] if starts_q is None else arguments["max_seqlen_q"])
    if lengths is not None and not lengths.is_meta and not type(lengths).__module__.startswith("torch._subclasses"):
        keys = lengths.tolist()
        if new is not None:
            added = _lengths(starts_new, batch, new.shape[1] if starts_new is None else 0)
            keys = [n + more for n, more in zip(keys, added, strict=True)]
    else:
        length = arguments.get("cache_length")
        keys = [capacity if length is None else length] * batch
    return sum(m * n for m, n in zip(rows, keys, strict=True))


def _formula(op: Any, cost: int) -> Any:
    names = [argument.name for argument in op.default._schema.arguments]

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:  # noqa: ARG001
        return cost * flops(dict(zip(names, args, strict=False)) | kwargs)

    return formula


def _register(counter: Any) -> None:
    for name, cost in _COSTS.items():
        op = getattr(torch.ops.flash_attn, name, None)
        if op is None:
            continue
        if op not in counter.flop_registry:
            counter.register_flop_formula(op, get_raw=True)(_formula(op, cost))


class _WithFormulas(importlib.abc.Loader):
    """Loads PyTorch's module, then adds the formulas."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits until a program imports PyTorch's module: to import it here would import Triton too."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithFormulas(spec.loader)
        return spec


def offer() -> None:
    """Adds the formulas to torch.utils.flop_counter, now or when a program imports it."""
    counter = sys.modules.get(_COUNTER)
    if counter is not None:
        _register(counter)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
