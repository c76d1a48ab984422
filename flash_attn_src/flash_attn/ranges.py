"""Attention over ranges of keys: a mask in memory that grows with the length."""

from __future__ import annotations

import torch

from flash_attn.attention.masked import attend
from flash_attn.call.block_mask import BlockMask
from flash_attn.call.calls import Options
from flash_attn.call.mask import Mask, pack_bits

__all__ = ["Mask", "flash_attn_ranges_func", "pack_bits"]


def flash_attn_ranges_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor | None = None,
    ids_q: torch.Tensor | None = None,
    ids_k: torch.Tensor | None = None,
    *,
    hidden: torch.Tensor | None = None,
    bits: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (batch, seqlen_q, heads, head_dim) and k, v (batch, seqlen_k, heads_k, head_dim), in which each
    query sees up to two ranges of keys, and keys with its id.

    ranges: int32 (1 or batch, 1 or heads, seqlen_q, 2, 2), for each query two ranges of keys as [start, end); or
    (1 or batch, 1 or heads, seqlen_q, 2), one range. A query sees the keys of both, each key once. A range whose end is
    not behind its start is empty, and keys outside of the sequence do not exist.
    ids_q, ids_k: int32 (1 or batch, seqlen_q) and (1 or batch, seqlen_k). A query sees keys with its own id: documents,
    or packed sequences, in any order. ids_k is ids_q where it is left out and the lengths agree.
    hidden: int32 (1 or batch, 1 or heads, seqlen_k, 2, 2), for each key two ranges of queries as [start, end), which do
    not see it.
    bits: int32 (1 or batch, 1 or heads, seqlen_q, ceil(seqlen_k / 32)), in the place of ranges for a mask of any form:
    bit j % 32 of word j // 32 shows key j to the query. `pack_bits` makes it of a bool for each score.
    block_mask: `flash_attn.sparse.BlockMask`, whose hidden blocks no query sees, and whose whole blocks (uint8, 2) are
    visible whatever the rest hides.
    A key is visible where all of these, causal and window_size show it. causal and window_size are aligned to the last
    query and the last key. softcap, dropout_p, alibi_slopes: as in `flash_attn_func`. s_aux: fp16, bf16 or fp32
    (heads,), a sink of each query head, with a gradient.

    fp16, bf16 or fp32, head dims up to 256, heads a multiple of heads_k, forward and backward. softmax_scale:
    1 / sqrt(head_dim) by default. A query that sees no key gets 0. Returns out like q; with return_lse also the
    logsumexp of the scaled scores and the sink, fp32 (batch, heads, seqlen_q), +inf for a query without both.

    Tiles of keys that no query of a tile sees are skipped. What the tensors of the mask hold is read on the GPU at each
    call, without a wait for it; ranges and ids take memory in proportion to the length, bits to its square.

    Under torch.autocast q, k and v are cast to its type, unless all are fp16 or all bf16. TypeError or ValueError,
    which name the argument, for shapes, types and devices that do not fit. NotImplementedError in forward mode.
    """
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask: got {type(block_mask).__name__}, wanted flash_attn.sparse.BlockMask or None")
    if ids_q is not None and ids_k is None and q.shape[1] == k.shape[1]:
        ids_k = ids_q
    if isinstance(ranges, torch.Tensor) and ranges.dim() == 4:  # the other range is empty
        ranges = torch.nn.functional.pad(ranges[..., None, :], (0, 0, 0, 1))
    mask = Mask(block_mask, ranges, ids_q, ids_k, hidden, bits)
    options = Options(softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes=alibi_slopes, s_aux=s_aux)
    return attend(q, k, v, mask, options, return_lse=return_lse)
