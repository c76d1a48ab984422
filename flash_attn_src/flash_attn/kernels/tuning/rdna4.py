"""Tiles of RDNA 4 GPUs: the tiles of RDNA 3, but for forwards of 128 and most of the backward.

RDNA 4 has RDNA 3's wavefronts and registers, and its WMMA holds less. What fits RDNA 3 fits RDNA 4.
"""

from __future__ import annotations

from flash_attn.kernels.tuning import rdna3
from flash_attn.kernels.tuning.config import DK_APART, LAZY_RESCALE, ONE_WAVE, TRANSPOSES, C, Rows, tiles

OPTIONS = rdna3.OPTIONS

ROWS: Rows = {
    **rdna3.ROWS,
    # fwd, 16 bits: clock on gfx1201, 2026-11-24. Plain: 8097 and 15522 cycles; with 64 rows of 32 keys 8096 and 16049,
    # and they read K and V twice as often. Transposed within threads, 2026-11-25: 8024 and 13727. With a lazy rescale,
    # clock of 2026-11-27: 5715 and 11120 for 6288 and 11940, at 128 with dropout 12306 for 13292 and with softcap 13314
    # for 14915; ALiBi loses by it. The 18 spills of the plain forward of 128 are outside of both loops.
    ("fwd", 16, 128): tiles(
        {
            "plain": C(128, 32, 8, 2, options=TRANSPOSES + LAZY_RESCALE),
            "dropout softcap": C(128, 32, 8, options=TRANSPOSES + LAZY_RESCALE),
        },
        base=rdna3.ROWS["fwd", 16, 128],
    ),
    # fwd, 16 bits: clock on gfx1201, 2026-11-26. Plain, 192: 27717 cycles, by RDNA 3's tile, which reads Q again in
    # each step, 37526. By 64 rows, transposed within threads, 28925. Nothing spills.
    ("fwd", 16, 192): tiles({"plain": C(128, 16, 8)}, base=rdna3.ROWS["fwd", 16, 192]),
    # int8-fwd, 16 bits: clock on gfx1201, 2026-11-26: 6458 and 10546 cycles. 128 with 32 keys and two stages: 13315,
    # with 64 rows: 12391.
    ("int8-fwd", 16, 64): tiles(C(128, 64, 8, options=TRANSPOSES)),
    ("int8-fwd", 16, 128): tiles(C(128, 64, 8, options=TRANSPOSES)),
    # bwd-dkdv, 16 bits: clock on gfx1201, 2026-11-25. Plain: 16789 cycles, by RDNA 3's tile 19570. Other kinds spill.
    # Clock of 2026-11-28: 12986 cycles, 14625 without ONE_WAVE.
    ("bwd-dkdv", 16, 64): tiles(
        {"plain": C(32, 64, 4, options=TRANSPOSES + ONE_WAVE)}, base=rdna3.ROWS["bwd-dkdv", 16, 64]
    ),
    # bwd-dkdv, 16 bits: clock on gfx1201, 2026-11-26. Plain: 45576 cycles. In one round 48804, by pieces of 32 columns,
    # which read K and V again for each block of queries. Nothing in the loops spills.
    # Clock of 2026-11-28: 32671 cycles in bf16, 32250 in fp16, 32699 causal; without ONE_WAVE 38337, 38043 and 37887. 7
    # registers spill, not 5.
    ("bwd-dkdv", 16, 128): tiles(
        {"plain": C(16, 64, 4, options=TRANSPOSES + DK_APART + ONE_WAVE)}, base=rdna3.ROWS["bwd-dkdv", 16, 128]
    ),
    # bwd-dkdv, 16 bits: clock on gfx1201, 2026-11-26. Plain, two rounds: 134162 and 201087 cycles, by RDNA 3's tiles
    # 156025 and 757519. In one round with 32 keys of 256 columns: 316248.
    ("bwd-dkdv", 16, 192): tiles(
        {"plain": C(16, 64, 8, options=TRANSPOSES + DK_APART)}, base=rdna3.ROWS["bwd-dkdv", 16, 192]
    ),
    ("bwd-dkdv", 16, 256): tiles(
        {"plain": C(16, 32, 4, block_k=64, options=TRANSPOSES + DK_APART)}, base=rdna3.ROWS["bwd-dkdv", 16, 256]
    ),
    # bwd-dq, 16 bits: clock on gfx1201, 2026-11-25. Plain 10272 cycles, dropout 11405; RDNA 3's tile 11179 and 12898.
    # ALiBi and softcap lose by it.
    ("bwd-dq", 16, 64): tiles(
        {"plain dropout": C(64, 32, 4, options=TRANSPOSES)},
        base=rdna3.ROWS["bwd-dq", 16, 64],
    ),
    # bwd-dq, 16 bits: clock on gfx1201, 2026-11-25. Plain 19126 cycles, ALiBi 20018, dropout 21374, softcap 22265; by
    # RDNA 3's tiles 28160, 31336, 51163 and 33919. Head dim 96, plain: 19220 and 21988.
    ("bwd-dq", 16, 128): tiles(
        {
            "plain alibi softcap": C(128, 32, 8, options=TRANSPOSES),
            "dropout": C(64, 16, 4, options=TRANSPOSES),
            "others": rdna3.ROWS["bwd-dq", 16, 128]["any"],
        }
    ),
    # bwd-dq, 16 bits: clock on gfx1201, 2026-11-25: as RDNA 3, and with dropout too, where it spills nothing.
    ("bwd-dq", 16, 256): tiles(
        {"plain alibi dropout softcap": C(64, 32, 8, block_k=64, options=TRANSPOSES)},
        base=rdna3.ROWS["bwd-dq", 16, 256],
    ),
}
