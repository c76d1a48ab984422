"""`flash_attn.bert_padding` with the four results of `unpad_input` that flash_attn had before 2.7."""

from __future__ import annotations

import torch
from flash_attn import bert_padding
from flash_attn.bert_padding import index_first_axis, pad_input

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """(rows of the tokens, their indices, cu_seqlens, longest sequence) of padded sequences."""
    packed, indices, cu_seqlens, longest = bert_padding.unpad_input(hidden_states, attention_mask)[:4]
    return packed, indices, cu_seqlens, longest
