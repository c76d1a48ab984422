"""Tiles of CDNA GPUs. No such GPU was available.

clock: of a list of tiles, the one with the fewest cycles by the clock of `python -m amdgpu_simulator cycles`, with
global loads of 500 and of 900 cycles. Counted for each kind in bf16 (`any`: dropout with ALiBi, not for head dim 32) on
gfx942, which counts twice, gfx90a and gfx950. fp16 was compiled to check its registers. A target has a row of its own
where another tile gains a third there, or 5 % in the plain forward, whose rows are by the mended clock with loads of
800 cycles. Among tiles within a few percent of each other, the one with fewer LDS bank conflicts (plain backward of
head dim 64). 256 rows gain up to 8 % more, lose more than that to windows and short causal calls, and are not taken.
registers: of a list of tiles, the largest that spills no vector register to scratch.

What the clock showed: two stages gain more than a second wave on the SIMD, because a wave's loads run under its own
arithmetic. Two warps gain more than four, because fewer warps wait for each other. AMD's orders of the instructions
gain nearly always. With Triton 3.7.1 only gfx942's plain forwards of 192 and 256 (at most 27) and gfx950's plain dk and
dv of 128 (45) spill vector registers to scratch, which the clock prices. With other versions of Triton, some kernels
that take more than 300 registers do.

A lazy rescale (`lazy_rescale`) costs time on every target: docs/notes/clock.md has the cycles.
"""

from __future__ import annotations

from flash_attn.kernels.tuning.config import (
    ASYNC_COPY,
    BOTH_ORDERS,
    ORDERS,
    PRIORITIES,
    ROWS_OF_16,
    WAVES,
    C,
    Options,
    Rows,
    tiles,
)

OPTIONS: Options = WAVES + ORDERS

ROWS: Rows = {
    # fwd, 16 bits: clock, 2026-11-24.
    ("fwd", 16, 32): tiles(
        {"plain alibi dropout softcap": C(128, 64, 4, 2, options=BOTH_ORDERS), "others": C(128, 64, 4)}
    ),
    ("fwd", 16, 64): tiles(
        {
            "plain alibi dropout softcap": C(128, 64, 4, 2, options=BOTH_ORDERS),
            "others": C(128, 32, 4, 2, options=BOTH_ORDERS),
        }
    ),
    ("fwd", 16, 96): tiles(
        {"plain alibi dropout softcap": C(128, 64, 4, 2, options=BOTH_ORDERS), "others": C(128, 32, 4, 2)}
    ),
    ("fwd", 16, 128): tiles({"plain alibi softcap": C(128, 32, 4, 2, options=BOTH_ORDERS), "others": C(128, 32, 4, 2)}),
    ("fwd", 16, 192): tiles(C(128, 32, 4, 2, options=BOTH_ORDERS)),
    ("fwd", 16, 256): tiles(C(128, 32, 4, 2, options=BOTH_ORDERS)),
    # fwd, 16 bits: registers, 2026-11-24.
    ("fwd", 16, 512): tiles(C(64, 32, 4, options=ROWS_OF_16)),
    # fwd, 32 bits: registers, 2026-11-24.
    ("fwd", 32, 512): tiles(C(32, 16, 4)),
    # fwd, 32 bits: registers, 2026-11-21. 32 and 64: clock, 2026-11-28. 64 on gfx942 takes 20482 cycles, scheduled for
    # two waves 21287; the others take the same.
    ("fwd", 32, 32): tiles(C(128, 32, 4)),
    ("fwd", 32, 64): tiles(C(128, 32, 4)),
    ("fwd", 32, 128): tiles({"plain": C(128, 32, 8), "others": C(128, 32, 4)}),
    ("fwd", 32, 256): tiles(C(64, 32, 4)),
    # bwd-dkdv, 16 bits: clock, 2026-11-24.
    ("bwd-dkdv", 16, 32): tiles(
        {
            "plain": C(16, 128, 2, 2, options=ROWS_OF_16),
            "alibi dropout softcap": C(16, 64, 2, 2, options=ROWS_OF_16),
            "others": C(16, 128, 4),
        }
    ),
    # Head dim 64, plain, 2026-11-25: 10042 cycles on gfx942, 15526 on gfx90a, 6622 on gfx950; C(32, 64, 2) 16107, 21651
    # and 13520. Two thirds of its LDS cycles are bank conflicts, which these figures contain.
    ("bwd-dkdv", 16, 64): tiles(
        {"plain alibi dropout softcap": C(16, 64, 2, 2, options=ROWS_OF_16 + BOTH_ORDERS), "others": C(16, 128, 4)}
    ),
    ("bwd-dkdv", 16, 96): tiles(C(16, 64, 2, 2, options=BOTH_ORDERS)),
    ("bwd-dkdv", 16, 128): tiles(
        {
            "plain softcap": C(16, 128, 4, 2, options=BOTH_ORDERS),
            "alibi dropout": C(32, 64, 2, options=ROWS_OF_16),
            "others": C(32, 128, 4, options=ROWS_OF_16),
        }
    ),
    ("bwd-dkdv", 16, 192): tiles(C(16, 64, 4, 2, options=BOTH_ORDERS)),
    ("bwd-dkdv", 16, 256): tiles({"dropout": C(16, 64, 4, options=BOTH_ORDERS), "others": C(16, 64, 4)}),
    # bwd-dkdv: registers, 2026-11-24.
    ("bwd-dkdv", 16, 512): tiles({"plain": C(16, 32, 4), "others": C(16, 16, 4)}),
    ("bwd-dkdv", 32, 512): tiles(C(16, 16, 4)),
    # bwd-dkdv, 32 bits: registers, 2026-11-21.
    ("bwd-dkdv", 32, 32): tiles({"plain": C(32, 128, 8), "others": C(64, 64, 4)}),
    ("bwd-dkdv", 32, 64): tiles({"plain": C(64, 64, 4), "others": C(32, 64, 4)}),
    ("bwd-dkdv", 32, 128): tiles({"plain": C(32, 32, 4), "others": C(16, 64, 4)}),
    ("bwd-dkdv", 32, 256): tiles(C(16, 32, 4)),
    # With a bias: clock, gfx942, 2026-11-25, head dims 64 and 128. The forward takes 11054 and 19475 cycles, dk and dv
    # 21176 and 33999; by half the keys of the plain tile 14764 and more, 26404 and more. dk and dv of 96 take 25656 and
    # by half the keys 47557, which Triton 3.7.1 cannot compile for gfx950.
    ("fwd-bias", 16, 64): tiles(C(128, 32, 4, 2, options=BOTH_ORDERS)),
    ("fwd-bias", 16, 128): tiles(C(128, 16, 4, 2, options=BOTH_ORDERS)),
    ("bwd-dkdv-bias", 16, 64): tiles(C(16, 64, 2, 2, options=ROWS_OF_16 + BOTH_ORDERS)),
    ("bwd-dkdv-bias", 16, 96): tiles(C(16, 64, 2, 2, options=ROWS_OF_16 + BOTH_ORDERS)),
    ("bwd-dkdv-bias", 16, 128): tiles(C(32, 64, 2, options=ROWS_OF_16 + BOTH_ORDERS)),
    # bwd-dq, 16 bits: clock, 2026-11-24.
    ("bwd-dq", 16, 32): tiles(C(64, 32, 2, 2, options=BOTH_ORDERS)),
    # Head dim 64, plain, 2026-11-25: 5204 cycles on gfx942, 9271 on gfx90a; without the orders 6090 and 9966.
    ("bwd-dq", 16, 64): tiles(
        {"plain": C(128, 64, 4, options=BOTH_ORDERS), "others": C(64, 32, 2, 2, options=BOTH_ORDERS)}
    ),
    ("bwd-dq", 16, 96): tiles(C(64, 32, 2, 2, options=BOTH_ORDERS)),
    ("bwd-dq", 16, 128): tiles(
        {
            "plain": C(128, 32, 4),
            "alibi dropout softcap": C(64, 16, 2, 2, options=BOTH_ORDERS),
            "others": C(64, 32, 2, 2, options=BOTH_ORDERS),
        }
    ),
    ("bwd-dq", 16, 192): tiles(
        {
            "plain alibi dropout softcap": C(128, 32, 4, 2, options=BOTH_ORDERS),
            "others": C(64, 32, 2, 2, options=BOTH_ORDERS),
        }
    ),
    ("bwd-dq", 16, 256): tiles(C(128, 16, 4, 2, options=BOTH_ORDERS)),
    # bwd-dq: registers, 2026-11-24.
    ("bwd-dq", 16, 512): tiles(C(32, 16, 4)),
    ("bwd-dq", 32, 512): tiles(C(16, 16, 4)),
    # bwd-dq, 32 bits: registers, 2026-11-21.
    ("bwd-dq", 32, 32): tiles(C(64, 64, 4)),
    ("bwd-dq", 32, 64): tiles(C(64, 32, 4)),
    ("bwd-dq", 32, 128): tiles(C(64, 32, 4)),
    ("bwd-dq", 32, 256): tiles(C(32, 16, 4)),
}

# Pages keep the family's tiles where a target has larger ones, because a page may have 32 keys.
_PAGES: Rows = {
    (op, 16, size): ROWS["fwd", 16, size] for op in ("fwd-paged", "fwd-paged-whole") for size in (64, 128, 192, 256)
}
# A lane's operand is twice as long and feeds two matrix instructions. Triton ignores it for gfx950, with a warning.
_KPACK: Options = (("kpack", 2),)
_TWO_WAVES = (("waves_per_eu", 2), *BOTH_ORDERS)
# fwd, 16 bits, gfx90a and gfx942: clock, 2026-11-25.
_FORWARDS: Rows = {
    # Plain, without kpack, with it, and with priorities of waves too: 4127, 4115 and 3627 cycles on gfx942, fp16 4808,
    # 4215 and 3749; 6051, 5942 and 5526 on gfx90a.
    ("fwd", 16, 64): tiles(
        {
            "plain alibi dropout softcap": C(128, 64, 4, 2, options=BOTH_ORDERS + _KPACK + PRIORITIES),
            "others": C(128, 32, 4, 2, options=BOTH_ORDERS + _KPACK),
        }
    ),
    # Plain on gfx942, without kpack, with it, and with priorities of waves too: 6806, 6626 and 6359 cycles, fp16 6709,
    # 6265 and 6080, with 10 spills and none; with dropout 10239, 8372 and 7796. On gfx90a 12090 and 11202, by the
    # family's tile 12727. ALiBi and softcap gain nothing by kpack. ALiBi takes 7747 with priorities and 8627 without. A
    # softcap gains less by them than it would lose if waves took turns (`docs/notes/clock.md`). waves_per_eu changes
    # nothing in bf16, plain: 5690 cycles and 256 registers on gfx942, 10379 and 232 on gfx90a, clock of 2026-11-29.
    ("fwd", 16, 128): tiles(
        {
            "plain": C(128, 64, 4, 2, options=_TWO_WAVES + _KPACK + PRIORITIES),
            "alibi": C(128, 32, 4, 2, options=BOTH_ORDERS + PRIORITIES),
            "dropout": C(128, 32, 4, 2, options=_KPACK + PRIORITIES),
            "softcap": C(128, 32, 4, 2, options=BOTH_ORDERS),
            "others": C(128, 32, 4, 2, options=_KPACK),
        }
    ),
}

# Target -> its own rows, which precede the family's rows.
TARGET_ROWS: dict[str, Rows] = {
    # gfx908 has half the registers for a wave: the tile of the family spills 111 of them.
    "gfx908": {
        # bwd-dkdv, 16 bits: registers, 2026-11-24.
        ("bwd-dkdv", 16, 128): tiles(C(32, 64, 2, options=ROWS_OF_16)),
    },
    "gfx90a": {
        **_PAGES,
        **_FORWARDS,
        # fwd, 16 bits: clock, 2026-11-25. Plain: 25480 cycles, with the family's tile 27424.
        ("fwd", 16, 192): tiles(
            {"plain": C(128, 64, 4, 2, options=BOTH_ORDERS), "others": C(128, 32, 4, 2, options=BOTH_ORDERS)}
        ),
    },
    "gfx942": {
        **_PAGES,
        **_FORWARDS,
        # fwd, 16 bits: clock, 2026-11-24; 2026-11-25, plain: 10560 and 13760 cycles, with 1 and 22 spills. With the
        # family's tiles 13576 and 15472.
        ("fwd", 16, 192): tiles(
            {"plain": C(128, 64, 4, 2, options=BOTH_ORDERS), "others": C(128, 32, 4, 2, options=BOTH_ORDERS)}
        ),
        ("fwd", 16, 256): tiles(
            {"plain": C(128, 64, 4, 2, options=BOTH_ORDERS), "others": C(128, 32, 4, 2, options=BOTH_ORDERS)}
        ),
        # sparse-fwd, 16 bits: clock, 2026-11-29. Tiles without and with hidden keys 6879 and 14472 cycles, 19 spills;
        # by the tile of fwd 8052 and 60471, 150 spills; without waves_per_eu 8746, 287 registers, one program.
        ("sparse-fwd", 16, 128): tiles(
            {
                "plain": C(128, 32, 4, 2, options=(("waves_per_eu", 2), *BOTH_ORDERS, *_KPACK, *PRIORITIES)),
                "others": C(128, 32, 4, 2, options=_KPACK),
            }
        ),
        # sparse-bwd-dq, 16 bits: clock, 2026-11-29. 10845 cycles, two programs a compute unit, 22 spills; without
        # waves_per_eu 282 registers, one program and 15360. Kind `any` would spill 78.
        ("sparse-bwd-dq", 16, 128): tiles(
            {
                "plain": C(128, 32, 4, options=(*BOTH_ORDERS, *_KPACK, ("waves_per_eu", 2))),
                "others": C(128, 32, 4, options=BOTH_ORDERS + _KPACK),
            }
        ),
        # bwd-dkdv, 16 bits: clock, 2026-11-25. Head dim 128, plain: 20223 cycles, 21239 without kpack, 22480 with the
        # family's tile. A second stage takes 17177, but it spills 161 registers, which costs more than it gains below
        # 1100 queries.
        ("bwd-dkdv", 16, 128): tiles(
            {
                "plain": C(32, 64, 2, options=ROWS_OF_16 + BOTH_ORDERS + _KPACK),
                "alibi dropout": C(32, 64, 2, options=ROWS_OF_16),
                "softcap": C(16, 128, 4, 2, options=BOTH_ORDERS),
                "others": C(32, 128, 4, options=ROWS_OF_16),
            }
        ),
        # bwd-dkdv, 16 bits: clock, 2026-11-25. Plain: 44384 cycles, without kpack 45760. Tiles with 72 to 117 spills
        # take 31021 and more.
        ("bwd-dkdv", 16, 192): tiles(
            {"plain": C(16, 64, 4, 2, options=BOTH_ORDERS + _KPACK), "others": C(16, 64, 4, 2, options=BOTH_ORDERS)}
        ),
        # bwd-dkdv, 16 bits: clock, 2026-11-24; plain 2026-11-25: 54175 cycles, without the orders 58970.
        ("bwd-dkdv", 16, 256): tiles(
            {
                "plain": C(32, 64, 4, options=ROWS_OF_16 + BOTH_ORDERS),
                "alibi softcap": C(32, 64, 4, options=ROWS_OF_16),
                "dropout": C(16, 64, 4, options=BOTH_ORDERS),
                "others": C(16, 64, 4),
            }
        ),
        # bwd-dq, 16 bits: clock, 2026-11-25. Plain: 10008, 22097 and 27732 cycles, with the family's tiles 10432, 24384
        # and 31008.
        ("bwd-dq", 16, 128): tiles(
            {"plain": C(128, 32, 4, options=BOTH_ORDERS + _KPACK)}, base=ROWS["bwd-dq", 16, 128]
        ),
        ("bwd-dq", 16, 192): tiles(
            {"plain": C(128, 64, 4, options=BOTH_ORDERS + _KPACK)}, base=ROWS["bwd-dq", 16, 192]
        ),
        ("bwd-dq", 16, 256): tiles(
            {"plain": C(128, 32, 4, options=BOTH_ORDERS), "others": C(128, 16, 4, 2, options=BOTH_ORDERS)}
        ),
    },
    "gfx950": {
        **_PAGES,
        # fwd, 16 bits: clock, 2026-11-25. Direct copies, plain: head dim 64 2770 cycles and 2862 without, 128 4184 and
        # 4684, 192 6768 and 7384, 256 8252 and 10136; 128 with values of 64 3249 and 3740, 192 with values of 128 5840
        # and 6904. Head dim 128 with ALiBi 5719 and 6323, with dropout 5867, and 7484 by half the keys without. Head
        # dim 64 with ALiBi loses by them: 4547 and 4451. With priorities of waves besides, plain, ALiBi and dropout: 64
        # 2547, 4316 and 4198; 128 3410, 5160 and 5381, softcap 7602 for 8366, values of 64 2976. From 192 on one wave
        # is on a SIMD, and there is nothing to gain.
        ("fwd", 16, 64): tiles(
            {
                "plain": C(128, 64, 4, 2, options=BOTH_ORDERS + ASYNC_COPY + PRIORITIES),
                "alibi dropout": C(128, 64, 4, 2, options=BOTH_ORDERS + PRIORITIES),
                "softcap": C(128, 64, 4, 2, options=BOTH_ORDERS),
                "others": C(128, 32, 4, 2, options=BOTH_ORDERS),
            }
        ),
        ("fwd", 16, 128): tiles(
            {
                "plain alibi dropout": C(128, 64, 4, 2, options=BOTH_ORDERS + ASYNC_COPY + PRIORITIES),
                "softcap": C(128, 64, 4, 2, options=BOTH_ORDERS + PRIORITIES),
                "others": C(128, 32, 4, 2),
            }
        ),
        ("fwd", 16, 192): tiles(
            {
                "plain": C(128, 64, 4, 2, options=BOTH_ORDERS + ASYNC_COPY),
                "others": C(128, 32, 4, 2, options=BOTH_ORDERS),
            }
        ),
        ("fwd", 16, 256): tiles(
            {
                "plain": C(128, 64, 4, 2, options=BOTH_ORDERS + ASYNC_COPY),
                "others": C(128, 32, 4, 2, options=BOTH_ORDERS),
            }
        ),
        # bwd-dkdv, 16 bits: clock, 2026-11-24. Head dim 128, plain, 2026-11-25: 8917 cycles, and 11072 with the tile of
        # the other kinds. Its 45 spills are outside of both loops, and it is slower below 700 queries.
        ("bwd-dkdv", 16, 128): tiles(
            {
                "plain": C(32, 64, 2, 2, options=ROWS_OF_16),
                "alibi dropout softcap": C(16, 64, 2, 2, options=BOTH_ORDERS),
                "others": C(16, 64, 2, 2, options=ROWS_OF_16 + BOTH_ORDERS),
            }
        ),
        ("bwd-dkdv", 16, 256): tiles(C(16, 64, 4, 2, options=ROWS_OF_16 + BOTH_ORDERS)),
        # With a bias, head dim 96: clock, 2026-11-25, 21228 cycles, and 24880 by the family's tile.
        ("bwd-dkdv-bias", 16, 96): tiles(C(16, 64, 2, 2, options=BOTH_ORDERS)),
        # bwd-dkdv, 16 bits: clock, 2026-11-25. Plain: 20544 cycles, with the family's tile 29280, with 64 keys 22528.
        # Tiles with 46 to 88 spills take 16768 and more.
        ("bwd-dkdv", 16, 192): tiles(
            {"plain": C(16, 32, 2, 2, options=ROWS_OF_16 + BOTH_ORDERS), "others": C(16, 64, 4, 2, options=BOTH_ORDERS)}
        ),
        # bwd-dq, 16 bits: clock, 2026-11-25. Plain: 12016 cycles, with the family's tile 12736.
        ("bwd-dq", 16, 256): tiles(
            {"plain": C(128, 32, 4, 2, options=BOTH_ORDERS), "others": C(128, 16, 4, 2, options=BOTH_ORDERS)}
        ),
        # bwd-dq, 16 bits: clock, 2026-11-24.
        ("bwd-dq", 16, 64): tiles(C(64, 32, 2, 2, options=BOTH_ORDERS)),
        ("bwd-dq", 16, 128): tiles(
            {
                "plain": C(128, 32, 4, 2, options=BOTH_ORDERS),
                "alibi dropout softcap": C(64, 16, 2, 2, options=BOTH_ORDERS),
                "others": C(64, 32, 2, 2, options=BOTH_ORDERS),
            }
        ),
    },
}
