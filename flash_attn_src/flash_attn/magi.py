"""MagiAttention's function of slices, `flex_flash_attn_func`, on the kernels of `flash_attn.ranges`."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.ranges import flash_attn_ranges_func

# The bits of a number in attn_type_map: whether the last, and the first, keys of a slice move with the query.
_ENDS_AT_DIAGONAL, _BEGINS_AT_DIAGONAL = 1, 2
# Pairs of a slice and a query that are looked at together.
_CHUNK = 1 << 24


def flex_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_ranges: torch.Tensor,
    k_ranges: torch.Tensor,
    attn_type_map: torch.Tensor | None = None,
    *,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (total_q, heads, head_dim) and k, v (total_k, heads_k, head_dim) over slices: see
    `ranges_of_slices`. Waits for the GPU.

    sink: fp32 (1, heads), which joins the sum of the softmax, with a gradient. deterministic and sm_margin change
    nothing: every backward is deterministic, and no multiprocessor is left alone.
    Returns (out, lse), lse fp32 (total_q, heads), -inf for a query without a key and a sink, without a gradient.
    NotImplementedError for several sinks.
    """
    if type(deterministic) is not bool or type(sm_margin) is not int:
        raise TypeError(f"deterministic, sm_margin: got {deterministic!r}, {sm_margin!r}, wanted a bool and an int")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted (total, heads, head_dim)")
    if sink is not None and sink.shape != (1, q.shape[1]):
        raise NotImplementedError(f"sink: got shape {tuple(sink.shape)}, wanted (1, {q.shape[1]}), one for each head")
    ranges = ranges_of_slices(q_ranges, k_ranges, attn_type_map, q.shape[0])
    result: Any = flash_attn_ranges_func(
        q[None], k[None], v[None], ranges, softmax_scale=softmax_scale, softcap=softcap,
        s_aux=None if sink is None else sink[0], return_lse=True,
    )  # fmt: skip
    lse = result[1][0].detach().T
    return result[0][0], lse.masked_fill(lse == torch.inf, -torch.inf)


def ranges_of_slices(
    q_ranges: torch.Tensor, k_ranges: torch.Tensor, attn_type_map: torch.Tensor | None, total_q: int
) -> torch.Tensor:
    """The `ranges` of `flash_attn_ranges_func`, int32 (1, 1, total_q, 2, 2), of slices. Waits for the GPU.

    q_ranges, k_ranges: int32 (slices, 2): the queries of [start, end) see the keys of [start, end).
    attn_type_map: int32 (slices,), None for zeros. 0: every query of the slice sees all its keys. 1: the last query
    sees all, each query before it one key less at the end. 2: the first query sees all, each query behind it one key
    less at the beginning. 3: both.
    ValueError for a query whose slices have more than two separate ranges of keys.
    """
    slices = q_ranges.shape[0]
    kinds = q_ranges.new_zeros(slices) if attn_type_map is None else attn_type_map
    for name, x, shape in (
        ("q_ranges", q_ranges, (slices, 2)), ("k_ranges", k_ranges, (slices, 2)), ("attn_type_map", kinds, (slices,)),
    ):  # fmt: skip
        if x.dtype is not torch.int32:
            raise TypeError(f"{name}: got {x.dtype}, wanted int32")
        if tuple(x.shape) != shape or x.device != q_ranges.device:
            raise ValueError(f"{name}: got shape {tuple(x.shape)} on {x.device}, wanted {shape} on {q_ranges.device}")
    if bool(((kinds < 0) | (kinds > 3)).any()):
        raise ValueError(f"attn_type_map: got {kinds.tolist()}, wanted numbers from 0 to 3")
    step = max(_CHUNK // max(slices, 1), 1)
    parts = [
        _ranges(torch.arange(first, min(first + step, total_q), device=q_ranges.device), q_ranges, k_ranges, kinds)
        for first in range(0, total_q, step)
    ]
    return torch.cat(parts)[None, None].to(torch.int32) if parts else q_ranges.new_zeros((1, 1, 0, 2, 2))


def _ranges(rows: torch.Tensor, q_ranges: torch.Tensor, k_ranges: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """The two ranges of keys of some queries, (rows, 2, 2)."""
    place = rows[:, None]
    (q_start, q_end), (k_start, k_end) = q_ranges.long().T, k_ranges.long().T
    start = k_start + torch.where((kinds & _BEGINS_AT_DIAGONAL) != 0, place - q_start, 0)  # (rows, slices)
    end = k_end - torch.where((kinds & _ENDS_AT_DIAGONAL) != 0, q_end - 1 - place, 0)
    start = start.clamp_min(k_start)
    far = torch.iinfo(torch.int32).max
    there = (place >= q_start) & (place < q_end) & (start < end)
    ranges = torch.zeros((rows.shape[0], 2, 2), dtype=torch.long, device=rows.device)
    for index in range(2):  # the first range that is left, with the ranges that touch it
        low = torch.where(there, start, far).amin(1) if there.shape[1] else torch.full_like(rows, far)
        high = low
        while True:
            touching = there & (start <= high[:, None])
            reached = torch.where(touching, end, 0).amax(1).maximum(high) if there.shape[1] else high
            if torch.equal(reached, high):
                break
            high = reached
        ranges[:, index] = torch.stack([low, high], 1).masked_fill((low == far)[:, None], 0)
        there = there & (start > high[:, None])
    if bool(there.any()):
        row = int(rows[there.any(1)][0])
        raise ValueError(
            f"q_ranges, k_ranges: query {row} has more than two separate ranges of keys, wanted two at most: add "
            "results of several calls by their lse"
        )
    return ranges
