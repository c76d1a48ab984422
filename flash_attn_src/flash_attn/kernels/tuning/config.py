"""One launch configuration, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Config(NamedTuple):
    """One launch configuration.

    block_m, block_n: rows and columns of a tile.
    depth: the head-dim piece of the score products, 0 for the whole head dim at once (see `tiles.deep_dot`).
    options: the compiler's own, beside warps and stages.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    depth: int = 0
    options: tuple[tuple[str, int | str], ...] = ()


C = Config  # as the tables write it

# (operation, element bits, size) -> one configuration for each kind in the order of `operation.KINDS`. The last one
# serves the kinds after it too, and always `any`.
Rows = Mapping[tuple[str, int, int], tuple[Config, ...]]
Options = tuple[tuple[str, int | str], ...]

# Compiler options that a search on a GPU tries for AMD GPUs. `waves_per_eu` trades registers of a program for programs
# beside it. `schedule_hint` orders the instructions of a loop with two products.
WAVES: Options = tuple(("waves_per_eu", waves) for waves in (1, 2, 3, 4))
ORDERS: Options = tuple(
    ("schedule_hint", order)
    for order in ("none", "attention", "memory-bound-attention", "attention,memory-bound-attention")
)

BOTH_ORDERS: Options = (("schedule_hint", "attention,memory-bound-attention"),)
# A thread holds a few keys of the same column and writes them to shared memory side by side, so that an operand which
# runs along the keys is read 16 bytes at a time (`switches`). Triton does so for gfx942 without being asked.
TRANSPOSES: Options = (("in_thread_transpose", 1),)
# Keys and values are copied straight to shared memory, which is then padded, so that reads of values have no bank
# conflicts (`switches`). gfx950 alone has such copies of 16 bytes.
DIRECT: Options = (("async_copy", 1),)
# A wave has priority from the scaling of its output until its next scores are there. The compile stage alone does so
# (`switches`).
PRIORITIES: Options = (("wave_priorities", 1),)
ROWS_OF_16: Options = (("matrix_instr_nonkdim", 16),)
