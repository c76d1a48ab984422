"""What the options of a call do to its scores, in plain PyTorch: each formula with its derivative beside it.

The path for a CPU takes them tile by tile, second derivatives take them for all scores at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flash_attn.options import FIELDS, Options, replace


def modified(
    scores: torch.Tensor, options: Options, places: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scores after the options of a call, -inf where hidden; their derivative by the scores before, None for 1).

    scores (batch, heads_k, group, rows, keys): the scaled products. options: tensors as `by_group` gives them, cut to
    these rows and keys. places (rows, 1): the key on the diagonal of each row; keys (keys,): their numbers.
    """
    derivative = None
    if options.softcap > 0.0:
        tanh = torch.tanh(scores / options.softcap)
        scores, derivative = tanh * options.softcap, 1.0 - tanh * tanh
    if options.attn_bias is not None:
        scores = scores + options.attn_bias.to(scores.dtype)
    distance = keys - places
    if options.alibi_slopes is not None:
        scores = scores - options.alibi_slopes.to(scores.dtype) * distance.abs()
    return _masked(scores, options, distance, places, keys), derivative


def _masked(
    scores: torch.Tensor, options: Options, distance: torch.Tensor, places: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    left, right = window_of(options)
    if right >= 0:
        scores = scores.masked_fill(distance > right, -torch.inf)
    if left >= 0:
        scores = scores.masked_fill(distance < -left, -torch.inf)
    if options.attention_chunk > 0:
        chunk = options.attention_chunk
        scores = scores.masked_fill(keys // chunk != places // chunk, -torch.inf)
    return scores


def window_of(options: Options) -> tuple[int, int]:
    """(left, right), -1 where open. Causal ends the window at the query itself."""
    left, right = options.window_size
    return left, 0 if options.causal else right


# The axes of an option -> the index that makes the tensor as wide as scores, (batch, heads, seqlen_q, seqlen_k).
_PLANES: dict[str, tuple[Any, ...]] = {
    "heads": (None, ..., None, None), "batch heads": (..., None, None), "scores": (...,),
}  # fmt: skip


def _each(options: Options, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Options:
    """A copy of the options in which change(axes, tensor) replaces each tensor that has an axis of heads. Raises
    NotImplementedError for a tensor with other axes than those of `_PLANES`."""
    axes = FIELDS[type(options)].axes
    tensors = {name: getattr(options, name) for name in axes}
    for name, x in tensors.items():
        if x is not None and axes[name] not in _PLANES:
            raise NotImplementedError(
                f"{name}: PyTorch's operations have no place for axes {axes[name]!r}: leave it out"
            )
    return replace(options, **{name: change(axes[name], x) for name, x in tensors.items() if x is not None})


def by_head(options: Options, batch: int, heads: int) -> Options:
    """The options with a batch axis: tensors of "batch heads" are (batch, heads), also where a call has (heads,)."""
    return _each(options, lambda axes, x: x.expand(batch, heads) if axes == "batch heads" else x)


def of_sequences(options: Options, some: slice) -> Options:
    """The part of `by_head` that belongs to some entries of the batch."""

    def part(axes: str, x: torch.Tensor) -> torch.Tensor:
        shared = axes == "heads" or (axes == "scores" and x.shape[0] == 1)
        return x if shared else x[some]

    return _each(options, part)


def by_group(options: Options, heads_k: int) -> Options:
    """The part of `of_sequences` in the layout of scores: each tensor (1 or batch, 1 or heads_k, 1 or group, ...)."""

    def view(axes: str, x: torch.Tensor) -> torch.Tensor:
        return grouped(x[_PLANES[axes]], heads_k)

    return _each(options, view)


def grouped(x: torch.Tensor, heads_k: int) -> torch.Tensor:
    """(batch, 1 or heads, ...) as a view (batch, 1 or heads_k, 1 or group, ...)."""
    return x[:, :, None] if x.shape[1] == 1 else x.unflatten(1, (heads_k, x.shape[1] // heads_k))


def of_tile(options: Options, rows: slice, keys: slice, seqlen_q: int) -> Options:
    """The part of `by_group` that belongs to some rows and keys. A table of distances becomes a bias of each score."""

    def part(axes: str, x: torch.Tensor) -> torch.Tensor:
        if axes != "scores":
            return x
        return x[..., rows, keys] if x.dim() == 5 else x[..., _distances(rows, keys, seqlen_q, x.device)]

    return _each(options, part)


def _distances(rows: slice, keys: slice, seqlen_q: int, device: torch.device) -> torch.Tensor:
    """The entries of a table of distances that a tile of scores reads, (rows, keys)."""
    first_row = torch.arange(keys.start, keys.stop, device=device)
    return first_row - torch.arange(rows.start, rows.stop, device=device)[:, None] + (seqlen_q - 1)


def add_to_bias(dbias: torch.Tensor, dscores: torch.Tensor, rows: slice, keys: slice, seqlen_q: int) -> None:
    """Adds the gradients of a tile of scores (batch, heads_k, group, rows, keys) to those of a bias by `grouped`."""
    planes = [1 if mine == 1 else size for mine, size in zip(dbias.shape[:3], dscores.shape, strict=False)]
    dscores = dscores.sum_to_size((*planes, *dscores.shape[-2:]))
    if dbias.dim() == 5:
        dbias[..., rows, keys] += dscores
    else:
        places = _distances(rows, keys, seqlen_q, dbias.device)
        dbias.index_add_(-1, places.flatten(), dscores.flatten(-2))
