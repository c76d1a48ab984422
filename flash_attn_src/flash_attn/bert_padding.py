"""Moving between padded batches and sequences laid end to end. Every function here is differentiable."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of x (n, ...) at indices (m,): (m, ...)."""
    return x.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """(first_axis_dim, ...) zeros with values (m, ...) at indices (m,), which are distinct."""
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices, values)


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


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of unpad_input: (total, ...) at indices of a zero (batch, seqlen, ...)."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
