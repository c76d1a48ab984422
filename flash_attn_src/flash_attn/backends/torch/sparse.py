"""Block-sparse attention in plain PyTorch, block of queries by block of queries: memory is linear in the length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flash_attn.backends.torch.scores import window_of
from flash_attn.backends.torch.tiles import accumulation_dtype
from flash_attn.calls import AttentionCall, ForwardResult, GradientCall, new_out
from flash_attn.options import WITH_BLOCK_MASK


class _Part(NamedTuple):
    """Queries of some heads of a batch entry that see the same blocks of keys.

    keys: the numbers of these keys. hidden: bool (queries, keys), what the window hides of them.
    """

    batch: int
    heads: slice
    queries: slice
    keys: torch.Tensor
    hidden: torch.Tensor


def forward(call: AttentionCall) -> ForwardResult:
    """See `protocol.Backend.forward`, of a call with a block mask."""
    q = call.q
    batch, seqlen_q, heads, _ = q.shape
    out = new_out(q, call.v) if call.out is None else call.out
    lse = torch.empty((batch, heads, seqlen_q), dtype=accumulation_dtype(q.dtype), device=q.device)
    for part in _parts(call):
        scores = _scores(call, part)
        part_lse = scores.logsumexp(-1)  # [heads, queries]
        empty = part_lse == -torch.inf
        weights = (scores - part_lse.masked_fill(empty, 0.0)[..., None]).exp()
        out[part.batch, part.queries, part.heads] = (weights @ _keys(call, call.v, part)).transpose(0, 1).to(out.dtype)
        lse[part.batch, part.heads, part.queries] = part_lse.masked_fill(empty, torch.inf)
    return ForwardResult(out, lse, None, call.options.rng_state)


def backward(gradients: GradientCall) -> torch.Tensor:
    """See `protocol.Backend.backward`, of a call with a block mask."""
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
    WITH_BLOCK_MASK.refuse(call, "leave it out")
    mask = call.options.block_mask
    assert mask is not None
    batch, seqlen_q, heads, _ = call.q.shape
    seqlen_k, device, (rows, cols) = call.k.shape[1], call.q.device, mask.block_size
    left, right = window_of(call.options)
    tokens = torch.arange(seqlen_k, device=device)
    shared = mask.seen.shape[1] == 1
    for entry in range(batch):
        for head in range(1 if shared else heads):
            some = slice(0, heads) if shared else slice(head, head + 1)
            seen = mask.seen[entry if mask.seen.shape[0] > 1 else 0, head]
            for block in range(seen.shape[0]):
                queries = slice(block * rows, min((block + 1) * rows, seqlen_q))
                keys = tokens[seen[block].repeat_interleave(cols)[:seqlen_k]]
                distance = (
                    keys - torch.arange(queries.start, queries.stop, device=device)[:, None] - seqlen_k + seqlen_q
                )
                hidden = torch.zeros_like(distance, dtype=torch.bool)
                if left >= 0:
                    hidden |= distance < -left
                if right >= 0:
                    hidden |= distance > right
                yield _Part(entry, some, queries, keys, hidden)


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
