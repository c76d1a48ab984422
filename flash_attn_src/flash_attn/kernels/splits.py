"""Split-KV: how many splits of the keys are profitable."""

from __future__ import annotations

from functools import lru_cache

# Programs that share a compute unit (a multiprocessor) while their loads are in flight.
RESIDENT = 2
# The same of multi-head latent attention, whose programs have more in flight: on an H100 one for each multiprocessor
# took 0.8 of the time of two, with 1 sequence of 32768 keys, 0.9 with one of 131072 and with 4 of 16384 (2026-11-25).
LATENT_RESIDENT = 1
MAX_SPLITS = 256

# Costs, in the time of one block of keys: starting a program, launching the combining kernel, combining one split of a
# row. Fitted to an H200, 2026-11-22.
_START = 2.0
_COMBINE = 4.0
_PART = 0.0015


@lru_cache(maxsize=4096)
def profitable_splits(programs: int, blocks: int, units: int, rows: int, resident: int = RESIDENT) -> int:
    """How many splits of `blocks` blocks of keys take the least time, by an estimate.

    programs: how many there are without splits. rows: the rows of queries of one program. units: compute units of the
    GPU. Each of them runs `resident` programs at once.
    The estimate: rounds of programs, each as long as its blocks, and the time to combine the splits.
    """
    slots = units * resident
    best, least = 1, float("inf")
    for count in range(1, min(max(blocks, 1), MAX_SPLITS) + 1):
        rounds = -(-programs * count // slots)
        time = rounds * (-(-blocks // count) + _START)
        if count > 1:
            time += _COMBINE + _PART * rows * count
        if time < 0.97 * least:  # more splits only where they are surely profitable
            best, least = count, time
    return best
