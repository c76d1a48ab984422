"""Numbers by which a launch is planned: limits, costs of split-KV, the order of programs, tiles of AMD's kernels.

This module is their home, with `flags`, `operations` and `assembly`. `facts` is what a kernel store's manifest carries,
so that the Rust crate plans by the same numbers. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from flash_attn.kernels import assembly, flags, modifiers
from flash_attn.kernels.operation import DTYPES, SPARSE_BLOCK
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.value_dims import LATENT_DIM


class WholeCost(NamedTuple):
    """Times of 64 keys in the forward kernel, in microseconds of one multiprocessor, for head dims up to `head_dim`.

    alone: with one tile of queries; tile: for each of several tiles; read: for keys and values, which the tiles of a
    head share.
    """

    head_dim: int
    alone: float
    tile: float
    read: float


class SplitCost(NamedTuple):
    """Times of 64 keys in `decode` and in `extend`, as in `WholeCost`."""

    head_dim: int
    decode: float
    extend: float


class SplitKv(NamedTuple):
    """Split-KV: when it is profitable, and how many splits are.

    decode_rows, extend_rows: rows of queries of a key head that `decode` and `extend` take at once.
    least_keys: below this many keys split-KV is not considered, because kernel time is negligible.
    start_whole, start_decode, start_extend: fixed times of a call in microseconds; join: to combine a row of 128
    columns; margin: how much faster the splits must be.
    resident: programs that share a multiprocessor while their loads are in flight.
    latent_resident: of multi-head latent attention, whose programs have more in flight: on an H100 (2026-11-25) one for
    each multiprocessor took 0.8 of the time of two, with 1 sequence of 32768 keys, 0.9 with one of 131072 and with 4 of
    16384. latent_dim: its widest keys beside the values. max_splits: of one call.
    start, combine, part: in the time of one block of keys: starting a program, launching the kernel that combines,
    combining one split of a row. gain: more splits are taken where they need less than this share of the time.
    many_splits, few_rows: more splits than this of at most so many rows are combined many at a time, because latencies
    are the time then.
    page_unit: pages are looked up in units of this many rows, else of one row, by a product in fp32, which is exact
    below max_page_units (see `decode._load_paged`); endless: the page size of a cache without pages.
    """

    decode_rows: int = 16
    extend_rows: int = 64
    least_keys: int = 512
    # Fitted to 1734 calls on an H200 (2026-11-22; 16-bit types, 1 to 64 sequences, 1 to 256 queries, 600 to 30000 keys,
    # 1 to 32 key heads): the chosen kernel took 0.4 % longer than the better one in the mean. Head dim 512 was not
    # measured so: its forward's tile has 64 rows, and `extend` takes at least as long.
    whole: tuple[WholeCost, ...] = (
        WholeCost(64, 0.59, 0.36, 0.5),
        WholeCost(96, 1.61, 1.14, 1.37),
        WholeCost(128, 0.82, 0.62, 0.93),
        WholeCost(192, 1.67, 1.89, 2.49),
        WholeCost(256, 2.04, 2.55, 2.95),
        WholeCost(512, 5.5, 5.5, 5.9),
    )
    split: tuple[SplitCost, ...] = (
        SplitCost(64, 0.43, 0.5),
        SplitCost(128, 0.93, 0.84),
        SplitCost(256, 1.8, 2.11),
        SplitCost(512, 3.6, 6.5),
    )
    start_whole: float = 4.0
    start_decode: float = 8.0
    start_extend: float = 10.0
    join: float = 0.0005
    margin: float = 1.05
    resident: int = 2
    latent_dim: int = LATENT_DIM
    latent_resident: int = 1
    max_splits: int = 256
    # Fitted to an H200, 2026-11-22.
    start: float = 2.0
    combine: float = 4.0
    part: float = 0.0015
    gain: float = 0.97
    many_splits: int = 16  # H200, 2026-11-22
    few_rows: int = 256
    page_unit: int = 16
    max_page_units: int = 1 << 22
    endless: int = 1 << 30


class Grid(NamedTuple):
    """How programs share the blocks of a call.

    chunk: planes that `common.program_order` takes at once where blocks have unequal work. An H200 (2026-11-21) gains 4
    to 8 % with 8 planes over 1; even blocks lose as much in dk and dv to a colder cache; taking all planes loses again.
    packed_share: a fraction, numerator and denominator. The grid has the blocks of the packed rows where they are less
    than this share of the blocks that the grid would have if every sequence were as long as the longest. A program that
    has to find its sequence takes a microsecond more. On an H200 (2026-11-22) it is profitable with 0.6 of the blocks
    and not with 0.8.
    rows_worth_splits: queries of all heads that a program of dk and dv needs before its sharing is worth the sum.
    programs_of_unit: programs of dk and dv for each multiprocessor, up to which they are shared. On an H200
    (2026-11-22), with 8 query heads to one key head of 128, causal, the backward of 2048 tokens takes 0.39 times as
    long, of 8192 0.52, of 16384 0.72; with 32 and 2048 0.21.
    """

    chunk: int = 8
    packed_share: tuple[int, int] = (2, 3)
    rows_worth_splits: int = 4096
    programs_of_unit: int = 3


class Composable(NamedTuple):
    """Composable Kernel: the head dims of its kernels, and the queries of a tile of its forward."""

    head_dims: tuple[int, ...] = (32, 64, 128, 256)
    rows: int = 128


class Fp8(NamedTuple):
    """Whole sequences in FP8. largest: the largest number of each format. columns: what a sequence of transposed values
    is a multiple of (`fp8_cast.COLUMNS`). results: element types, in the order of `fp8_fwd`'s argument kind.
    """

    largest: Mapping[str, float] = MappingProxyType({"fp8e4nv": 448.0, "fp8e4b8": 240.0})
    columns: int = 128
    results: tuple[str, ...] = ("bf16", "fp16", "fp32")


SPLIT_KV, GRID, COMPOSABLE, FP8 = SplitKv(), Grid(), Composable(), Fp8()


def facts(target: str) -> dict[str, Any]:
    """What the manifest of a target's store says of planning: docs/kernel-store.md."""
    return {
        "flags": {name: value for name, value in vars(flags).items() if name.isupper()} | modifiers.BITS,
        "operations": {
            name: {
                "sizes": row.sizes,
                "in_pieces": row.in_pieces,
                "kinds": {dtype: row.kinds_of(dtype) for dtype in DTYPES},
                "sizes_of_kind": dict(row.sizes_of_kind),
                "value_dims": dict(row.value_dims),
            }
            for name, row in OPERATIONS.items()
        },
        "mask_block": SPARSE_BLOCK,
        "split_kv": {
            **SPLIT_KV._asdict(),
            **{name: [row._asdict() for row in getattr(SPLIT_KV, name)] for name in ("whole", "split")},
        },
        "grid": GRID._asdict(),
        "composable": COMPOSABLE._asdict(),
        "fp8": {**FP8._asdict(), "largest": dict(FP8.largest)},
        "assembly": {
            **assembly.LIMITS._asdict(),
            "kernels": [row._asdict() for row in assembly.KERNELS if row.target == target],
        },
    }
