"""DTensor: how the ops of attention are sharded, by batch entries and by heads, as PyTorch shards its own attention.

Nothing here is loaded before a call has a DTensor. Strategies exist for the ops that have every option and mutate
nothing; calls with DTensors take them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

# Axes of batch entries and of heads of each tensor: of dense calls, and of packed ones, which have no axis of entries.
_ROWS = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}
_LSE = {"softmax_lse", "softmax_d"}
# (1 or batch, 1 or heads, ...), and (1 or batch, ...).
_PLANES = {"attn_bias", "seen", "ranges", "bits", "hidden"}
_IDS = {"ids_q", "ids_k"}

# Op -> the tensors that it returns, "" for one that is not sharded.
_RESULTS = {
    "_extended_forward": ("out", "softmax_lse", ""),
    "_extended_backward": ("dq", "dk", "dv", "softmax_d", "attn_bias"),
}


def is_distributed(x: torch.Tensor) -> bool:
    """Whether x is a DTensor. If it is, the ops have strategies from now on."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(x, module.DTensor):
        return False
    _register()
    return True


def replicated(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that all ranks hold alike, as a DTensor beside the DTensor `like`; x itself beside another tensor."""
    if not is_distributed(like):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for name, results in _RESULTS.items():
        op = getattr(torch.ops.flash_attn, name).default
        register_sharding(op)(functools.partial(_strategies, op, results))


def _strategies(op: Any, results: tuple[str, ...], *values: Any) -> list[tuple[list[Any], list[Any]]]:
    """(placements of the results, placements of the arguments) on one axis of a mesh: all replicated, or sharded by
    batch entries or by heads. values: the arguments, with specifications for tensors."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    arguments = {argument.name: x for argument, x in zip(op._schema.arguments, values, strict=False)}
    tensors = {name: x for name, x in arguments.items() if hasattr(x, "placements")}
    packed = arguments.get("cu_seqlens_q") is not None
    replicated = [Replicate() for _ in results]
    strategies: list[tuple[list[Any], list[Any]]] = [
        (replicated, [Replicate() if name in tensors else None for name in arguments])
    ]
    for by_heads in (False, True):
        if by_heads and any(tensors["k"].shape[-2] % size for size in _sizes(tensors, packed)):
            continue
        axes = {name: _axis(name, x.shape, by_heads, packed) for name, x in tensors.items()}
        if axes["q"] is None:
            continue
        placed: dict[str, Any] = {name: Replicate() if axis is None else Shard(axis) for name, axis in axes.items()}
        of_results = []
        for name in results:
            axis = _axis(name, tensors["attn_bias"].shape if name in tensors else (0,) * 4, by_heads, packed)
            shared = name == "attn_bias" and name in tensors and axis is None
            of_results.append(Partial() if shared else Replicate() if axis is None else Shard(axis))
        strategies.append((of_results, [placed.get(name) for name in arguments]))
    return strategies


def _sizes(tensors: dict[str, Any], packed: bool) -> list[int]:
    """Ranks among which heads may be divided: the axes of the mesh, and the product of those that divide heads now."""
    spec, product = tensors["q"], 1
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        product *= size if placement.is_shard(1 if packed else 2) else 1
    return [*spec.mesh.shape, product]


def _axis(name: str, shape: tuple[int, ...], by_heads: bool, packed: bool) -> int | None:
    """The axis of a tensor that is sharded; None where all ranks hold all of it."""
    if name in _ROWS:
        return (1 if by_heads else None) if packed else 2 if by_heads else 0
    if name in _LSE:
        return (0 if by_heads else None) if packed else int(by_heads)
    if name == "s_aux":
        return 0 if by_heads else None
    if name == "alibi_slopes":
        return len(shape) - 1 if by_heads else 0 if len(shape) == 2 else None
    if name in _PLANES:
        return int(by_heads) if shape[int(by_heads)] != 1 else None
    if name in _IDS:
        return None if by_heads or shape[0] == 1 else 0
    return None
