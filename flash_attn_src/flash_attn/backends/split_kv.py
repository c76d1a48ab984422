"""When to share out the keys among programs, in parts that are joined, and an attention's forward as such a call.

The kernels of a cache do that, and read the keys of a head once for all of its query heads: few queries of many keys,
as decoding makes them with a cache of its own or without, would else leave most of a GPU idle.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from flash_attn.calls import CacheCall
from flash_attn.kernels.splits import RESIDENT
from flash_attn.runtime.launch import compute_units

# Rows of queries that share a key head, which `decode` takes at once, and `extend`.
DECODE_ROWS = 16
_EXTEND_ROWS = 64
# Keys below which nothing is asked: the host's time is all that there is to gain.
_LEAST_KEYS = 512


class _Forward(NamedTuple):
    """Times of 64 keys in the forward kernel, in microseconds of one multiprocessor."""

    alone: float  # where it has one tile of queries
    tile: float  # each tile, where it has several
    read: float  # keys and values, which the tiles of a head share


class _Parts(NamedTuple):
    """Times of 64 keys, in microseconds of one multiprocessor."""

    decode: float
    extend: float


# By the head dim up to which they hold. Fitted to 1734 calls on an H200 (2026-11-22; 16-bit types, 1 to 64 sequences,
# 1 to 256 queries, 600 to 30000 keys, 1 to 32 key heads): the chosen kernel took 0.4 % longer than the better one in
# the mean.
_FORWARD = (
    (64, _Forward(0.59, 0.36, 0.5)),
    (96, _Forward(1.61, 1.14, 1.37)),
    (128, _Forward(0.82, 0.62, 0.93)),
    (192, _Forward(1.67, 1.89, 2.49)),
    (256, _Forward(2.04, 2.55, 2.95)),
)
_PARTS = ((64, _Parts(0.43, 0.5)), (128, _Parts(0.93, 0.84)), (256, _Parts(1.8, 2.11)))
# Microseconds of a call beside its blocks, and to join a row of 128 columns.
_START_FORWARD, _START_DECODE, _START_EXTEND = 4.0, 8.0, 10.0
_JOIN = 0.0005
# What has to be gained where the forward is one launch: parts take the host 49 us instead of 22.
_HOST = 20.0


@lru_cache(maxsize=4096)
def are_faster(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    heads_k: int,
    head_dim: int,
    block_m: int,
    units: int,
    least: float = 0.0,
) -> bool:
    """Whether parts of the keys are faster than the forward kernel, whose tiles have block_m rows, by at least so many
    microseconds on a GPU of so many multiprocessors."""
    forward = next(times for dim, times in _FORWARD if head_dim <= dim)
    in_parts = next(times for dim, times in _PARTS if head_dim <= dim)
    blocks = -(-seqlen_k // 64)
    shared = seqlen_q * (heads // heads_k)
    if shared <= DECODE_ROWS:
        rows, block, parts = DECODE_ROWS, in_parts.decode, _START_DECODE
    else:
        rows, block, parts = _EXTEND_ROWS, in_parts.extend, _START_EXTEND
    programs = -(-shared // rows) * heads_k * batch
    parts += block * programs * blocks / units
    if programs < RESIDENT * units:
        parts += _JOIN * batch * seqlen_q * heads * head_dim / 128
    tiles = -(-seqlen_q // block_m) * heads * batch
    busy = max(forward.tile * tiles, forward.read * heads_k * batch) / units
    whole = _START_FORWARD + blocks * max(forward.alone, busy)
    return 1.05 * parts + least < whole


def pay(
    block_m: int,
    q: torch.Tensor,
    k: torch.Tensor,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_left: int,
    window_right: int,
) -> bool:
    """Whether a forward without dropout is enough faster in parts to pay for what they cost the host."""
    if max_seqlen_k < _LEAST_KEYS:
        return False
    seen = max_seqlen_k
    if window_left >= 0 and (causal or window_right >= 0):
        seen = min(seen, window_left + max_seqlen_q + (0 if causal else window_right))
    units = compute_units(q.get_device())
    return are_faster(batch, max_seqlen_q, seen, q.shape[-2], k.shape[-2], q.shape[-1], block_m, units, _HOST)


def as_cache_call(
    block_m: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> CacheCall | None:
    """The forward of a backend, without dropout, as a call over a cache where that is faster than the forward kernel,
    whose tiles have block_m rows; else None. Arguments as in flash_attn.backends.torch.forward."""
    if cu_seqlens_q is None:
        batch, max_seqlen_q = q.shape[:2]
        max_seqlen_k = k.shape[1] if block_table is None else max_seqlen_k
    else:
        batch = cu_seqlens_q.shape[0] - 1
    if not pay(block_m, q, k, batch, max_seqlen_q, max_seqlen_k, causal, window_left, window_right):
        return None
    lengths, lines = seqused_k, None
    if cu_seqlens_k is not None:
        if lengths is None:
            lengths = cu_seqlens_k.diff()
        if block_table is None:  # every sequence is a line that starts at a row of its own
            lines = cu_seqlens_k[:-1]
            k, v = (x.as_strided((1, *x.shape), (x.stride(0), *x.stride())) for x in (k, v))
    return CacheCall(
        q, k, v, softmax_scale, None, None, None, None, lengths, lines, leftpad_k, block_table, causal, window_left,
        window_right, softcap, True, alibi_slopes, 0, out, cu_seqlens_q, max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
