"""The bounds of a mask at a call, as tensors: ranges of keys for each query, ids, and whole blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from flash_attn.attention.backends.triton.sparse import narrow_ids
from flash_attn.call.block_mask import BlockMask
from flash_attn.call.mask import pack_bits
from flash_attn.flex.edges import Edge, Extreme, Quotient, UnboundedError
from flash_attn.flex.request import Places, Request
from flash_attn.flex.values import AXES, values
from flash_attn.kernels.flags import PARTIAL_BLOCK, WHOLE_BLOCK
from flash_attn.kernels.operation import SPARSE_BLOCK

# Bits of a mask, 1 GiB, bits of a word, and pieces of SPARSE_BLOCK queries and keys that are looked at together.
_MOST_BITS, _WORD, _PIECES = 1 << 33, 32, 1 << 12
_SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)

_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Masked:
    """A call of flash_attn_ranges_func: its arguments of the same names."""

    ranges: torch.Tensor | None = None
    ids_q: torch.Tensor | None = None
    ids_k: torch.Tensor | None = None
    block_mask: BlockMask | None = None
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: torch.Tensor | None = None
    bits: torch.Tensor | None = None


def masked(request: Request, window: tuple[int, int] | None, slopes: torch.Tensor | None) -> Masked:
    """The mask of a call, without a wait for the GPU. window: what its ranges are, or None.

    UnboundedError for a mask that the kernels do not have.
    """
    bounds = request.bounds
    if bounds is None:
        raise UnboundedError("no bounds")
    if any(size % SPARSE_BLOCK for size in request.block_size):
        raise UnboundedError("blocks of another size")
    seen = request.seen
    for term in bounds.blocks:
        shown = values(term, request.block_places, request.device)
        seen = torch.where(shown | (seen == WHOLE_BLOCK), seen, 0)
    ids = _ids([_pair(request, of_query, of_key) for of_query, of_key in bounds.ids])
    ranges = _ranges(request) if window is None else None
    return Masked(ranges, *ids, BlockMask(seen, request.block_size), window or (-1, -1), slopes)


def by_bits(request: Request, slopes: torch.Tensor | None) -> Masked | None:
    """The mask of a call as a bit for each score; None for more than `_MOST_BITS`.

    Bits of blocks that the lists show or hide whole are never read, and a large mask waits for the GPU to leave them
    out. While a graph is captured the mask_mod is computed for every score.
    """
    sizes = batch, heads, seqlen_q, seqlen_k = request.mask_sizes
    words = -(-seqlen_k // _WORD)
    if batch * heads * seqlen_q * words * _WORD > _MOST_BITS:
        return None
    bits = torch.empty((batch, heads, seqlen_q, words), dtype=torch.int32, device=request.device)
    has_blocks = not any(size % SPARSE_BLOCK for size in request.block_size)
    steps = (1, 1, SPARSE_BLOCK, SPARSE_BLOCK)
    pieces = torch.cartesian_prod(*(torch.arange(0, *x, device=request.device) for x in zip(sizes, steps, strict=True)))
    if has_blocks and len(pieces) > _PIECES and request.may_wait:
        pieces = pieces[request.seen_at(*pieces.T) == PARTIAL_BLOCK]
    within = torch.arange(SPARSE_BLOCK, device=request.device)
    for some in pieces.split(_PIECES):
        entry, head, query, key = some.T[..., None, None, None]  # [pieces, 1, 1, 1]
        # Past the last query, or the last word, that one is made again.
        queries = (query + within[:, None]).clamp_max(seqlen_q - 1)  # [pieces, 1, SPARSE_BLOCK, 1]
        word = (key // _WORD + within[: SPARSE_BLOCK // _WORD]).clamp_max(words - 1)
        keys = (word[..., None] * _WORD + within[:_WORD]).flatten(-2).clamp_max(seqlen_k - 1)
        places = dict(zip(AXES, (entry, head, queries, keys), strict=True))
        visible = request.visible(places, by_lists=not has_blocks)
        bits[entry, head, queries, word] = pack_bits(visible.expand(len(some), 1, SPARSE_BLOCK, SPARSE_BLOCK))
    blocks = BlockMask(request.seen, request.block_size) if has_blocks else None
    return Masked(block_mask=blocks, alibi_slopes=slopes, bits=bits)


def is_shown_by_lists(request: Request, left: int | None, right: int | None, *, wholly: bool = True) -> bool:
    """Whether no whole block of the lists shows more than keys i - left to i + right to queries i, and wholly, whether
    the lists lack none of these. Waits for the GPU; False while a graph is captured."""
    if not request.may_wait:
        return False
    seen, (_, _, seqlen_q, seqlen_k) = request.seen, request.sizes
    queries, keys = request.block_places["q"], request.block_places["kv"]
    last_query = (queries + (request.block_size[0] - 1)).clamp_max(seqlen_q - 1)
    last_key = (keys + (request.block_size[1] - 1)).clamp_max(seqlen_k - 1)
    lacking, beyond = (seen == 0) & wholly, torch.zeros_like(seen, dtype=torch.bool)
    if right is not None:
        lacking, beyond = lacking & (keys <= last_query + right), beyond | (last_key > queries + right)
    if left is not None:
        lacking, beyond = lacking & (last_key >= queries - left), beyond | (keys < last_query - left)
    return not bool((lacking | (beyond & (seen == WHOLE_BLOCK))).any())


def _ranges(request: Request) -> torch.Tensor:
    """int32 (1 or batch, 1 or heads, seqlen_q, 2, 2)."""
    bounds, (_, _, seqlen_q, seqlen_k) = request.bounds, request.sizes
    assert bounds is not None
    places = request.places()
    edges = []
    for keys in bounds.ranges:
        edges.append(0 if keys.first is None else _edge(keys.first, places, request))
        edges.append(seqlen_k if keys.stop is None else _edge(keys.stop, places, request))
    edges += [0] * (4 - len(edges))
    ends = [x if isinstance(x, torch.Tensor) else torch.full((1, 1, 1), x, device=request.device) for x in edges]
    shape = torch.broadcast_shapes((1, 1, seqlen_q), *(x.shape for x in ends))
    return torch.stack([x.expand(shape) for x in ends], -1).clamp(0, seqlen_k).int().unflatten(-1, (2, 2))


def _edge(edge: Edge, places: Places, request: Request) -> torch.Tensor:
    """The keys at an edge, int64 (1 or batch, 1 or heads, 1 or seqlen_q)."""
    if isinstance(edge, Extreme):
        pick = torch.minimum if edge.is_least else torch.maximum
        return pick(_edge(edge.first, places, request), _edge(edge.second, places, request))
    if isinstance(edge, Quotient):
        return torch.div(_edge(edge.edge, places, request), edge.by, rounding_mode="floor")
    parts: list[Any] = [
        count * _whole(values(term, places, request.device))[..., 0].long() for count, term in edge.terms
    ]
    if edge.q or not parts:
        parts.append(edge.q * places["q"][..., 0])
    return sum(parts, start=edge.number)


def _whole(x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point() or x.is_complex():
        raise UnboundedError("bounds that are no integers")
    return x


def _pair(request: Request, of_query: Any, of_key: Any) -> _Pair:
    """The ids of queries and of keys, integers (1 or batch, seqlen) each."""
    pair = [_whole(values(x, request.places(), request.device)) for x in (of_query, of_key)]
    if any(x.shape[1] != 1 for x in pair):
        raise UnboundedError("ids of their own for each head")
    return pair[0][:, 0, :, 0].expand(-1, request.sizes[2]), pair[1][:, 0, 0].expand(-1, request.sizes[3])


def _ids(pairs: list[_Pair]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """int32 ids that are equal where all pairs are."""
    if not pairs:
        return None, None
    of_query, of_key = pairs[0]
    if len(pairs) > 1 or of_query.dtype not in _SMALL or of_key.dtype not in _SMALL:
        of_query, of_key = reduce(_joined, map(_narrowed, pairs))
    return of_query.int().contiguous(), of_key.int().contiguous()


def _narrowed(pair: _Pair) -> _Pair:
    """int32 ids in place of ids, from -(2 ** 30) on."""
    batch = max(x.shape[0] for x in pair)
    of_query, of_key = (x.long().expand(batch, -1).contiguous() for x in pair)
    if of_key.is_cuda:
        return narrow_ids(of_query, of_key), narrow_ids(of_key, of_key)
    places = torch.cat((of_query, of_key), 1).unique(return_inverse=True)[1].int()
    return places[:, : of_query.shape[1]], places[:, of_query.shape[1] :]


def _joined(first: _Pair, second: _Pair) -> _Pair:
    """Ids that are equal where both pairs of ids are equal. Ids of 15 bits give narrow ids."""

    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        wide = ((a.long() + (1 << 31)) << 32) | (b.long() & 0xFFFFFFFF)
        return torch.where((a | b) >> 15 == 0, (a << 15) | b, wide)

    return _narrowed((both(first[0], second[0]), both(first[1], second[1])))
