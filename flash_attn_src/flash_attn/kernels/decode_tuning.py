"""Tiles of the kernels for a cache of keys and values, and how many parts the keys are split into.

cuda: measured on an H200 (2026-11-22): bf16 by 6 shapes of decoding and 12 of more queries, dims 64 to 256, which
fp16 and decoding in FP8 follow, fp32 by 2 or 3; the forward in FP8 by `benchmarks/tune.py`, which measures rows of
this table too.
cdna, rdna2, rdna3: no such GPU was at hand; the largest tiles of a list that spill no vector register to memory, and
for FP8 and `extend` on cdna those whose main loop counts least for a key (vector instructions, LDS, matrix). On rdna
some spill: 63 to 89 registers `extend-paged` in fp32 with dim 128, 209 `decode-paged` in fp16 with dim 128 on rdna2,
others up to 18.
"""

from __future__ import annotations

from functools import lru_cache

from flash_attn.kernels import tuning
from flash_attn.kernels.tuning import Config
from flash_attn.runtime.variants import Variant

# Programs that share a multiprocessor (compute unit) with their loads in flight.
RESIDENT = 2
MAX_SPLITS = 256

# Costs in time of one block of keys: starting a program, launching the combining kernel, combining a part of a row.
_START = 2.0
_COMBINE = 4.0
_PART = 0.0015


def config(target: str, variant: Variant) -> Config:
    """The launch configuration of one variant on one target. Raises ValueError for an unknown target."""
    if variant.op == "append":
        return Config(16, 0, 4)
    if variant.op == "combine":
        return Config(1, 32, 4) if variant.kind == "wide" else Config(1, 8, 1)
    if variant.op in ("fp8-amax", "fp8-cast", "fp8-cast-v"):
        return Config(128, 256, 4)  # 128: see fp8_cast.COLUMNS
    if variant.op == "fp8-fwd":
        return _FP8[tuning.family(target), variant.block_d][variant.kind == "any"]
    bits = 32 if variant.dtype == "fp32" else 16
    table = _TABLE[tuning.family(target)]
    row = (variant.op, bits, variant.block_d)
    return table.get(row) or table[variant.op.removesuffix("-paged"), bits, variant.block_d]


@lru_cache(maxsize=4096)
def splits(programs: int, blocks: int, units: int, rows: int) -> int:
    """How many parts to split `blocks` blocks of keys into, where `programs` programs of so many rows share `units`
    units.

    The least of an estimate: waves of programs, each as long as its blocks, and the work of combining.
    """
    slots = units * RESIDENT
    best, least = 1, float("inf")
    for count in range(1, min(max(blocks, 1), MAX_SPLITS) + 1):
        waves = -(-programs * count // slots)
        time = waves * (-(-blocks // count) + _START)
        if count > 1:
            time += _COMBINE + _PART * rows * count
        if time < 0.97 * least:  # more parts only where they are sure to pay
            best, least = count, time
    return best


C = Config
# Matrix instructions of 16 rows where a warp has no 32 of its own: two warps that share rows pass the probabilities to
# each other through LDS, 1 or 2 bytes at a time. By the count of gfx942's main loops (vector cycles, LDS, matrix) that
# is worth 1.3 to 1.9 for `extend`, and with tiles that fit it 2.2 and 2.7 for FP8 of dims 128 and 256.
_ROWS_OF_16 = (("matrix_instr_nonkdim", 16),)
# (operation, element bits, head-dim bucket); "decode" and "extend" serve their paged ones too where those have no row.
_TABLE: dict[str, dict[tuple[str, int, int], Config]] = {
    "cuda": {
        ("decode", 16, 64): C(16, 64, 2, 3),
        ("decode", 16, 128): C(16, 32, 2, 4),
        ("decode", 16, 256): C(16, 32, 4, 3),
        ("decode", 32, 64): C(16, 32, 2, 3),
        ("decode", 32, 128): C(16, 16, 4, 3),
        ("decode", 32, 256): C(16, 32, 8, 2),
        # A page's number and then its keys: each of the two steps takes its share of the stages.
        ("decode-paged", 16, 64): C(16, 128, 4, 5),
        ("decode-paged", 16, 128): C(16, 64, 4, 5),
        ("decode-paged", 16, 256): C(16, 32, 4, 5),
        ("decode-paged", 32, 64): C(16, 64, 4, 2),
        ("extend", 16, 64): C(64, 64, 4, 4),
        ("extend", 16, 128): C(64, 64, 4, 3),
        ("extend", 16, 256): C(64, 32, 4, 2),
        ("extend", 32, 64): C(32, 32, 4, 2),
        ("extend", 32, 128): C(32, 32, 4, 1),
        ("extend", 32, 256): C(32, 32, 8, 1),
        ("extend-paged", 16, 64): C(64, 64, 4, 5),
        ("extend-paged", 16, 128): C(64, 64, 4, 5),
    },
    "cdna": {
        ("decode", 16, 64): C(16, 64, 4, 2),
        ("decode", 16, 128): C(16, 64, 4, 2),
        ("decode", 16, 256): C(16, 32, 4, 2),
        ("decode", 32, 64): C(16, 32, 4, 2),
        ("decode", 32, 128): C(16, 32, 4, 2),
        ("decode", 32, 256): C(16, 16, 4, 2),
        ("extend", 16, 64): C(64, 64, 4, 2, options=_ROWS_OF_16),
        ("extend", 16, 128): C(64, 64, 4, 2, options=_ROWS_OF_16),
        ("extend", 16, 256): C(64, 32, 4, 2, options=_ROWS_OF_16),
        ("extend", 32, 64): C(64, 32, 4, 2),
        ("extend", 32, 128): C(32, 32, 4, 2),
        ("extend", 32, 256): C(32, 16, 4, 2),
    },
    "rdna2": {
        ("decode", 16, 64): C(16, 32, 8, depth=16),
        ("decode", 16, 128): C(16, 32, 8, depth=16),
        ("decode", 16, 256): C(16, 32, 8, depth=16),
        ("decode", 32, 64): C(16, 32, 8, depth=16),
        ("decode", 32, 128): C(16, 32, 8, depth=16),
        ("decode", 32, 256): C(16, 16, 8, depth=16),
        ("decode-paged", 16, 128): C(16, 32, 4, depth=16),
        ("decode-paged", 32, 128): C(16, 32, 4, depth=16),
        ("extend", 16, 64): C(32, 16, 16, depth=16),
        ("extend", 16, 128): C(32, 16, 16, depth=16),
        ("extend", 16, 256): C(64, 16, 16, depth=16),
        ("extend", 32, 64): C(32, 16, 16, depth=16),
        ("extend", 32, 128): C(16, 16, 16, depth=16),
        ("extend", 32, 256): C(16, 16, 16, depth=16),
    },
    "rdna3": {
        ("decode", 16, 64): C(16, 64, 4),
        ("decode", 16, 128): C(16, 32, 4),
        ("decode", 16, 256): C(16, 16, 4),
        ("decode-paged", 16, 128): C(16, 64, 4, depth=32),
        ("decode-paged", 16, 256): C(16, 16, 8, depth=16),
        ("decode", 32, 64): C(16, 32, 8, depth=16),
        ("decode", 32, 128): C(16, 32, 4, depth=16),
        ("decode", 32, 256): C(16, 16, 8, depth=16),
        ("extend", 16, 64): C(64, 32, 4),
        ("extend", 16, 128): C(64, 32, 8, depth=32),
        ("extend", 16, 256): C(32, 16, 8, depth=16),
        ("extend", 32, 64): C(64, 32, 8, depth=16),
        ("extend", 32, 128): C(16, 16, 16, depth=16),
        ("extend", 32, 256): C(16, 16, 16, depth=16),
    },
}

# (family, head-dim bucket): (plain, any)
_FP8: dict[tuple[str, int], tuple[Config, Config]] = {
    ("cuda", 64): (C(128, 64, 4, 3), C(128, 64, 4, 3)),
    ("cuda", 128): (C(64, 128, 4, 3), C(64, 64, 4, 3)),
    ("cuda", 256): (C(128, 128, 8, 3), C(64, 64, 4, 3)),
    ("cdna", 64): (C(128, 64, 4, options=(("waves_per_eu", 2),)), C(128, 64, 4)),
    ("cdna", 128): (C(128, 64, 4, 2), C(128, 64, 8, options=_ROWS_OF_16)),
    ("cdna", 256): (C(128, 64, 8, 2, options=_ROWS_OF_16), C(128, 64, 8, options=_ROWS_OF_16)),
    ("rdna3", 64): (C(128, 32, 8), C(128, 32, 8)),
    ("rdna3", 128): (C(128, 32, 8), C(64, 32, 8)),
    ("rdna3", 256): (C(128, 32, 8), C(128, 16, 8)),
}
