"""Tiles of RDNA 2 GPUs. No such GPU was available.

registers: of a list of tiles, the largest that spills no vector register to scratch. Every tile of the backward of kind
`any` spills with head dims 192 and 256, and with fp16 and 128: the row is the tile that spills least.

RDNA 2 has no matrix unit. A thread keeps whole rows of its operands, so the head dim is taken in pieces of 16.
"""

from __future__ import annotations

from flash_attn.kernels.tuning.config import WAVES, C, Options, Rows, tiles

OPTIONS: Options = WAVES

ROWS: Rows = {
    # fwd, 16 bits: registers, 2026-11-21.
    ("fwd", 16, 32): tiles(C(64, 16, 8, block_k=16)),
    ("fwd", 16, 64): tiles(C(64, 16, 8, block_k=16)),
    ("fwd", 16, 128): tiles(C(64, 16, 8, block_k=16)),
    ("fwd", 16, 256): tiles(C(32, 16, 8, block_k=16)),
    # fwd, 32 bits: registers, 2026-11-21.
    ("fwd", 32, 32): tiles(C(32, 16, 8, block_k=16)),
    ("fwd", 32, 64): tiles(C(32, 16, 8, block_k=16)),
    ("fwd", 32, 128): tiles(C(32, 16, 8, block_k=16)),
    ("fwd", 32, 256): tiles(C(32, 16, 8, block_k=16)),
    # bwd-dkdv, 16 bits: registers, 2026-11-21.
    ("bwd-dkdv", 16, 32): tiles({"plain": C(16, 32, 4, block_k=16), "others": C(16, 32, 8, block_k=16)}),
    ("bwd-dkdv", 16, 64): tiles({"plain": C(16, 32, 4, block_k=16), "others": C(16, 16, 8, block_k=16)}),
    ("bwd-dkdv", 16, 128): tiles({"plain": C(16, 32, 8, block_k=16), "others": C(16, 16, 16, block_k=16)}),
    ("bwd-dkdv", 16, 256): tiles({"plain": C(16, 32, 8, block_k=16), "others": C(16, 16, 16, block_k=16)}),
    # bwd-dkdv, 32 bits: registers, 2026-11-21.
    ("bwd-dkdv", 32, 32): tiles(C(16, 16, 16, block_k=16)),
    ("bwd-dkdv", 32, 64): tiles(C(16, 16, 16, block_k=16)),
    ("bwd-dkdv", 32, 128): tiles(C(16, 16, 16, block_k=16)),
    ("bwd-dkdv", 32, 256): tiles(C(16, 16, 16, block_k=16)),
    # bwd-dq, 16 bits: registers, 2026-11-21.
    ("bwd-dq", 16, 32): tiles({"plain": C(64, 16, 8, block_k=16), "others": C(32, 16, 8, block_k=16)}),
    ("bwd-dq", 16, 64): tiles({"plain": C(64, 16, 8, block_k=16), "others": C(16, 16, 8, block_k=16)}),
    ("bwd-dq", 16, 128): tiles(
        {
            "plain": C(64, 16, 8, block_k=16),
            "alibi dropout softcap": C(16, 16, 8, block_k=16),
            "others": C(16, 16, 16, block_k=16),
        }
    ),
    ("bwd-dq", 16, 256): tiles({"plain": C(32, 16, 8, block_k=16), "others": C(16, 16, 16, block_k=16)}),
    # bwd-dq, 32 bits: registers, 2026-11-21.
    ("bwd-dq", 32, 32): tiles(C(16, 16, 8, block_k=16)),
    ("bwd-dq", 32, 64): tiles(C(16, 16, 8, block_k=16)),
    ("bwd-dq", 32, 128): tiles({"plain": C(16, 16, 8, block_k=16), "others": C(16, 16, 16, block_k=16)}),
    ("bwd-dq", 32, 256): tiles({"plain": C(16, 16, 8, block_k=16), "others": C(16, 16, 16, block_k=16)}),
    # head dim 512: registers, 2026-11-24.
    ("fwd", 16, 512): tiles(C(16, 16, 8, block_k=16)),
    ("fwd", 32, 512): tiles(C(16, 16, 8, block_k=16)),
    ("bwd-dkdv", 16, 512): tiles(C(16, 16, 16, block_k=16)),
    ("bwd-dkdv", 32, 512): tiles(C(16, 16, 32, block_k=16)),
    ("bwd-dq", 16, 512): tiles(C(16, 16, 8, block_k=16)),
    ("bwd-dq", 32, 512): tiles(C(16, 16, 16, block_k=16)),
}
