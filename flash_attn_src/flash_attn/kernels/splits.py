"""Split-KV: how many splits of the keys are profitable."""

from __future__ import annotations

from functools import lru_cache

from flash_attn.kernels import planning


@lru_cache(maxsize=4096)
def profitable_splits(
    programs: int, blocks: int, units: int, rows: int, resident: int = planning.SPLIT_KV.resident
) -> int:
    """How many splits of `blocks` blocks of keys take the least time, by an estimate.

    programs: how many there are without splits. rows: the rows of queries of one program. units: compute units of the
    GPU. Each of them runs `resident` programs at once, `planning.SPLIT_KV.resident` by default.
    The estimate: rounds of programs, each as long as its blocks, and the time to combine the splits.
    """
    costs = planning.SPLIT_KV
    slots = units * (costs.resident if resident is None else resident)
    best, least = 1, float("inf")
    for count in range(1, min(max(blocks, 1), costs.max_splits) + 1):
        rounds = -(-programs * count // slots)
        time = rounds * (-(-blocks // count) + costs.start)
        if count > 1:
            time += costs.combine + costs.part * rows * count
        if time < costs.gain * least:  # more splits only where they are surely profitable
            best, least = count, time
    return best
