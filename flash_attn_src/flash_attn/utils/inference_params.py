"""What generation keeps between its steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from flash_attn.ops.checks import FLOATS, check_int


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


def allocate_inference_cache(
    max_batch_size: int,
    max_seqlen: int,
    nheads: int,
    headdim: int,
    layers: int | Iterable[int],
    device: torch.device | str | None,
    dtype: torch.dtype = torch.float16,
) -> dict[int, torch.Tensor]:
    """layer -> an empty cache (max_batch_size, max_seqlen, 2, nheads, headdim), of so many layers or of these."""
    sizes = {"max_batch_size": max_batch_size, "max_seqlen": max_seqlen, "nheads": nheads, "headdim": headdim}
    shape = [check_int(name, size, 0) for name, size in sizes.items()]
    shape.insert(2, 2)
    if dtype not in FLOATS:
        raise TypeError(f"dtype: got {dtype}, wanted float16, bfloat16 or float32")
    numbers = range(check_int("layers", layers, 0)) if isinstance(layers, int) else layers
    return {layer: torch.empty(shape, device=device, dtype=dtype) for layer in numbers}
