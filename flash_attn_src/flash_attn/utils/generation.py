"""What generation keeps between its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class InferenceParams:
    """Where a step of generation stands, and the caches of the layers: what flash_attn.modules.mha.MHA reads.

    max_seqlen, max_batch_size  sizes of the caches, which MHA makes where a layer has none
    seqlen_offset               tokens that the caches hold already
    batch_size_offset           the sequence that the first of a batch is
    key_value_memory_dict       layer_idx -> cache (max_batch_size, max_seqlen, 2, heads_k, head_dim)
    lengths_per_sample          int32 (max_batch_size,): tokens of each sequence, where they differ
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, torch.Tensor] = field(default_factory=dict)
    lengths_per_sample: torch.Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """The start of other sequences; the caches stay."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()
