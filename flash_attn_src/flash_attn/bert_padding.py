"""Moving between padded batches and sequences laid end to end. Every function here is differentiable.

Wrong arguments raise TypeError, ValueError or, for an index outside of its tensor, IndexError naming the argument, what
came and what was wanted. On a GPU indices are not known on the host: torch asserts them there.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn.functional import pad

from flash_attn.call.arguments import as_int
from flash_attn.call.tracing import is_traced
from flash_attn.core.api import BEFORE_2_7
from flash_attn.ops.checks import check_int, check_tensor

_INTS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_MASKS = (torch.bool, *_INTS, torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Names of einops that clients import from here: verl and OpenRLHF.
_EINOPS = ("rearrange", "repeat")


def __getattr__(name: str) -> Any:
    """Loads einops' rearrange and repeat on first access, because this module itself does not need einops."""
    if name not in _EINOPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("einops"), name)


def _check_indices(indices: torch.Tensor, x: torch.Tensor, rows: int, shape: tuple[int, ...] | None = None) -> None:
    """Checks that the indices are below `rows` and on the device of x."""
    check_tensor("indices", indices, ("indices",), like=x, shape=shape, dtypes=(torch.int32, torch.int64))
    if indices.is_cpu and not is_traced(indices) and indices.numel():
        low, high = (int(edge) for edge in indices.aminmax())
        if low < 0 or high >= rows:
            raise IndexError(f"indices: got {low} to {high}, wanted 0 to {rows - 1}")


def _check_padded(x: torch.Tensor) -> None:
    """x is (batch, seqlen, ...), of any dtype."""
    check_tensor("hidden_states", x, dtypes=())
    if x.dim() < 2:
        raise ValueError(f"hidden_states: got shape {tuple(x.shape)}, wanted (batch, seqlen, ...)")


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of x (n, ...) at indices (m,), int32 or int64: (m, ...)."""
    check_tensor("x", x, dtypes=())
    if x.dim() == 0:
        raise ValueError("x: got shape (), wanted (n, ...)")
    _check_indices(indices, x, x.shape[0])
    return x.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """(first_axis_dim, ...) zeros with values (m, ...) at indices (m,), int32 or int64, which are distinct."""
    return _put("values", values, indices, check_int("first_axis_dim", first_axis_dim, 0))


def _put(name: str, values: torch.Tensor, indices: torch.Tensor, rows: int) -> torch.Tensor:
    check_tensor(name, values, dtypes=())
    if values.dim() == 0:
        raise ValueError(f"{name}: got shape (), wanted (m, ...)")
    _check_indices(indices, values, rows, (values.shape[0],))
    zeros = values.new_zeros((rows, *values.shape[1:]))
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(x: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of x at indices, x itself for a residual connection)."""
    return index_first_axis(x, indices), x.view_as(x)


class IndexFirstAxis:
    """The name that clients know: `apply` is index_first_axis."""

    apply = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    """The name that clients know: `apply` is index_put_first_axis."""

    apply = staticmethod(index_put_first_axis)


class IndexFirstAxisResidual:
    """The name that clients know: `apply` is index_first_axis_residual."""

    apply = staticmethod(index_first_axis_residual)


def _largest(lengths: torch.Tensor) -> int:
    """The maximum length (0 if empty). No int(), because it would break tracing with a symbolic length."""
    return pad(lengths, (0, 1)).max().item()  # type: ignore[return-value]


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of hidden_states (batch, seqlen, ...) that the masks select, end to end.

    attention_mask (batch, seqlen): 1 for tokens that count, else 0. unused_mask, alike: 1 for tokens that are
    kept in place but do not count.

    Returns (tokens (total, ...); indices (total,) into batch * seqlen, int64; cu_seqlens (batch + 1,) int32;
    the longest sequence, an int (on a GPU it synchronises); tokens that count per sequence, (batch,) int32).
    """
    _check_padded(hidden_states)
    masks = {"attention_mask": attention_mask}
    if unused_mask is not None:
        masks["unused_mask"] = unused_mask
    for name, mask in masks.items():
        check_tensor(name, mask, like=hidden_states, shape=tuple(hidden_states.shape[:2]), dtypes=_MASKS)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    counted = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    if is_traced(lengths) or not lengths.numel():
        longest = _largest(lengths)
    else:
        longest, total = torch.stack((lengths.max(), cu_seqlens[-1])).tolist()
        if total != indices.numel():
            raise ValueError(
                f"{', '.join(masks)}: got values other than 0 and 1, or a token in both, wanted 1 where one is kept"
            )
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, counted


if BEFORE_2_7:
    _unpad_input = unpad_input

    def unpad_input(  # type: ignore[misc]
        hidden_states: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """The tokens of hidden_states (batch, seqlen, ...) where attention_mask (batch, seqlen) is 1, end to end.

        Returns (tokens (total, ...); indices (total,) into batch * seqlen, int64; cu_seqlens (batch + 1,) int32;
        the longest sequence, an int).
        """
        return _unpad_input(hidden_states, attention_mask)[:4]


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """The tokens of rows that each hold several sequences, one after the other.

    attention_mask_in_length (batch, seqlen), int: the lengths of a row's sequences, then zeros. Returns what
    unpad_input does, less the last: cu_seqlens counts every sequence.
    """
    _check_padded(hidden_states)
    shape = tuple(hidden_states.shape[:2])
    check_tensor("attention_mask_in_length", attention_mask_in_length, like=hidden_states, shape=shape, dtypes=_INTS)
    lengths = attention_mask_in_length.sum(-1)
    seqlen = attention_mask_in_length.shape[-1]
    kept = torch.arange(seqlen, device=lengths.device) < lengths[:, None]
    indices = kept.flatten().nonzero().flatten()
    sequences = attention_mask_in_length.flatten()
    sequences = sequences[sequences.nonzero().flatten()]
    if is_traced(lengths) or not sequences.numel():
        longest = _largest(sequences)
    else:
        longest, least, most = torch.stack((sequences.max().long(), sequences.min().long(), lengths.max())).tolist()
        if least < 0 or most > seqlen:
            raise ValueError(f"attention_mask_in_length: got lengths from {least} and a row of {most} tokens, wanted "
                             f"positive ones, up to {seqlen} tokens a row")  # fmt: skip
    cu_seqlens = pad(sequences.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of unpad_input: (total, ...) at indices of a zero (batch, seqlen, ...)."""
    batch, seqlen = check_int("batch", as_int("batch", batch), 0), check_int("seqlen", as_int("seqlen", seqlen), 0)
    return _put("hidden_states", hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
