"""Split-KV: when to split the keys of a head among programs, and how to run a forward as such a call.

The kernels of a cache split the keys and join the results, and read the keys of a head once for all of its query heads.
Few queries of many keys, as in decoding, would otherwise leave most of a GPU idle.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flash_attn.calls import AttentionCall, CacheCall
from flash_attn.kernels.splits import RESIDENT
from flash_attn.options import SPLIT_KV
from flash_attn.runtime import device

# Rows of queries that share a key head, which `decode` takes at once, and `extend`.
DECODE_ROWS = 16
_EXTEND_ROWS = 64
# Below this many keys, split-KV is not considered, because kernel time is negligible.
_LEAST_KEYS = 512


class _Forward(NamedTuple):
    """Times of 64 keys in the forward kernel, in microseconds of one multiprocessor."""

    alone: float  # the forward kernel with one tile of queries
    tile: float  # each tile, with several tiles of queries
    read: float  # keys and values, which the tiles of a head share


class _Split(NamedTuple):
    """Times to process 64 keys on one multiprocessor, in microseconds."""

    decode: float
    extend: float


# By the head dim up to which they hold. Fitted to 1734 calls on an H200 (2026-11-22; 16-bit types, 1 to 64 sequences,
# 1 to 256 queries, 600 to 30000 keys, 1 to 32 key heads): the chosen kernel took 0.4 % longer than the better one in
# the mean. Head dim 512 was not measured so: its forward's tile has 64 rows, and `extend` takes at least as long.
_FORWARD = (
    (64, _Forward(0.59, 0.36, 0.5)),
    (96, _Forward(1.61, 1.14, 1.37)),
    (128, _Forward(0.82, 0.62, 0.93)),
    (192, _Forward(1.67, 1.89, 2.49)),
    (256, _Forward(2.04, 2.55, 2.95)),
    (512, _Forward(5.5, 5.5, 5.9)),
)
_SPLIT = ((64, _Split(0.43, 0.5)), (128, _Split(0.93, 0.84)), (256, _Split(1.8, 2.11)), (512, _Split(3.6, 6.5)))
# Fixed time of a call, and the time to combine a row of 128 columns, in microseconds.
_START_FORWARD, _START_DECODE, _START_EXTEND = 4.0, 8.0, 10.0
_JOIN = 0.0005
# The least gain for which a forward of one launch is split: split-KV takes the host 49 us instead of 22.
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
    """Whether split-KV is faster than the forward kernel, whose tiles have block_m rows, by at least so many
    microseconds on a GPU of so many multiprocessors."""
    forward = next(times for dim, times in _FORWARD if head_dim <= dim)
    split = next(times for dim, times in _SPLIT if head_dim <= dim)
    blocks = -(-seqlen_k // 64)
    shared = seqlen_q * (heads // heads_k)
    if shared <= DECODE_ROWS:
        rows, block, time = DECODE_ROWS, split.decode, _START_DECODE
    else:
        rows, block, time = _EXTEND_ROWS, split.extend, _START_EXTEND
    programs = -(-shared // rows) * heads_k * batch
    time += block * programs * blocks / units
    if programs < RESIDENT * units:
        time += _JOIN * batch * seqlen_q * heads * head_dim / 128
    tiles = -(-seqlen_q // block_m) * heads * batch
    busy = max(forward.tile * tiles, forward.read * heads_k * batch) / units
    whole = _START_FORWARD + blocks * max(forward.alone, busy)
    return 1.05 * time + least < whole


def is_profitable(block_m: int, call: AttentionCall) -> bool:
    """Whether split-KV makes a forward without dropout so much faster that it is worth its time on the host."""
    seqlen_k = call.longest_k
    if seqlen_k < _LEAST_KEYS:
        return False
    seqlen_q = call.longest_q
    left, right = call.options.window_size
    causal = call.options.causal
    seen = seqlen_k
    if left >= 0 and (causal or right >= 0):
        seen = min(seen, left + seqlen_q + (0 if causal else right))
    q = call.q
    units = device.of(q.get_device()).compute_units
    head_dim = max(q.shape[-1], call.v.shape[-1])
    return are_faster(call.batch, seqlen_q, seen, q.shape[-2], call.k.shape[-2], head_dim, block_m, units, _HOST)


def as_cache_call(block_m: int, call: AttentionCall) -> CacheCall | None:
    """Converts a forward to a call over a cache if the cache serves it and is faster than the forward kernel, else
    returns None.

    block_m: the rows of the forward kernel's tiles.
    """
    if SPLIT_KV.unserved(call) is not None or not is_profitable(block_m, call):
        return None
    return cache_call_of(call)


def cache_call_of(call: AttentionCall) -> CacheCall:
    """A forward that `SPLIT_KV` serves as a call over a cache."""
    k, v, lengths, lines = call.k, call.v, call.seqused_k, None
    if call.cu_seqlens_k is not None:
        if lengths is None:
            lengths = call.cu_seqlens_k.diff()
        if call.block_table is None:  # every sequence is a cache line that starts at its own row
            lines = call.cu_seqlens_k[:-1]
            k, v = (x.as_strided((1, *x.shape), (x.stride(0), *x.stride())) for x in (k, v))
    return CacheCall(
        q=call.q, k_cache=k, v_cache=v, options=call.options, cache_seqlens=lengths, cache_batch_idx=lines,
        cache_leftpad=call.leftpad_k, block_table=call.block_table, out=call.out, cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=call.longest_q, max_seqlen_k=call.longest_k,
    )  # fmt: skip
