"""Moving between padded batches and sequences laid end to end. Every function here is differentiable."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flash_attn.api import BEFORE_2_7


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of x (n, ...) at indices (m,), int32 or int64: (m, ...)."""
    return x.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """(first_axis_dim, ...) zeros with values (m, ...) at indices (m,), int32 or int64, which are distinct."""
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(x: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of x at indices, x itself for a residual connection)."""
    return index_first_axis(x, indices), x.detach()


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of hidden_states (batch, seqlen, ...) that the masks select, end to end.

    attention_mask (batch, seqlen), bool or int: 1 for tokens that count. unused_mask, alike: 1 for tokens
    that are kept in place but do not count.

    Returns (tokens (total, ...); indices (total,) into batch * seqlen, int64; cu_seqlens (batch + 1,) int32;
    the longest sequence, an int (on a GPU it synchronises); tokens that count per sequence, (batch,) int32).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    counted = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, counted


if BEFORE_2_7:
    _unpad_input = unpad_input

    def unpad_input(  # type: ignore[misc,no-redef]
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
    lengths = attention_mask_in_length.sum(-1)
    seqlen = attention_mask_in_length.shape[-1]
    kept = torch.arange(seqlen, device=lengths.device) < lengths[:, None]
    indices = kept.flatten().nonzero().flatten()
    sequences = attention_mask_in_length.flatten()
    sequences = sequences[sequences.nonzero().flatten()]
    longest = int(sequences.max()) if sequences.numel() else 0
    cu_seqlens = pad(sequences.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of unpad_input: (total, ...) at indices of a zero (batch, seqlen, ...)."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
