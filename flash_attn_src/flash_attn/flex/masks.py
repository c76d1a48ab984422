"""The bounds of a mask at a call: the keys of each query, and what the lists of blocks say beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flash_attn.flex.bounds import Edge, Extreme, Quotient, UnboundedError
from flash_attn.flex.request import Places, Request
from flash_attn.flex.values import values


@dataclass(frozen=True)
class Rows:
    """The keys of each query, first to stop - 1, int64 (1 or batch, 1 or heads, seqlen_q).

    is_whole: every query sees all keys in between, bool of no dimension.
    """

    first: torch.Tensor
    stop: torch.Tensor
    is_whole: torch.Tensor


@dataclass(frozen=True)
class Look:
    """What the host knows of a mask at a call.

    is_listed  every block with a visible key is in the lists
    is_full    in a block that the lists show whole the mask_mod hides no key
    is_whole   as in `Rows`
    batch, heads  1 where the lists are the same for all
    first, stop  as in `Rows`, on the CPU
    """

    is_listed: bool
    is_full: bool
    is_whole: bool
    batch: int
    heads: int
    first: torch.Tensor
    stop: torch.Tensor


def look(request: Request) -> Look:
    """Computes the bounds of a call, and waits once for the GPU."""
    rows = _rows(request)
    partial, full = request.listed
    some, every = _of_blocks(rows, request)
    flags = [
        (~some | partial | full).all(),
        (~full | every).all(),
        rows.is_whole,
        *((x == x.narrow(axis, 0, 1)).all() for axis in (0, 1) for x in (partial, full)),
    ]
    shape = rows.first.shape
    numbers = torch.cat([torch.stack(flags).long(), rows.first.flatten(), rows.stop.flatten()]).cpu()
    is_listed, is_full, is_whole, *same = (bool(x) for x in numbers[: len(flags)].tolist())
    first, stop = numbers[len(flags) :].view(2, *shape)
    batch, heads = (1 if all(same[i : i + 2]) else partial.shape[i // 2] for i in (0, 2))
    return Look(is_listed, is_full, is_whole, batch, heads, first, stop)


def visible_blocks(request: Request) -> torch.Tensor:
    """The blocks that show keys: bool (1 or batch, 1 or heads, q_blocks, k_blocks)."""
    partial, full = request.listed
    assert request.bounds is not None
    for term in request.bounds.blocks:
        partial = partial & values(term, request.block_places, request.device)
    return partial | full


def _rows(request: Request) -> Rows:
    bounds, seqlen_k = request.bounds, request.sizes[3]
    assert bounds is not None
    places = request.places()
    nothing = torch.zeros((1, 1, request.sizes[2]), dtype=torch.long, device=request.device)
    first, stop, is_whole = nothing, nothing, torch.ones((), dtype=torch.bool, device=request.device)
    for keys in bounds.ranges:
        low = nothing if keys.first is None else _edge(keys.first, places, request).clamp(0, seqlen_k)
        high = nothing + seqlen_k if keys.stop is None else _edge(keys.stop, places, request).clamp(0, seqlen_k)
        is_empty, was_empty = low >= high, first >= stop
        is_whole = is_whole & (is_empty | was_empty | (torch.maximum(first, low) <= torch.minimum(stop, high))).all()
        start = torch.where(is_empty, first, torch.where(was_empty, low, torch.minimum(first, low)))
        stop = torch.where(is_empty, stop, torch.where(was_empty, high, torch.maximum(stop, high)))
        first = start
    for of_query, of_key in bounds.ids:
        low, high, is_run = _of_ids(*(values(x, places, request.device) for x in (of_query, of_key)))
        first, stop, is_whole = torch.maximum(first, low), torch.minimum(stop, high), is_whole & is_run
    first, stop = torch.broadcast_tensors(first + nothing, stop + nothing)
    return Rows(first, stop, is_whole)


def _edge(edge: Edge, places: Places, request: Request) -> torch.Tensor:
    """The keys at an edge, int64 (1 or batch, 1 or heads, 1 or seqlen_q)."""
    if isinstance(edge, Extreme):
        pick = torch.minimum if edge.is_least else torch.maximum
        return pick(_edge(edge.first, places, request), _edge(edge.second, places, request))
    if isinstance(edge, Quotient):
        return torch.div(_edge(edge.edge, places, request), edge.by, rounding_mode="floor")
    total: Any = torch.full((1, 1, 1), edge.number, device=request.device)
    if edge.q:
        total = total + edge.q * places["q"][..., 0]
    for count, term in edge.terms:
        total = total + count * _whole(values(term, places, request.device))[..., 0].long()
    return total


def _of_ids(of_query: torch.Tensor, of_key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first and behind the last key with the id of each query, and whether the keys of each id are neighbours."""
    queries, keys = _whole(of_query)[..., 0].long(), _whole(of_key)[..., 0, :].long()
    shape = torch.broadcast_shapes(queries.shape[:2], keys.shape[:2])
    ordered, order = keys.expand(*shape, -1).sort(stable=True)
    queries = queries.expand(*shape, -1).contiguous()
    begin, end = (torch.searchsorted(ordered, queries, right=right) for right in (False, True))
    low = order.gather(-1, begin.clamp_max(keys.shape[-1] - 1))
    high = order.gather(-1, (end - 1).clamp_min(0)) + 1
    none = begin == end
    low, high = torch.where(none, 0, low), torch.where(none, 0, high)
    return low, high, (high - low == end - begin).all()


def _whole(x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point() or x.is_complex():
        raise UnboundedError("bounds that are no integers")
    return x


def _of_blocks(rows: Rows, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each block: whether some key is seen, and every key. Bool (1 or batch, 1 or heads, q_blocks, k_blocks)."""
    seqlen_q, seqlen_k = request.sizes[2:]
    starts = request.block_places["kv"][0, 0]  # [1, k_blocks]
    ends = (starts + request.block_size[1]).clamp_max(seqlen_k)
    first, stop = rows.first[..., None], rows.stop[..., None]
    some, every = (first < ends) & (stop > starts) & (first < stop), (first <= starts) & (stop >= ends)
    short, size = -seqlen_q % request.block_size[0], request.block_size[0]
    some, every = (
        torch.nn.functional.pad(x, (0, 0, 0, short), value=fill).unflatten(2, (-1, size))
        for x, fill in ((some, False), (every, True))
    )
    return some.any(3), every.all(3)
