"""Tiles of RDNA 3 GPUs. No such GPU was available.

clock: of a list of tiles, the one with the fewest cycles by the clock of `python -m amdgpu_simulator cycles`, with
global loads of 500 and of 900 cycles, plain in bf16 on gfx1100. Other kinds take the same tile where it spills no more
than theirs, or where it gains half in spite of its spills. The forward of head dim 256 spills up to 56 registers, dk
and dv of 128 up to 58 and of 192 up to 10. Kind `any`, and dk and dv up to 96 with dropout, have the tile of an earlier
count, of the busiest unit's cycles (2026-11-23): all columns of a score row in one warp, because
P goes through LDS otherwise, and no more warps than a product has rows of tiles, because further warps repeat the work.
By the clock of 2026-11-25: the plain forward of 128 takes 22030 cycles, with 32 keys 24025, and 25716 where nothing is
transposed within threads. At 64 that costs time: 13313 cycles without, 13727 with it and 128 rows, 14130 with it and 64
rows. dk and dv of 128 take 90711, and 141751 without (2026-11-24).
registers: of a list of tiles, the largest that spills no vector register to scratch. With fp32 and head dim 192, and
with 16 bits and 64 to 128, every tile of the backward of kind `any` spills: the row is the tile that spills least.
"""

from __future__ import annotations

from flash_attn.kernels.tuning.config import LAZY_RESCALE, ORDERS, TRANSPOSES, WAVES, C, Options, Rows, tiles

OPTIONS: Options = WAVES + ORDERS + TRANSPOSES

ROWS: Rows = {
    # fwd, 16 bits: clock, 2026-11-24. Plain with a lazy rescale, clock of 2026-11-27, cycles with and without it:
    # gfx1100 128 21030 and 22022 (fp16 21987 and 22005), gfx1151 128 21494 and 21629. That is within the clock's error;
    # the loop has a fifth fewer vector instructions. 64 takes 11069 and reads V 16 bytes at a time; by 64 rows, with
    # 512 reads of 2 bytes, 11183, without a lazy rescale 11516. At 128 it makes dropout (24151 and
    # 25594), softcap (26838 and 24073) and ALiBi (26664 and 22151) spill 24 registers in the loop: they have none.
    ("fwd", 16, 32): tiles(C(64, 32, 4, 2)),
    ("fwd", 16, 64): tiles(
        {
            "plain": C(128, 64, 8, options=TRANSPOSES + LAZY_RESCALE),
            "alibi dropout softcap": C(64, 32, 4, 2),
            "others": C(128, 32, 8, block_k=32),
        }
    ),
    ("fwd", 16, 96): tiles({"plain alibi dropout softcap": C(64, 32, 4), "others": C(64, 32, 8, block_k=32)}),
    ("fwd", 16, 128): tiles(
        {
            "plain": C(128, 64, 8, options=TRANSPOSES + LAZY_RESCALE),
            "alibi dropout softcap": C(128, 32, 8, options=TRANSPOSES),
            "others": C(64, 32, 8, block_k=64),
        }
    ),
    ("fwd", 16, 192): tiles(C(64, 32, 8, 2, block_k=32)),
    ("fwd", 16, 256): tiles(C(64, 16, 4, block_k=16)),
    # fwd, 32 bits: registers, 2026-11-21.
    ("fwd", 32, 32): tiles(C(128, 32, 8, block_k=16)),
    ("fwd", 32, 64): tiles(C(128, 16, 8, block_k=32)),
    ("fwd", 32, 128): tiles(C(64, 16, 8, block_k=32)),
    ("fwd", 32, 256): tiles(C(32, 16, 8, block_k=32)),
    # int8-fwd, 16 bits: clock on gfx1100, 2026-11-26. 64: 13041 cycles. 128: 24294; 64 rows of 64 keys 24507.
    ("int8-fwd", 16, 64): tiles(C(128, 64, 8, options=TRANSPOSES)),
    ("int8-fwd", 16, 128): tiles(C(128, 32, 8, options=TRANSPOSES)),
    # fwd-paged, 16 bits: registers, 2026-11-21; 64 as fwd with dropout, because a page may have 32 keys.
    ("fwd-paged", 16, 64): tiles({"plain": C(64, 32, 4, 2), "others": C(128, 32, 8, block_k=32)}),
    ("fwd-paged", 16, 96): tiles(C(64, 32, 8, block_k=32)),
    ("fwd-paged", 16, 128): tiles({"plain": C(64, 32, 8, block_k=64), "others": C(64, 32, 8, block_k=32)}),
    ("fwd-paged", 16, 256): tiles(C(32, 16, 8, block_k=32)),
    # fwd-paged-whole, 16 bits: registers, 2026-11-22; 64 as fwd-paged.
    ("fwd-paged-whole", 16, 64): tiles({"plain": C(64, 32, 4, 2), "others": C(128, 32, 8, block_k=32)}),
    ("fwd-paged-whole", 16, 128): tiles({"plain": C(128, 32, 8, block_k=32), "others": C(64, 32, 8, block_k=64)}),
    ("fwd-paged-whole", 16, 256): tiles(C(64, 16, 8, block_k=32)),
    # bwd-dkdv, 16 bits: clock, 2026-11-24.
    ("bwd-dkdv", 16, 32): tiles({"plain alibi softcap": C(32, 64, 4), "others": C(32, 32, 4)}),
    # With a bias, clock, 2026-11-25: gfx1100 134582, gfx1201 67304; by half the keys of the plain tile 893150, 150554.
    ("bwd-dkdv-bias", 16, 64): tiles(C(16, 64, 8)),
    ("bwd-dkdv", 16, 64): tiles(
        {"plain alibi softcap": C(32, 64, 4, 2, block_k=32), "others": C(32, 32, 8, block_k=32)}
    ),
    ("bwd-dkdv", 16, 96): tiles(
        {
            "plain alibi softcap": C(16, 64, 4, 2, block_k=32),
            "dropout": C(32, 64, 8, block_k=32),
            "others": C(16, 32, 8, block_k=16),
        }
    ),
    ("bwd-dkdv", 16, 128): tiles(
        {
            "plain alibi dropout softcap": C(16, 64, 4, block_k=16, options=TRANSPOSES),
            "others": C(16, 32, 8, block_k=16),
        }
    ),
    ("bwd-dkdv", 16, 192): tiles(
        {"plain alibi dropout softcap": C(16, 32, 4, 2, block_k=32), "others": C(16, 16, 4, block_k=16)}
    ),
    # bwd-dkdv, 16 bits: clock on gfx1100, 2026-11-26. Plain: 444600 cycles, though 215 registers spill; with 8 warps
    # 610655 and 81; with 16 keys 821519.
    ("bwd-dkdv", 16, 256): tiles(
        {"plain": C(16, 32, 4, block_k=32, options=TRANSPOSES), "others": C(16, 16, 8, block_k=32)}
    ),
    # bwd-dkdv, 32 bits: registers, 2026-11-21.
    ("bwd-dkdv", 32, 32): tiles({"plain": C(32, 32, 8, block_k=16), "others": C(16, 32, 8, block_k=16)}),
    ("bwd-dkdv", 32, 64): tiles({"plain": C(16, 32, 8, block_k=16), "others": C(16, 16, 8, block_k=16)}),
    ("bwd-dkdv", 32, 128): tiles({"plain": C(16, 16, 8, block_k=16), "others": C(16, 16, 16, block_k=16)}),
    ("bwd-dkdv", 32, 192): tiles({"plain": C(16, 16, 16, block_k=16), "others": C(16, 16, 32, block_k=64)}),
    ("bwd-dkdv", 32, 256): tiles({"plain": C(16, 16, 16, block_k=16), "others": C(16, 16, 32, block_k=16)}),
    # bwd-dq, 16 bits: clock, 2026-11-24.
    ("bwd-dq", 16, 32): tiles({"plain": C(64, 32, 4), "others": C(64, 32, 8)}),
    ("bwd-dq", 16, 64): tiles({"plain alibi dropout softcap": C(64, 16, 4), "others": C(32, 32, 8, block_k=32)}),
    ("bwd-dq", 16, 128): tiles(
        {
            "plain alibi softcap": C(64, 32, 4, block_k=32),
            "dropout": C(64, 16, 4, block_k=32),
            "others": C(16, 16, 8, block_k=16),
        }
    ),
    # Head dims 192 and 256, plain, 2026-11-25: 71397 and 93558 cycles on gfx1100, 51336 and 77761 on gfx1201. Without
    # transposition, by pieces of 32 and at 256 by a quarter of the tile: 100878 and 179828, 69085 and 157565.
    ("bwd-dq", 16, 192): tiles(
        {
            "plain alibi dropout softcap": C(64, 32, 8, block_k=64, options=TRANSPOSES),
            "others": C(32, 16, 8, block_k=16),
        }
    ),
    ("bwd-dq", 16, 256): tiles(
        {"plain alibi softcap": C(64, 32, 8, block_k=64, options=TRANSPOSES), "others": C(32, 16, 8, block_k=32)}
    ),
    # bwd-dq, 32 bits: registers, 2026-11-21.
    ("bwd-dq", 32, 32): tiles({"plain": C(32, 32, 8, block_k=16), "others": C(32, 16, 8, block_k=16)}),
    ("bwd-dq", 32, 64): tiles({"plain": C(32, 16, 8, block_k=16), "others": C(16, 16, 8, block_k=16)}),
    ("bwd-dq", 32, 128): tiles({"plain": C(32, 16, 8, block_k=16), "others": C(16, 16, 16, block_k=16)}),
    ("bwd-dq", 32, 256): tiles({"plain": C(16, 16, 8, block_k=16), "others": C(16, 16, 32, block_k=16)}),
    # head dim 512: registers, 2026-11-24.
    ("fwd", 16, 512): tiles(C(32, 16, 8, block_k=32)),
    ("fwd", 32, 512): tiles(C(16, 16, 8, block_k=16)),
    ("bwd-dkdv", 16, 512): tiles(C(16, 16, 16, block_k=16)),
    ("bwd-dkdv", 32, 512): tiles(C(16, 16, 32, block_k=16)),
    ("bwd-dq", 16, 512): tiles(C(16, 16, 8, block_k=32)),
    ("bwd-dq", 32, 512): tiles(C(16, 16, 16, block_k=16)),
}
