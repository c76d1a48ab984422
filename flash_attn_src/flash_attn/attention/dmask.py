"""S_dmask as upstream scales it: block of keys by block of keys, as its kernel comes across them from the last one on.

Upstream's tests undo that scale: the probability is |S_dmask| * exp(m - softmax_lse), m being the largest score of the
row in this block and all that follow. The blocks are those of `_get_block_size_n`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

# (largest head dim, keys of a block without dropout, with dropout), as in upstream's kernel for its largest GPUs.
_BLOCKS = ((32, 128, 128), (64, 128, 64), (96, 64, 64), (128, 64, 32), (512, 64, 64))


def _get_block_size_n(
    device: torch.device | str,  # noqa: ARG001
    head_dim: int,
    is_dropout: bool,
    is_causal: bool,  # noqa: ARG001
) -> int:
    """How many keys of S_dmask have one scale. The same for every device. ValueError beyond head_dim 512."""
    for largest, without, with_dropout in _BLOCKS:
        if head_dim <= largest:
            return with_dropout if is_dropout else without
    raise ValueError(f"head_dim: got {head_dim}, wanted 1 to {_BLOCKS[-1][0]}")


def scaled(probabilities: torch.Tensor, head_dim: int) -> torch.Tensor:
    """S_dmask of signed probabilities (..., seqlen_k), whose sign stays; 0 where a row has none from the block on."""
    block = _get_block_size_n(probabilities.device, head_dim, True, False)
    seqlen_k = probabilities.shape[-1]
    exact = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
    blocks = pad(exact.abs(), (0, -seqlen_k % block)).unflatten(-1, (-1, block))
    largest = blocks.amax(-1).flip(-1).cummax(-1).values.flip(-1).repeat_interleave(block, -1)[..., :seqlen_k]
    return torch.where(largest > 0, exact / largest, 0.0).to(probabilities.dtype)
