"""Split-KV: when to split the keys of a head among programs, and how to run a forward as such a call.

The kernels of a cache split the keys and join the results, and read the keys of a head once for all of its query heads.
Few queries of many keys, as in decoding, would otherwise leave most of a GPU idle.
"""

from __future__ import annotations

from functools import lru_cache

from flash_attn.call.calls import AttentionCall, CacheCall
from flash_attn.call.options import SPLIT_KV
from flash_attn.core import device
from flash_attn.kernels import planning

# The least gain for which a forward of one launch is split: by its plan, split-KV takes the host 20 us instead of 14.
_HOST = 6.0


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
    costs = planning.SPLIT_KV
    whole_cost = next(row for row in costs.whole if head_dim <= row.head_dim)
    split_cost = next(row for row in costs.split if head_dim <= row.head_dim)
    blocks = -(-seqlen_k // 64)
    shared = seqlen_q * (heads // heads_k)
    if shared <= costs.decode_rows:
        rows, block, time = costs.decode_rows, split_cost.decode, costs.start_decode
    else:
        rows, block, time = costs.extend_rows, split_cost.extend, costs.start_extend
    programs = -(-shared // rows) * heads_k * batch
    time += block * programs * blocks / units
    if programs < costs.resident * units:
        time += costs.join * batch * seqlen_q * heads * head_dim / 128
    tiles = -(-seqlen_q // block_m) * heads * batch
    busy = max(whole_cost.tile * tiles, whole_cost.read * heads_k * batch) / units
    whole = costs.start_whole + blocks * max(whole_cost.alone, busy)
    return costs.margin * time + least < whole


def is_few(seqlen_q: int, heads: int, heads_k: int) -> bool:
    """Whether one tile of `decode` holds all queries that share a key head."""
    return seqlen_q * heads <= planning.SPLIT_KV.decode_rows * heads_k


def is_profitable(block_m: int, call: AttentionCall) -> bool:
    """Whether split-KV makes a forward without dropout so much faster that it is worth its time on the host."""
    seqlen_k = call.longest_k
    if seqlen_k < planning.SPLIT_KV.least_keys:
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
