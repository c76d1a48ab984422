"""One launch configuration, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flash_attn.kernels.operation import KINDS


class Config(NamedTuple):
    """One launch configuration.

    block_m, block_n: rows and columns of a tile.
    block_k: the head-dim piece of the score products, 0 for the whole head dim at once (see `tiles.deep_dot`).
    options: compiler options other than warps and stages.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    block_k: int = 0
    options: tuple[tuple[str, int | str], ...] = ()


C = Config  # as the tables write it

# The score modifiers with their own tile. Sinks use the tile of `plain`, because they are added after the loop. A bias
# has separate rows.
MODIFIERS = tuple(kind for kind in KINDS if kind != "bias")
Tiles = Mapping[str, Config]
# (operation, element bits, size) -> score modifier -> its configuration.
Rows = Mapping[tuple[str, int, int], Tiles]
Options = tuple[tuple[str, int | str], ...]


def tiles(row: Config | Mapping[str, Config], *, base: Tiles | None = None) -> Tiles:
    """One row of a table: a configuration for each of MODIFIERS.

    row: one configuration for all modifiers, or configurations by the names of modifiers, separated by spaces, where
    "others" stands for the modifiers that the row does not name. base: the row that serves them instead. Without both,
    a modifier that the row does not name has the configuration of `any`.
    Raises ValueError where a name is unknown, or a modifier has two configurations or none.
    """
    row = {"others": row} if isinstance(row, Config) else row
    named = [(name, config) for names, config in row.items() if names != "others" for name in names.split()]
    known = dict.fromkeys(MODIFIERS, row["others"]) if "others" in row else dict(base or {})
    found = known | dict(named)
    if "any" in found:
        found = dict.fromkeys(MODIFIERS, found["any"]) | found
    if len(dict(named)) < len(named) or set(found) != set(MODIFIERS):
        raise ValueError(f"a row of tiles names {sorted(row)}: each of {', '.join(MODIFIERS)} needs one configuration")
    return {name: found[name] for name in MODIFIERS}


# Compiler options that a search on a GPU tries for AMD GPUs. `waves_per_eu` gives a program fewer registers, so that
# more programs run on a SIMD. `schedule_hint` orders the instructions of a loop with two products.
WAVES: Options = tuple(("waves_per_eu", waves) for waves in (1, 2, 3, 4))
ORDERS: Options = tuple(
    ("schedule_hint", order)
    for order in ("none", "attention", "memory-bound-attention", "attention,memory-bound-attention")
)

BOTH_ORDERS: Options = (("schedule_hint", "attention,memory-bound-attention"),)
# A thread holds a few keys of the same column and writes them to shared memory side by side, so that an operand which
# runs along the keys is read 16 bytes at a time (`switches`). Triton does so for gfx942 without this option.
TRANSPOSES: Options = (("in_thread_transpose", 1),)
# dv and dk in two rounds over the queries, with one accumulator each (`backward_dkdv`).
DK_APART: Options = (("dk_apart", 1),)
# LLVM schedules for one wave on a SIMD, so it starts loads earlier. Kernels that take 256 registers lose no wave by it.
ONE_WAVE: Options = (("waves_per_eu", 1),)
# A wave scales its output only when the maximum of one of its rows has grown by much (`lazy_rescale`).
LAZY_RESCALE: Options = (("lazy_rescale", 1),)
# Keys and values are copied straight to shared memory, which is then padded, so that reads of values have no bank
# conflicts (`switches`). gfx950 alone has such copies of 16 bytes.
ASYNC_COPY: Options = (("async_copy", 1),)
# A wave has priority from the scaling of its output until its next scores are computed. Only the compile stage does so
# (`switches`).
PRIORITIES: Options = (("wave_priorities", 1),)
ROWS_OF_16: Options = (("matrix_instr_nonkdim", 16),)
