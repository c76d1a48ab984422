"""FlashMask's function and masks (Wang et al., arXiv 2410.01359) with torch's tensors, on the kernels of
`flash_attn.ranges`.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.call.block_mask import BlockMask
from flash_attn.ranges import flash_attn_ranges_func

_BLOCK = (128, 128)
# Whether there is a causal mask -> how many bounds a key may have.
_BOUNDS = {True: (1, 2), False: (2, 4)}
_UNSERVED: dict[str, Any] = {"return_seed_offset": False, "fixed_seed_offset": None, "rng_name": "", "name": None}


def flashmask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    startend_row_indices: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    return_softmax_lse: bool = False,
    training: bool = True,
    softmax_scale: float | None = None,
    block_mask: torch.Tensor | None = None,
    **unserved: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of query (batch, seqlen_q, heads, head_dim) and key, value (batch, seqlen_k, heads_k, head_dim), in
    which each key is hidden from ranges of queries.

    startend_row_indices: int32 (batch, 1 or heads or heads_k, seqlen_k, bounds). With causal one bound hides the
    queries from it on, and two hide the queries from the first to before the second. Without causal two bounds hide the
    queries from the first on and before the second; four hide two ranges. None: nothing is hidden.
    window_size: keys to the left and right of a query, an int for both; only without startend_row_indices.
    block_mask: int32 (batch, 1 or heads or heads_k, q_blocks, k_blocks), blocks of 128 x 128 that are visible where it
    is not 0. dropout: the probability of dropping a weight; none without training.

    Returns out, with return_softmax_lse also the logsumexp of `flash_attn_ranges_func`, which has the other limits.
    NotImplementedError for other arguments of FlashMask. TypeError or
    ValueError for shapes, types and devices that do not fit.
    """
    for name, argument in unserved.items():
        if name not in _UNSERVED:
            raise TypeError(f"flashmask_attention() got an unexpected keyword argument {name!r}")
        if argument != _UNSERVED[name]:
            raise NotImplementedError(f"{name}: got {argument!r}, wanted {_UNSERVED[name]!r}: leave it out")
    if type(training) is not bool:
        raise TypeError(f"training: got {training!r}, wanted True or False")
    if window_size is not None and startend_row_indices is not None:
        raise ValueError("window_size: got a window beside startend_row_indices, wanted None for one of them")
    left, right = (window_size, window_size) if isinstance(window_size, int) else window_size or (-1, -1)
    hidden = None
    if startend_row_indices is not None:
        hidden = _hidden(_of_query_heads("startend_row_indices", startend_row_indices, query, key), causal)
    blocks = None
    if block_mask is not None:
        blocks = BlockMask(_of_query_heads("block_mask", block_mask, query, key) != 0, _BLOCK)
    return flash_attn_ranges_func(
        query, key, value, hidden=hidden, block_mask=blocks, softmax_scale=softmax_scale, causal=causal,
        window_size=(left, right), dropout_p=dropout if training else 0.0, return_lse=return_softmax_lse,
    )  # fmt: skip


def _of_query_heads(name: str, x: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """x with one head, or with as many as query has."""
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.int32:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {got}, wanted an int32 tensor")
    heads, heads_k = query.shape[2], key.shape[2]
    if x.dim() != 4 or x.shape[1] not in (1, heads, heads_k):
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, wanted 4 dimensions, of which the second is 1, {heads} or {heads_k}"
        )
    return x.repeat_interleave(heads // heads_k, 1) if x.shape[1] not in (1, heads) else x


def _hidden(bounds: torch.Tensor, causal: bool) -> torch.Tensor:
    """The two ranges of hidden queries of each key (batch, heads, seqlen_k, 2, 2)."""
    count = bounds.shape[-1]
    if count not in _BOUNDS[bool(causal)]:
        counts = " or ".join(map(str, _BOUNDS[bool(causal)]))
        raise ValueError(
            f"startend_row_indices: got shape {tuple(bounds.shape)}, wanted {counts} bounds in its last dimension with "
            f"causal={causal}"
        )
    first, last = torch.zeros_like(bounds[..., :1]), torch.full_like(bounds[..., :1], torch.iinfo(torch.int32).max)
    pairs = {
        (True, 1): (bounds, last, first, first),
        (True, 2): (bounds, first, first),
        (False, 2): (bounds[..., :1], last, first, bounds[..., 1:]),
        (False, 4): (bounds,),
    }
    return torch.cat(pairs[bool(causal), count], -1).unflatten(-1, (2, 2))
