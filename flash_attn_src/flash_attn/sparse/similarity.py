"""The choice of blocks from their means and their similarity, as SpargeAttn makes it."""

from __future__ import annotations

import math

import torch

from flash_attn.call.arguments import check_dense
from flash_attn.call.arguments.diagnosis import check_strided, diagnose_switches
from flash_attn.call.block_mask import BlockMask
from flash_attn.call.calls import AttentionCall, Options

BLOCK_SIZE = (128, 64)  # SpargeAttn's blocks of queries and keys, except on sm90


@torch.no_grad()
def choose_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    simthreshd1: float | torch.Tensor,
    cdfthreshd: float | torch.Tensor | None = None,
    topk: float | torch.Tensor | None = None,
    causal: bool = False,
    smooth_k: bool = True,
    attention_sink: bool = False,
    block_size: tuple[int, int] = BLOCK_SIZE,
) -> BlockMask:
    """The blocks of keys that matter most for a block of queries: SpargeAttn (Zhang et al., arXiv 2502.18137).

    q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, heads_k, head_dim): fp16, bf16 or fp32. Returns a mask
    (batch, heads, q_blocks, k_blocks). For queries q_i and keys k_j, with the mean key subtracted if smooth_k:

        mean(B)       = sum of x in B / |B|
        similarity(B) = sum over x, y in B of cos(x, y) / |B|^2
        P             = softmax over blocks J of mean(I) . mean(J) / sqrt(head_dim), -inf where J is not similar

    A block is similar if its similarity is above simthreshd1. A row of P takes its largest entries: as many as have a
    cumulative sum of at most cdfthreshd, or topk * k_blocks rounded down, but at least one. A block of queries or of
    keys that is not similar is visible as a whole. A block with a zero row, and a last block that is shorter, count as
    not similar: SpargeAttn's kernel divides 0 by 0 there. attention_sink shows the first block of keys to all queries.

    causal hides the blocks that lie after the last query of a block, and wants as many queries as keys. Pass it to
    flash_attn_block_sparse_func too, which hides the single keys inside the diagonal blocks.

    Thresholds are numbers, or tensors with an entry for each head. Sums are in fp32; SpargeAttn rounds P to the type
    of q. No gradient. TypeError or ValueError, which name the argument, for a wrong shape or value, and unless exactly
    one of cdfthreshd and topk is given.
    """
    call = AttentionCall(q, k, k, Options(causal=causal))
    check_dense(call)
    diagnose_switches(None, smooth_k=smooth_k, attention_sink=attention_sink)
    heads, seqlen_q, seqlen_k = q.shape[2], q.shape[1], k.shape[1]
    if causal and seqlen_q != seqlen_k:
        raise ValueError(f"causal: got {seqlen_q} queries and {seqlen_k} keys, wanted as many queries as keys")
    if (cdfthreshd is None) == (topk is None):
        raise ValueError(f"cdfthreshd, topk: got {cdfthreshd!r} and {topk!r}, wanted one of them and None")
    if isinstance(topk, (int, float)) and not 0.0 <= topk <= 1.0:
        raise ValueError(f"topk: got {topk}, wanted a share of the blocks of keys, 0 to 1")
    similar = per_head("simthreshd1", simthreshd1, q)
    name, share = ("topk", topk) if cdfthreshd is None else ("cdfthreshd", cdfthreshd)
    shares = per_head(name, share, q)

    keys = k.float()
    if smooth_k:
        keys = keys - keys.mean(1, keepdim=True)
    q_means, q_similarity = _of_blocks(q.float(), block_size[0])
    k_means, k_similarity = (x.repeat_interleave(heads // k.shape[2], 1) for x in _of_blocks(keys, block_size[1]))
    q_similar, k_similar = q_similarity[..., None] > similar, k_similarity[:, :, None] > similar
    reached = blocks_reached(seqlen_q, seqlen_k, block_size, causal, q.device)
    scores = (q_means @ k_means.mT / math.sqrt(q.shape[-1])).masked_fill(~(k_similar & reached), -torch.inf)
    weights, order = scores.softmax(-1).sort(-1, descending=True)
    k_blocks = scores.shape[-1]
    if cdfthreshd is None:
        counts = (shares * k_blocks).long().expand(*scores.shape[:-1], 1)
    else:
        counts = (weights.cumsum(-1) <= shares).sum(-1, keepdim=True)
    largest = torch.arange(k_blocks, device=q.device) < counts.clamp_min(1)
    seen = torch.zeros_like(largest).scatter(-1, order, largest)
    seen = (seen | ~k_similar | ~q_similar) & reached
    if attention_sink:
        seen[..., :1] = True
    return BlockMask(seen, block_size)


def blocks_reached(
    seqlen_q: int, seqlen_k: int, block_size: tuple[int, int], causal: bool, device: torch.device
) -> torch.Tensor:
    """Which blocks have a key that causal attention of as many queries as keys leaves, or all without causal; bool
    (q_blocks, k_blocks).
    """
    ends = torch.arange(block_size[0], seqlen_q + block_size[0], block_size[0], device=device)
    starts = torch.arange(0, seqlen_k, block_size[1], device=device)
    reached = starts < ends[:, None]
    return reached if causal else torch.ones_like(reached)


def per_head(name: str, value: float | torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """A threshold as fp32 (heads or 1, 1, 1)."""
    heads = q.shape[2]
    if isinstance(value, torch.Tensor):
        check_strided(name, value)
        if value.dim() > 1 or value.numel() not in (1, heads) or value.is_complex():
            raise ValueError(
                f"{name}: got a {value.dtype} tensor of shape {tuple(value.shape)}, wanted one of {heads} numbers, one "
                "for each head"
            )
        return value.detach().to(q.device, torch.float32).reshape(-1, 1, 1)
    if type(value) not in (int, float):
        raise TypeError(f"{name}: got {value!r}, wanted a float, or a tensor with a number for each head")
    if math.isnan(value):  # type: ignore[arg-type]
        raise ValueError(f"{name}: got nan, wanted a number")
    return torch.full((1, 1, 1), value, dtype=torch.float32, device=q.device)  # type: ignore[arg-type]


def _of_blocks(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Means (batch, heads, blocks, head_dim) and similarities (batch, heads, blocks) of x, fp32 (batch, seqlen, heads,
    head_dim). A similarity is nan with a zero row, such as a row after the end.
    """
    x = x.transpose(1, 2)
    seqlen = x.shape[2]
    blocks = torch.nn.functional.pad(x, (0, 0, 0, -seqlen % size)).unflatten(2, (-1, size))
    lengths = (seqlen - torch.arange(0, seqlen, size, device=x.device)).clamp_max(size)
    units = blocks / blocks.norm(dim=-1, keepdim=True)
    # The sum over all pairs of the products of unit vectors is the square of their sum.
    return blocks.sum(-2) / lengths[:, None], units.mean(-2).square().sum(-1)
