"""Attention with a mask in plain PyTorch, block of queries by block of queries: memory is linear in the length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flash_attn.backends.torch.scores import window_of
from flash_attn.backends.torch.tiles import accumulation_dtype
from flash_attn.calls import AttentionCall, ForwardResult, GradientCall, new_out
from flash_attn.mask import Mask
from flash_attn.options import WITH_MASK

# Queries that are looked at together where no block mask says how many.
_ROWS = 128


class _Part(NamedTuple):
    """Queries of some heads of a batch entry, which lie in one block.

    keys: the numbers of the keys that one of them sees. hidden: bool (queries, keys), those that a query does not see.
    """

    batch: int
    heads: slice
    queries: slice
    keys: torch.Tensor
    hidden: torch.Tensor


def forward(call: AttentionCall) -> ForwardResult:
    """See `protocol.Backend.forward`, of a call with a mask."""
    q = call.q
    batch, seqlen_q, heads, _ = q.shape
    out = new_out(q, call.v) if call.out is None else call.out
    lse = torch.empty((batch, heads, seqlen_q), dtype=accumulation_dtype(q.dtype), device=q.device)
    for part in _parts(call):
        scores = _scores(call, part)
        part_lse = scores.logsumexp(-1)  # [heads, queries]
        if call.options.s_aux is not None:
            part_lse = torch.logaddexp(part_lse, call.options.s_aux[part.heads, None].to(lse.dtype))
        empty = part_lse == -torch.inf
        weights = (scores - part_lse.masked_fill(empty, 0.0)[..., None]).exp()
        out[part.batch, part.queries, part.heads] = (weights @ _keys(call, call.v, part)).transpose(0, 1).to(out.dtype)
        lse[part.batch, part.heads, part.queries] = part_lse.masked_fill(empty, torch.inf)
    return ForwardResult(out, lse, None, call.options.rng_state)


def backward(gradients: GradientCall) -> torch.Tensor:
    """See `protocol.Backend.backward`, of a call with a mask."""
    call = gradients.forward
    dtype = accumulation_dtype(call.q.dtype)
    out, dout = gradients.out.to(dtype), gradients.dout.to(dtype)
    delta = (out * dout).sum(-1).transpose(1, 2).contiguous()  # [batch, heads, seqlen_q]
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (call.k, call.v))
    for part in _parts(call):
        here = (part.batch, part.heads, part.queries)
        weights = (_scores(call, part) - gradients.softmax_lse[here][..., None]).exp()
        part_dout = dout[part.batch, part.queries, part.heads].transpose(0, 1)  # [heads, queries, head_dim]
        ds = weights * (part_dout @ _keys(call, call.v, part).mT - delta[here][..., None]) * call.options.scale
        dq = ds @ _keys(call, call.k, part)
        gradients.dq[part.batch, part.queries, part.heads] = dq.transpose(0, 1).to(gradients.dq.dtype)
        q = call.q[part.batch, part.queries, part.heads].transpose(0, 1).to(dtype)
        for total, heads in ((dk, ds.mT @ q), (dv, weights.mT @ part_dout)):
            of_keys = _kv_heads(call, part)
            total[part.batch].index_put_((part.keys[:, None], of_keys[None, :]), heads.transpose(0, 1), accumulate=True)
    gradients.dk.copy_(dk)
    gradients.dv.copy_(dv)
    return delta


def _parts(call: AttentionCall) -> Iterator[_Part]:
    WITH_MASK.refuse(call, "leave it out")
    mask = call.options.mask
    assert mask is not None
    batch, seqlen_q, heads, _ = call.q.shape
    shared = mask.planes[1] == 1
    rows = _ROWS if mask.blocks is None else mask.blocks.block_size[0]
    for entry in range(batch):
        for head in range(1 if shared else heads):
            some = slice(0, heads) if shared else slice(head, head + 1)
            for start in range(0, seqlen_q, rows):
                queries = slice(start, min(start + rows, seqlen_q))
                seen = _visible(call, mask, entry, head, queries)
                keys = seen.any(0).nonzero()[:, 0]
                yield _Part(entry, some, queries, keys, ~seen[:, keys])


def _visible(call: AttentionCall, mask: Mask, entry: int, head: int, queries: slice) -> torch.Tensor:
    """Which keys some queries of a block see: bool (queries, seqlen_k)."""
    seqlen_q, seqlen_k, device = call.q.shape[1], call.k.shape[1], call.q.device
    keys = torch.arange(seqlen_k, device=device)
    distance = keys - torch.arange(queries.start, queries.stop, device=device)[:, None] - seqlen_k + seqlen_q
    seen = torch.ones_like(distance, dtype=torch.bool)
    left, right = window_of(call.options)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right

    def of_entry(x: torch.Tensor) -> torch.Tensor:
        return x[entry if x.shape[0] > 1 else 0]

    def of_head(x: torch.Tensor) -> torch.Tensor:
        return of_entry(x)[head if x.shape[1] > 1 else 0]

    if mask.blocks is not None:
        block_q, cols = mask.blocks.block_size
        seen &= of_head(mask.blocks.seen)[queries.start // block_q].repeat_interleave(cols)[:seqlen_k]
    if mask.ranges is not None:
        ranges = of_head(mask.ranges)[queries, :, :, None]  # (queries, 2, 2, 1)
        seen &= ((keys >= ranges[:, :, 0]) & (keys < ranges[:, :, 1])).any(1)
    if mask.hidden is not None:
        of_keys = of_head(mask.hidden)  # (seqlen_k, 2, 2)
        rows = torch.arange(queries.start, queries.stop, device=device)[:, None, None]
        seen &= ~((rows >= of_keys[..., 0]) & (rows < of_keys[..., 1])).any(-1)
    if mask.ids_q is not None and mask.ids_k is not None:
        seen &= of_entry(mask.ids_q)[queries, None] == of_entry(mask.ids_k)
    return seen


def _scores(call: AttentionCall, part: _Part) -> torch.Tensor:
    """The scaled scores of a part, [heads, queries, keys]."""
    q = call.q[part.batch, part.queries, part.heads].transpose(0, 1).to(accumulation_dtype(call.q.dtype))
    return (q @ _keys(call, call.k, part).mT * call.options.scale).masked_fill(part.hidden, -torch.inf)


def _keys(call: AttentionCall, x: torch.Tensor, part: _Part) -> torch.Tensor:
    """The rows of k or v that a part sees, for each of its query heads: [heads, keys, head_dim]."""
    rows = x[part.batch].index_select(0, part.keys).index_select(1, _kv_heads(call, part))
    return rows.transpose(0, 1).to(accumulation_dtype(call.q.dtype))


def _kv_heads(call: AttentionCall, part: _Part) -> torch.Tensor:
    """The key head of each query head of a part."""
    group = call.q.shape[2] // call.k.shape[2]
    return torch.arange(part.heads.start, part.heads.stop, device=call.q.device) // group
