"""Loops that each wait for one unit of a GPU. `flash_attn.firstlight` times them, and the simulator's clock plays them.

A launch says how often each loop runs. The difference of two launches, divided by the difference of the counts, is the
time of one turn of a loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import RUNTIME_ARGUMENTS

LANES = 32  # elements of a vector: a lane holds one at most
CHAIN = 16  # instructions of a turn that need each other's results
STREAM = 4096  # elements of the table that a program reads in a turn
_LANES, _CHAIN, _STREAM = tl.constexpr(LANES), tl.constexpr(CHAIN), tl.constexpr(STREAM)


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def probe(x, table, out, adds, exps, exchanges, loads, barriers, products, streams, BLOCK_M: tl.constexpr):
    """One program writes LANES numbers to out (programs, LANES). The last seven arguments are turns of loops.

    x: (BLOCK_M, BLOCK_M), small numbers. table: int32; element i is the place of the element to load after it.
    adds, exps: CHAIN instructions that need each other's results. exchanges: one through shared memory, of CHAIN.
    loads: one load that needs the one before. barriers: CHAIN barriers. products: a matrix product of BLOCK_M cubed.
    streams: a load of STREAM elements, no program's elements twice.
    """
    pid = tl.program_id(0)
    lane = tl.arange(0, _LANES)
    b_value = tl.load(x + lane).to(tl.float32)  # [LANES]
    for _ in tl.range(0, adds):
        for _ in tl.static_range(_CHAIN):
            b_value = b_value * 0.5 + 1.0
    for _ in tl.range(0, exps):
        for _ in tl.static_range(_CHAIN):
            b_value = tl.exp2(b_value * -0.5)
    turned = (lane * 5 + 1) % _LANES  # [LANES]
    for _ in tl.range(0, exchanges):
        for _ in tl.static_range(_CHAIN):
            b_value = tl.gather(b_value, turned, 0)
    place = lane  # [LANES]
    for _ in tl.range(0, loads):
        place = tl.load(table + place)
    for _ in tl.range(0, barriers):
        for _ in tl.static_range(_CHAIN):
            tl.debug_barrier()
    offs = tl.arange(0, BLOCK_M)
    b_x = tl.load(x + offs[:, None] * BLOCK_M + offs[None, :])  # [BLOCK_M, BLOCK_M]
    b_sum = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    for _ in tl.range(0, products):
        b_sum = tl.dot(b_x, b_x, b_sum)
    b_read = tl.zeros((_STREAM,), tl.int32)
    start = table + pid.to(tl.int64) * streams * _STREAM
    for turn in tl.range(0, streams):
        b_read += tl.load(start + turn.to(tl.int64) * _STREAM + tl.arange(0, _STREAM))
    rest = tl.sum(tl.sum(b_sum, 1), 0) + tl.sum(b_read, 0).to(tl.float32)
    tl.store(out + pid * _LANES + lane, b_value + place.to(tl.float32) + rest)
