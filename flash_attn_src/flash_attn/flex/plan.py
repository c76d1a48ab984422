"""How a call of flex_attention is served: the options of flash_attn's functions, made at each call."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from flash_attn.block_mask import BlockMask
from flash_attn.flex import masks
from flash_attn.flex.bounds import UnboundedError, is_causal, slopes_of, window_of
from flash_attn.flex.masks import Look
from flash_attn.flex.request import Request
from flash_attn.flex.runs import Run, groups, of_rows
from flash_attn.flex.scores import ADD, SUBTRACT
from flash_attn.flex.values import values
from flash_attn.kernels.operation import SPARSE_BLOCK

_MOST_GROUPS = 4
_MOST_BIAS = 1 << 30
# Scores that are looked at together.
_CHUNK = 1 << 26


@dataclass(frozen=True, eq=False)
class Dense:
    """A call of flash_attn_func.

    window        (left, right)
    alibi_slopes  fp32 (heads,), or None
    attn_bias     (1 or batch, 1 or heads, seqlen_q, seqlen_k), or None
    """

    window: tuple[int, int] = (-1, -1)
    alibi_slopes: torch.Tensor | None = None
    attn_bias: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Part:
    """A call of flash_attn_varlen_func on some of the queries and keys, counted through the whole batch.

    rows, keys    their numbers, int64, or None for all in order
    ends_q, ...   as cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k
    """

    window: tuple[int, int]
    rows: torch.Tensor | None
    keys: torch.Tensor | None
    ends_q: torch.Tensor
    ends_k: torch.Tensor
    longest_q: int
    longest_k: int


@dataclass(frozen=True, eq=False)
class Parts:
    """Calls that each serve some of the queries. A query in no part sees no key."""

    parts: list[Part]
    alibi_slopes: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Sparse:
    """A call of flash_attn_block_sparse_func."""

    mask: BlockMask
    window: tuple[int, int] = (-1, -1)


Plan = Dense | Parts | Sparse


_Window = tuple[int, int]
_OPEN = (-1, -1)


def plan(request: Request, dtype: torch.dtype, *, has_sparse: bool) -> Plan | str:
    """The plan of a request, or the reason why there is none. Waits for the GPU, but not while a graph is captured.

    dtype: the type of q. has_sparse: whether the kernels of block masks take its head dim.
    """
    bounds = request.bounds
    slopes = _slopes(request)
    is_bare = not request.score.steps
    if request.lists is None:
        is_dense = is_bare or (slopes is not None and request.sizes[2] == request.sizes[3])
        return Dense(alibi_slopes=slopes) if is_dense else _by_bias(request, dtype, None, _OPEN)
    window = None if bounds is None else _window(request)
    has_sparse = has_sparse and is_bare and not request.score.softcap and window is not None
    has_sparse = has_sparse and all(size % SPARSE_BLOCK == 0 for size in request.block_size)
    if has_sparse and window == _OPEN and bounds is not None and bounds.blocks:
        return Sparse(BlockMask(masks.visible_blocks(request), request.block_size))
    seen = None
    if bounds is not None and not (request.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        try:
            seen = masks.look(request)
        except UnboundedError:
            window, has_sparse = None, False
    is_exact = seen is not None and seen.is_full and seen.is_listed and not bounds.blocks  # type: ignore[union-attr]
    if is_exact and (is_bare or slopes is not None):
        made = _exact(request, seen, window, slopes)  # type: ignore[arg-type]
        if made is not None:
            return made
    if has_sparse and (window == _OPEN or (seen is not None and seen.is_full)):
        return Sparse(BlockMask(masks.visible_blocks(request), request.block_size), window or _OPEN)
    return _by_bias(request, dtype, seen, window if is_exact and window else _OPEN)


def _exact(request: Request, seen: Look, window: _Window | None, slopes: torch.Tensor | None) -> Dense | Parts | None:
    """The plan without a bias for a mask that is a range of keys for each query."""
    batch, _, seqlen_q, seqlen_k = request.sizes
    if window is not None and (slopes is None or seqlen_q == seqlen_k):
        return Dense(window, slopes)
    if not seen.is_whole or seen.first.shape[1] != 1:
        return None
    rows = zip(seen.first[:, 0], seen.stop[:, 0] - 1, strict=True)
    runs = [list(of_rows(b, *of_batch)) for b, of_batch in enumerate(rows)]
    if len(runs) == 1:
        runs = [[replace(run, batch=b) for run in runs[0]] for b in range(batch)]
    grouped = groups((run for of_batch in runs for run in of_batch), _MOST_GROUPS)
    if not grouped or (slopes is not None and not all(run.is_aligned for _, of in grouped for run in of)):
        return None
    return Parts([_part(request, *group) for group in grouped], slopes)


def _window(request: Request) -> _Window | None:
    """The mask as flash_attn_func's window, which is aligned to the last query and key; None if it is none."""
    _, _, seqlen_q, seqlen_k = request.sizes
    assert request.bounds is not None
    sides = window_of(request.bounds, seqlen_k)
    if sides is None:
        return None
    shift = seqlen_k - seqlen_q
    left, right = (None if n is None else n + by for n, by in zip(sides, (shift, -shift), strict=True))
    if (left is not None and left < 0) or (right is not None and right < 0):
        return None
    return (-1 if left is None else left, -1 if right is None else right)


def _part(request: Request, window: _Window, runs: list[Run]) -> Part:
    batch, _, seqlen_q, seqlen_k = request.sizes
    queries, keys = [run.queries for run in runs], [run.keys for run in runs]
    return Part(
        window,
        _places([run.batch * seqlen_q + run.start for run in runs], queries, batch * seqlen_q, request.device),
        _places([run.batch * seqlen_k + run.first for run in runs], keys, batch * seqlen_k, request.device),
        _ends(queries, request.device),
        _ends(keys, request.device),
        max(queries),
        max(keys),
    )


def _places(starts: list[int], lengths: list[int], total: int, device: torch.device) -> torch.Tensor | None:
    """The numbers start to start + length - 1 of each start; None if they are 0 to total - 1."""
    places = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    return None if torch.equal(places, torch.arange(total)) else places.to(device)


def _ends(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def _by_bias(request: Request, dtype: torch.dtype, seen: Look | None, window: _Window) -> Dense | str:
    """The plan with a bias of each score, -inf for hidden keys."""
    sizes = request.bias_sizes(*((seen.batch, seen.heads) if seen is not None else request.sizes[:2]))
    dtype = torch.float32 if request.score.steps else dtype
    if math.prod(sizes) * dtype.itemsize > _MOST_BIAS:
        return "a mask or a score_mod that takes a bias for each score, of more than 1 GiB"
    if request.is_learned:
        return Dense(window, attn_bias=_bias(request, sizes, 0, sizes[2]))
    bias = torch.empty(sizes, dtype=dtype, device=request.device)
    step = max(_CHUNK // (sizes[0] * sizes[1] * sizes[3]), 1)
    for start in range(0, sizes[2], step):
        stop = min(start + step, sizes[2])
        bias[:, :, start:stop] = _bias(request, sizes, start, stop)
    return Dense(window, attn_bias=bias)


def _bias(request: Request, sizes: tuple[int, int, int, int], start: int, stop: int) -> torch.Tensor:
    bias = request.addend(start, stop).expand(*sizes[:2], stop - start, sizes[3])
    visible = request.visible(start, stop, *sizes[:2])
    return bias.contiguous() if visible is None else bias.masked_fill(~visible, -torch.inf)


def _slopes(request: Request) -> torch.Tensor | None:
    """The slopes, fp32 (heads,), if the addend of every visible key is -slope * |query - key|; None if they learn."""
    steps, bounds = request.score.steps, request.bounds
    if len(steps) != 1 or steps[0][0] not in (ADD, SUBTRACT) or request.is_learned:
        return None
    product = slopes_of(steps[0][1], causal=bounds is not None and is_causal(bounds))
    if product is None:
        return None
    slopes = torch.full((request.sizes[1],), product[0] if steps[0][0] == ADD else -product[0], device=request.device)
    for term in product[1]:
        x = values(term, request.places(), request.device).flatten()
        if x.dtype in (torch.float16, torch.bfloat16):  # PyTorch rounds each product to this type
            return None
        slopes = slopes * x.float()
    return slopes
