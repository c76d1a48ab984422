"""How a call of flex_attention is served: the options of flash_attn's functions, kept for the next call."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_attn.block_mask import BlockMask
from flash_attn.flex import masks
from flash_attn.flex.masks import Blocks, Runs
from flash_attn.flex.request import Request

_MOST_PLANS = 64
_MOST_BIAS = 1 << 30
_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Dense:
    """A call of flash_attn_func.

    window        (left, right)
    alibi_slopes  fp32 (heads,), or None
    attn_bias     fp32 (1 or batch, 1 or heads, seqlen_q, seqlen_k), or None
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
    causal: bool


Plan = Dense | Parts | Sparse

_kept: dict[Any, tuple[Plan | str, list[weakref.ref[torch.Tensor]]]] = {}
_lock = threading.Lock()


def plan(request: Request) -> Plan | str:
    """The plan of a request, or the reason why there is none.

    Kept for other calls while all tensors of the request live, but no more than 64 plans and 1 GiB of biases. Not kept
    for tensors made in inference mode, whose changes PyTorch does not count.
    """
    if request.is_learned or any(x.is_inference() for x in request.tensors):
        return _plan(request)
    kept = _kept.get(request.key)
    if kept is not None:
        return kept[0]
    with torch.no_grad():
        made = _plan(request)

    def forget(_: object, key: Any = request.key) -> None:
        _kept.pop(key, None)

    with _lock:
        _kept[request.key] = made, [weakref.ref(x, forget) for x in request.tensors]
        while len(_kept) > _MOST_PLANS or sum(_bytes(kept) for kept, _ in list(_kept.values())) > _MOST_BIAS:
            _kept.pop(next(iter(_kept)))
    return made


def _bytes(made: Plan | str) -> int:
    return made.attn_bias.nbytes if isinstance(made, Dense) and made.attn_bias is not None else 0


def _plan(request: Request) -> Plan | str:
    if request.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the first call with a mask, while a graph is captured"
    score = request.score
    with torch.no_grad():
        mask = request.mask()
        if isinstance(mask, Blocks) and score.is_bare and not score.softcap:
            return Sparse(mask.mask, mask.causal)
        if isinstance(mask, Runs):
            slopes = None
            if not score.is_bare and mask.is_aligned and not request.is_learned:
                slopes = _slopes(request)
            if score.is_bare or slopes is not None:
                return Dense(mask.whole, slopes) if mask.whole else Parts(_parts(mask, request), slopes)
    batch, heads = request.shared(request.mask_names | score.names)
    if batch * heads * request.sizes[2] * request.sizes[3] * 4 > _MOST_BIAS:
        return "a mask or a score_mod that takes a bias for each score, of more than 1 GiB"
    return Dense(attn_bias=_bias(request))


def _parts(mask: Runs, request: Request) -> list[Part]:
    """The calls of each group, in which the runs of a mask that all batches share are repeated for each batch."""
    batch, _, seqlen_q, seqlen_k = request.sizes
    is_shared = "b" not in request.mask_names
    parts = []
    for window, members in mask.groups:
        runs = [replace(run, batch=b) for b in range(batch) for run in members] if is_shared else members
        queries, keys = [run.queries for run in runs], [run.keys for run in runs]
        part = Part(
            window,
            _places([run.batch * seqlen_q + run.start for run in runs], queries, batch * seqlen_q, request.device),
            _places([run.batch * seqlen_k + run.first for run in runs], keys, batch * seqlen_k, request.device),
            _ends(queries, request.device),
            _ends(keys, request.device),
            max(queries),
            max(keys),
        )
        parts.append(part)
    return parts


def _places(starts: list[int], lengths: list[int], total: int, device: torch.device) -> torch.Tensor | None:
    """The numbers start to start + length - 1 of each start; None if they are 0 to total - 1."""
    places = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    return None if torch.equal(places, torch.arange(total)) else places.to(device)


def _ends(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def _bias(request: Request) -> torch.Tensor:
    seqlen_q = request.sizes[2]
    hidden = ~request.visible(0, seqlen_q)
    if request.score.is_bare:
        return torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -torch.inf)
    return request.addend(0, seqlen_q).masked_fill(hidden, -torch.inf)


def _slopes(request: Request) -> torch.Tensor | None:
    """The slopes, fp32 (heads,), if the addend of every visible key is -slope * |query - key|."""
    seqlen_q, seqlen_k = request.sizes[2:]
    if "b" in request.score.names or seqlen_q < 2:
        return None
    slopes = -request.addend(1, 2)[0, :, 0, 0]
    if not bool(slopes.isfinite().all()):
        return None
    device, heads = request.device, request.sizes[1]
    batch = request.shared(request.mask_names)[0]
    for start, stop in masks.chunks(seqlen_q, max(batch, heads) * seqlen_k, 1):
        distance = (torch.arange(start, stop, device=device)[:, None] - torch.arange(seqlen_k, device=device)).abs()
        wanted = -slopes[:, None, None] * distance
        error = (request.addend(start, stop) - wanted).abs() > _TOLERANCE * wanted.abs()
        if bool((error & request.visible(start, stop)).any()):
            return None
    return slopes.expand(heads).contiguous()
