"""Attention over the blocks of a mask: flash_attn_block_sparse_func."""

from __future__ import annotations

import torch

from flash_attn.attention.masked import attend
from flash_attn.call.block_mask import BlockMask
from flash_attn.call.calls import Options
from flash_attn.call.mask import Mask


def flash_attn_block_sparse_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: BlockMask,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (batch, seqlen_q, heads, head_dim) and k, v (batch, seqlen_k, heads_k, head_dim) over the blocks
    that a mask shows: `flash_attn.sparse.BlockMask`, for all heads or for each.

    fp16, bf16 or fp32, head dims up to 256, heads a multiple of heads_k, forward and backward. softmax_scale:
    1 / sqrt(head_dim) by default. causal and window_size hide single keys in visible blocks, aligned to the last query
    and the last key. A query that sees no key gets 0. Returns out like q; with return_lse also the logsumexp of the
    scaled scores, fp32 (batch, heads, seqlen_q), +inf for a query without a key. `flash_attn_ranges_func` takes a block
    mask together with a soft cap, dropout, ALiBi and sinks.

    Time and memory follow the number of visible blocks. Nothing of a mask is kept: each call reads what it holds then.

    Under torch.autocast q, k and v are cast to its type, unless all are fp16 or all bf16. TypeError or ValueError,
    which name the argument, for shapes, types and devices that do not fit. NotImplementedError in forward mode.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask: got {type(block_mask).__name__}, wanted flash_attn.sparse.BlockMask: "
            "BlockMask(seen, block_size), or BlockMask.of_lists"
        )
    return attend(q, k, v, Mask(block_mask), Options(softmax_scale, causal, window_size), return_lse=return_lse)
