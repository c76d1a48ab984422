"""How a call of flex_attention is served: the options of flash_attn's functions, made at each call."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flash_attn.flex.distances import is_causal, is_of_distance, slopes_of, window_of
from flash_attn.flex.edges import UnboundedError
from flash_attn.flex.masks import Masked, by_bits, is_shown_by_lists, masked
from flash_attn.flex.request import Request
from flash_attn.flex.scores import ADD, SUBTRACT
from flash_attn.flex.values import values

_MOST_BIAS = 1 << 30
# Scores that are looked at together.
_CHUNK = 1 << 26

_Window = tuple[int, int]
_OPEN = (-1, -1)


@dataclass(frozen=True, eq=False)
class Dense:
    """A call of flash_attn_func.

    window        (left, right)
    alibi_slopes  fp32 (heads,), or None
    attn_bias     (1 or batch, 1 or heads, seqlen_q, seqlen_k), a table of distances, or None
    """

    window: _Window = _OPEN
    alibi_slopes: torch.Tensor | None = None
    attn_bias: torch.Tensor | None = None


Plan = Dense | Masked


def plan(request: Request, dtype: torch.dtype, *, has_masks: bool) -> Plan | str:
    """The plan of a request, or the reason why there is none.

    Waits for the GPU only for a window that flash_attn_func hides beside a soft cap, an addend or a large head dim, and
    for a large mask by bits, and not while a graph is captured.
    dtype: the type of q. has_masks: whether the kernels of masks take its head dim.
    """
    steps, slopes = request.score.steps, _slopes(request)
    has_mask = request.lists is not None and has_masks and not (steps and slopes is None)
    window = _OPEN if request.lists is None else None
    if steps or request.score.softcap or not has_mask:  # kernels of one kind of scores are faster than those of all
        window = window or _whole_window(request)
    # A slope's sign holds for earlier keys, if no whole block shows others.
    signed = slopes is not None and request.bounds is not None and is_causal(request.bounds)
    if window is None and has_mask and not (signed and not is_shown_by_lists(request, None, 0, wholly=False)):
        try:
            return masked(request, _window(request), slopes)
        except UnboundedError:
            window = _whole_window(request)
        if window is None and (made := by_bits(request, slopes)) is not None:
            return made
    if window is None:
        return _by_bias(request, dtype, _OPEN)
    if not steps or slopes is not None:
        return Dense(window, slopes)
    if all(is_of_distance(x) for _, x in steps):
        return Dense(window, attn_bias=request.distances())
    return _by_bias(request, dtype, window)


def _whole_window(request: Request) -> _Window | None:
    """The window of a mask that is nothing else, and whose lists show all of it; None for another mask."""
    bounds = request.bounds
    if bounds is None or bounds.ids or bounds.blocks:
        return None
    sides, window = window_of(bounds, request.sizes[3]), _window(request)
    return window if sides is not None and window is not None and is_shown_by_lists(request, *sides) else None


def _window(request: Request) -> _Window | None:
    """The ranges of a mask as flash_attn_func's window, aligned to the last query and key; None if they are none."""
    _, _, seqlen_q, seqlen_k = request.sizes
    sides = None if request.bounds is None else window_of(request.bounds, seqlen_k)
    if sides is None:
        return None
    shift = seqlen_k - seqlen_q
    left, right = (None if n is None else n + by for n, by in zip(sides, (shift, -shift), strict=True))
    if (left is not None and left < 0) or (right is not None and right < 0):
        return None
    return (-1 if left is None else left, -1 if right is None else right)


def _by_bias(request: Request, dtype: torch.dtype, window: _Window) -> Dense | str:
    """The plan with a bias of each score, -inf for hidden keys."""
    sizes = request.bias_sizes
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
    places = request.places(start, stop)
    bias = request.addend(places).expand(*sizes[:2], stop - start, sizes[3])
    return bias.contiguous() if request.lists is None else bias.masked_fill(~request.visible(places), -torch.inf)


def _slopes(request: Request) -> torch.Tensor | None:
    """The slopes, fp32 (heads,), if the addend of every visible key is -slope * |query - key|; None if they learn."""
    steps, bounds = request.score.steps, request.bounds
    if len(steps) != 1 or steps[0][0] not in (ADD, SUBTRACT) or request.is_learned:
        return None
    product = slopes_of(steps[0][1], causal=bounds is not None and is_causal(bounds))
    if product is None or request.sizes[2] != request.sizes[3]:
        return None
    slopes = torch.full((request.sizes[1],), product[0] if steps[0][0] == ADD else -product[0], device=request.device)
    for term in product[1]:
        x = values(term, request.places(), request.device).flatten()
        if x.dtype in (torch.float16, torch.bfloat16):  # PyTorch rounds each product to this type
            return None
        slopes = slopes * x.float()
    return slopes
