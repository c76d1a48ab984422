"""What the options of a call do to its scores, in plain PyTorch: each formula with its derivative beside it.

The path for a CPU takes them tile by tile, second derivatives take them for all scores at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from flash_attn.call.mask import Mask
from flash_attn.call.options import FIELDS, Options, replace
from flash_attn.kernels.flags import WHOLE_BLOCK as WHOLE

# Of the scores of some queries and keys, in a shape that broadcasts to them: whether the parts of a mask show them, and
# whether a block shows them whatever else hides them.
Seen = tuple[torch.Tensor, torch.Tensor]


def modified(
    scores: torch.Tensor, options: Options, places: torch.Tensor, keys: torch.Tensor, seen: Seen | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scores after the options of a call, -inf where hidden; their derivative by the scores before, None for 1).

    scores (batch, heads_k, group, rows, keys): the scaled products. options: tensors as `by_group` gives them, cut to
    these rows and keys. places (rows, 1): the key on the diagonal of each row; keys (keys,): their numbers. seen: what
    `seen_by` gives of the call's mask.
    """
    derivative = None
    if options.softcap > 0.0:
        tanh = torch.tanh(scores / options.softcap)
        scores, derivative = tanh * options.softcap, 1.0 - tanh * tanh
    if options.attn_bias is not None:
        scores = scores + options.attn_bias.to(scores.dtype)
    if options.alibi_slopes is not None:
        scores = scores - options.alibi_slopes.to(scores.dtype) * (keys - places).abs()
    hidden = hidden_by(options, places, keys, seen)
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf), derivative


def hidden_by(
    options: Options, places: torch.Tensor, keys: torch.Tensor, seen: Seen | None = None
) -> torch.Tensor | None:
    """The scores that a call hides, bool in a shape that broadcasts to them; None where it hides none."""
    distance = keys - places
    left, right = window_of(options)
    parts = []
    if right >= 0:
        parts.append(distance > right)
    if left >= 0:
        parts.append(distance < -left)
    if options.attention_chunk > 0:
        parts.append(keys // options.attention_chunk != places // options.attention_chunk)
    hidden = reduce(torch.logical_or, parts) if parts else None
    if seen is None:
        return hidden
    shown, whole = seen
    return ~(whole | (shown if hidden is None else shown & ~hidden))


def seen_by(mask: Mask, rows: slice, keys: slice, heads_k: int) -> Seen:
    """Which of some keys a mask shows to some queries."""
    cols = torch.arange(keys.start, keys.stop, device=mask.device)
    lines = torch.arange(rows.start, rows.stop, device=mask.device)[:, None]
    shown = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=mask.device)
    whole = ~shown
    if mask.blocks is not None:
        block_q, block_k = mask.blocks.block_size
        of_scores = mask.blocks.seen[:, :, lines // block_q, cols // block_k]
        shown, whole = of_scores != 0, of_scores == WHOLE
    if mask.ranges is not None:
        ranges = mask.ranges[:, :, rows, :, :, None]  # [batch, heads, rows, 2, 2, 1]
        shown = shown & ((cols >= ranges[..., 0, :]) & (cols < ranges[..., 1, :])).any(3)
    if mask.bits is not None:
        shown = shown & ((mask.bits[:, :, rows, cols // 32] >> (cols % 32)) & 1 != 0)
    if mask.hidden is not None:
        ranges = mask.hidden[:, :, None, keys]  # [batch, heads, 1, keys, 2, 2]
        shown = shown & ~((lines[..., None] >= ranges[..., 0]) & (lines[..., None] < ranges[..., 1])).any(-1)
    if mask.ids_q is not None and mask.ids_k is not None:
        shown = shown & (mask.ids_q[:, None, rows, None] == mask.ids_k[:, None, None, keys])
    return grouped(shown, heads_k), grouped(whole, heads_k)


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

    options = _each(options, part)
    return options if options.mask is None else replace(options, mask=options.mask.of_entries(some))


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
