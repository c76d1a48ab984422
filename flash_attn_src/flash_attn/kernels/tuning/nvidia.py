"""Tiles of NVIDIA GPUs, used by the tests on such GPUs and by the compiler's tests.

measured: fastest on an H200 with code of Triton 3.7.1, by `benchmarks/tune.py`, in bf16: full, causal and window, and
each kind that has a tile of its own; `fwd-v` on an H100, full and causal, 2026-11-25. Head dim 32: only plain was
measured. fp16 takes the tile of bf16.
by size: not measured. The tile is smaller by the size of the elements.
"""

from __future__ import annotations

from flash_attn.kernels.tuning.config import C, Options, Rows, tiles

OPTIONS: Options = (("maxnreg", 128), ("maxnreg", 168))

ROWS: Rows = {
    # For tests alone.
    ("int8-fwd", 16, 64): tiles(C(64, 64, 4, 2)),
    ("int8-fwd", 16, 128): tiles(C(64, 64, 4, 2)),
    # fwd, 16 bits: measured, 2026-11-22.
    ("fwd", 16, 32): tiles(C(64, 64, 4, 3)),
    ("fwd", 16, 64): tiles(
        {
            "dropout": C(64, 64, 4, 3, options=(("maxnreg", 168),)),
            "others": C(64, 64, 4, 3, options=(("maxnreg", 128),)),
        }
    ),
    ("fwd", 16, 96): tiles({"plain alibi": C(128, 64, 4, 3), "others": C(64, 64, 4, 2, options=(("maxnreg", 168),))}),
    ("fwd", 16, 128): tiles(C(64, 64, 4, 3)),
    ("fwd-v", 16, 128): tiles({"plain": C(128, 64, 8, 3, options=(("maxnreg", 128),)), "others": C(64, 64, 4, 3)}),
    ("fwd", 16, 192): tiles({"plain alibi dropout softcap": C(128, 64, 8, 3), "others": C(128, 64, 8, 2)}),
    ("fwd", 16, 256): tiles(C(128, 64, 8, 2)),
    # fwd, 32 bits: by size, 2026-11-21.
    ("fwd", 32, 32): tiles({"plain": C(64, 32, 4, 2), "others": C(32, 32, 4, 2)}),
    ("fwd", 32, 64): tiles(C(32, 32, 4, 2)),
    ("fwd", 32, 128): tiles(C(32, 32, 4, 2)),
    ("fwd", 32, 256): tiles(C(16, 16, 4)),
    # fwd-paged, 16 bits: measured, 2026-11-22.
    ("fwd-paged", 16, 64): tiles({"plain": C(64, 64, 4, 3), "others": C(64, 64, 4, 3, options=(("maxnreg", 128),))}),
    # bwd-dkdv, 16 bits: measured, 2026-11-22.
    ("bwd-dkdv", 16, 32): tiles({"plain": C(32, 128, 4, 3), "others": C(64, 64, 4, 2)}),
    ("bwd-dkdv", 16, 64): tiles(
        {
            "plain dropout": C(64, 64, 4, 3),
            "alibi": C(32, 64, 4, 3, options=(("maxnreg", 168),)),
            "others": C(32, 64, 4, 3),
        }
    ),
    ("bwd-dkdv", 16, 96): tiles(C(32, 64, 4, 3)),
    ("bwd-dkdv", 16, 128): tiles({"plain alibi dropout softcap": C(32, 64, 4, 3), "others": C(32, 64, 4, 2)}),
    ("bwd-dkdv", 16, 192): tiles(C(32, 128, 8, 3)),
    ("bwd-dkdv", 16, 256): tiles({"plain alibi dropout": C(64, 64, 8, 2), "others": C(32, 64, 8, 3)}),
    # bwd-dkdv, 32 bits: by size, 2026-11-21.
    ("bwd-dkdv", 32, 32): tiles(C(32, 32, 4, 2)),
    ("bwd-dkdv", 32, 64): tiles(C(32, 32, 4, 2)),
    ("bwd-dkdv", 32, 128): tiles(C(32, 32, 4, 2)),
    ("bwd-dkdv", 32, 256): tiles(C(16, 16, 4)),
    # bwd-dq, 16 bits: measured, 2026-11-22.
    ("bwd-dq", 16, 32): tiles({"plain": C(64, 64, 4, 3), "others": C(64, 64, 4, 2)}),
    ("bwd-dq", 16, 64): tiles(
        {"plain": C(128, 64, 8, 3, options=(("maxnreg", 128),)), "others": C(64, 64, 4, 3, options=(("maxnreg", 168),))}
    ),
    ("bwd-dq", 16, 96): tiles({"plain": C(128, 64, 8, 3), "others": C(64, 64, 4, 3)}),
    ("bwd-dq", 16, 128): tiles({"plain alibi dropout softcap": C(128, 64, 8, 3), "others": C(64, 64, 4, 2)}),
    ("bwd-dq", 16, 192): tiles(C(128, 64, 8, 2)),
    ("bwd-dq", 16, 256): tiles({"plain alibi dropout": C(128, 32, 8, 3), "others": C(128, 32, 8, 2)}),
    # head dim 512: fwd in 16 bits measured on an H100, 2026-11-25, the rest by size.
    ("fwd", 16, 512): tiles(C(64, 32, 8, 2)),
    ("fwd", 32, 512): tiles(C(16, 16, 8, block_k=64)),
    ("bwd-dkdv", 16, 512): tiles(C(32, 32, 8, 2)),
    ("bwd-dkdv", 32, 512): tiles(C(16, 16, 8)),
    ("bwd-dq", 16, 512): tiles(C(32, 64, 8)),
    ("bwd-dq", 32, 512): tiles(C(16, 16, 8, block_k=64)),
    # With a bias: measured with a table of distances, 2026-11-29.
    ("fwd-bias", 16, 128): tiles(C(128, 64, 8, 3)),
    ("bwd-dq-bias", 16, 128): tiles(C(64, 64, 4, 2)),
    ("bwd-dkdv-bias", 16, 128): tiles(C(32, 64, 4, 2)),
    # bwd-dq, 32 bits: by size, 2026-11-21.
    ("bwd-dq", 32, 32): tiles(C(32, 32, 4, 2)),
    ("bwd-dq", 32, 64): tiles(C(32, 32, 4, 2)),
    ("bwd-dq", 32, 128): tiles(C(32, 32, 4, 2)),
    ("bwd-dq", 32, 256): tiles(C(16, 16, 4)),
}
