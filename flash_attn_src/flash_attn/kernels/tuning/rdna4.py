"""Tiles of RDNA 4 GPUs: the tiles of RDNA 3 (2026-11-21), but for the plain forward of head dims 64 and 128.

RDNA 4 has RDNA 3's wavefronts and registers, and its WMMA holds less. What fits RDNA 3 fits RDNA 4.
"""

from __future__ import annotations

from flash_attn.kernels.tuning import rdna3
from flash_attn.kernels.tuning.config import TRANSPOSES, C, Rows

OPTIONS = rdna3.OPTIONS

ROWS: Rows = {
    **rdna3.ROWS,
    # fwd, 16 bits: clock on gfx1201, 2026-11-24. Plain: 8097 and 15522 cycles; with 64 rows of 32 keys 8096 and 16049,
    # and they read K and V twice as often. Transposed within threads, 2026-11-25: 8024 and 13727.
    ("fwd", 16, 64): (C(128, 64, 8, options=TRANSPOSES), *rdna3.ROWS["fwd", 16, 64][1:]),
    ("fwd", 16, 128): (C(128, 32, 8, 2, options=TRANSPOSES), *rdna3.ROWS["fwd", 16, 128][1:]),
}
