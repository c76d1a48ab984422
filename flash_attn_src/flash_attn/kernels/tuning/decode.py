"""Tiles of the kernels for a KV cache (decode, extend) and of the forward in FP8, by family.

measured: fastest on an H200. bf16: 6 shapes of decoding and 12 of more queries, head dims 64 to 256; fp16 and decoding
in FP8 take the same tile. fp32: 2 or 3 shapes. The forward in FP8: by `benchmarks/tune.py`.
registers: no such GPU was available. Of a list of tiles, the largest that spills no vector register to scratch. On RDNA
some spill: `extend-paged` in fp32 with head dim 128 63 to 89 registers, `decode-paged` in fp16 with 128 on RDNA 2 209,
others up to 18.
main loop: no such GPU was available. Of a list of tiles, the one whose compiled main loop on gfx942 has the fewest
cycles for each key (vector instructions, LDS, matrix instructions). ROWS_OF_16 takes matrix instructions of 16 rows
where a warp has no 32 rows of its own: two warps that share rows pass the probabilities to each other through LDS, 1 or
2 bytes at a time. By that count it gains a factor of 1.3 to 1.9 for `extend`, and with tiles that fit it 2.2 and 2.7
for FP8 with head dims 128 and 256.

A row of `decode` and `extend` also serves the paged operation where that has no row, and elements of 8 bits take the
row of 16.
"""

from __future__ import annotations

from flash_attn.kernels.tuning.config import ROWS_OF_16, C, Rows, tiles

_NVIDIA: Rows = {
    # decode, 16 bits: measured, 2026-11-22.
    ("decode", 16, 64): tiles(C(16, 64, 2, 3)),
    ("decode", 16, 128): tiles(C(16, 32, 2, 4)),
    ("decode", 16, 256): tiles(C(16, 32, 4, 3)),
    # decode, 32 bits: measured, 2026-11-22.
    ("decode", 32, 64): tiles(C(16, 32, 2, 3)),
    ("decode", 32, 128): tiles(C(16, 16, 4, 3)),
    ("decode", 32, 256): tiles(C(16, 32, 8, 2)),
    # decode-paged, 16 bits: measured, 2026-11-22.
    ("decode-paged", 16, 64): tiles(C(16, 128, 4, 5)),
    ("decode-paged", 16, 128): tiles(C(16, 64, 4, 5)),
    ("decode-paged", 16, 256): tiles(C(16, 32, 4, 5)),
    # decode-paged, 32 bits: measured, 2026-11-22.
    ("decode-paged", 32, 64): tiles(C(16, 64, 4, 2)),
    # extend, 16 bits: measured, 2026-11-22.
    ("extend", 16, 64): tiles(C(64, 64, 4, 4)),
    ("extend", 16, 128): tiles(C(64, 64, 4, 3)),
    ("extend", 16, 256): tiles(C(64, 32, 4, 2)),
    # extend, 32 bits: measured, 2026-11-22.
    ("extend", 32, 64): tiles(C(32, 32, 4, 2)),
    ("extend", 32, 128): tiles(C(32, 32, 4, 1)),
    ("extend", 32, 256): tiles(C(32, 32, 8, 1)),
    # extend-paged, 16 bits: measured, 2026-11-22.
    ("extend-paged", 16, 64): tiles(C(64, 64, 4, 5)),
    ("extend-paged", 16, 128): tiles(C(64, 64, 4, 5)),
    # decode, 8 bits: measured on an H100, bf16 queries, 2026-11-26: 360 us; with the tile of 16 bits 388.
    ("decode", 8, 128): tiles(C(16, 64, 4, 3)),
    # decode, 8 bits, 64: measured on an H100 by graphs, bf16 queries, 2026-11-26: 36 us; with the tile of 16 bits 43.
    ("decode", 8, 64): tiles(C(16, 128, 4, 3)),
    # fp8-fwd, 8 bits: measured, 2026-11-22.
    ("fp8-fwd", 8, 64): tiles(C(128, 64, 4, 3)),
    ("fp8-fwd", 8, 128): tiles({"plain": C(64, 128, 4, 3), "others": C(64, 64, 4, 3)}),
    ("fp8-fwd", 8, 256): tiles({"plain": C(128, 128, 8, 3), "others": C(64, 64, 4, 3)}),
    # head dim 512: by size, 2026-11-24.
    ("decode", 16, 512): tiles(C(16, 32, 4, 2)),
    ("decode", 32, 512): tiles(C(16, 16, 8, 2)),
    ("extend", 16, 512): tiles(C(64, 32, 8, 2)),
    ("extend", 32, 512): tiles(C(32, 16, 8)),
    # latent: measured on an H100 in bf16, 2026-11-25: 1 to 64 sequences of 8192 keys, 16 and 128 heads. fp32: by size.
    ("latent", 16, 512): tiles(C(16, 32, 4, 3)),
    ("latent", 32, 512): tiles(C(16, 16, 8, 2)),
    ("latent-extend", 16, 512): tiles(C(64, 64, 8, 2)),
    ("latent-extend", 32, 512): tiles(C(16, 16, 8)),
}

_CDNA: Rows = {
    # decode, 16 bits: registers, 2026-11-21.
    ("decode", 16, 64): tiles(C(16, 64, 4, 2)),
    ("decode", 16, 256): tiles(C(16, 32, 4, 2)),
    # decode, 128: clock on gfx942, 2026-11-26. 16 bits: 23161 cycles, with (16, 64, 4, 2) 34547; four warps compute all
    # scores each. 8 bits: 21779, with (16, 64, 4, 2) 41740. One warp takes less by the clock, but
    # `splits.RESIDENT` programs of it leave SIMDs idle. 8 bits on gfx950, whole GPU by `decoding --fp8`, 2026-11-28:
    # 8 sequences of 32768 keys take 209358 cycles, one of 8192 keys 16328; with four warps 223757 and 19079, scheduled
    # for one wave 213304 and 18092, with 128 keys 222194 and 20126.
    ("decode", 16, 128): tiles(C(16, 32, 2, 2)),
    ("decode", 8, 128): tiles(C(16, 64, 2, 2)),
    # decode, 32 bits: registers, 2026-11-21.
    ("decode", 32, 64): tiles(C(16, 32, 4, 2)),
    ("decode", 32, 128): tiles(C(16, 32, 4, 2)),
    ("decode", 32, 256): tiles(C(16, 16, 4, 2)),
    # extend, 16 bits: main loop, 2026-11-22.
    ("extend", 16, 64): tiles(C(64, 64, 4, 2, options=ROWS_OF_16)),
    ("extend", 16, 128): tiles(C(64, 64, 4, 2, options=ROWS_OF_16)),
    ("extend", 16, 256): tiles(C(64, 32, 4, 2, options=ROWS_OF_16)),
    # extend, 32 bits: registers, 2026-11-22.
    ("extend", 32, 64): tiles(C(64, 32, 4, 2)),
    ("extend", 32, 128): tiles(C(32, 32, 4, 2)),
    ("extend", 32, 256): tiles(C(32, 16, 4, 2)),
    # fp8-fwd, 8 bits: main loop, 2026-11-22. 64: clock, 2026-11-28: 3105 cycles on gfx942, for two waves 3155.
    ("fp8-fwd", 8, 64): tiles(C(128, 64, 4)),
    ("fp8-fwd", 8, 128): tiles({"plain": C(128, 64, 4, 2), "others": C(128, 64, 8, options=ROWS_OF_16)}),
    ("fp8-fwd", 8, 256): tiles(
        {"plain": C(128, 64, 8, 2, options=ROWS_OF_16), "others": C(128, 64, 8, options=ROWS_OF_16)}
    ),
    # head dim 512: registers, 2026-11-24.
    ("decode", 16, 512): tiles(C(16, 16, 4, 2)),
    ("decode", 32, 512): tiles(C(16, 16, 4)),
    ("extend", 16, 512): tiles(C(64, 16, 4, options=ROWS_OF_16)),
    ("extend", 32, 512): tiles(C(16, 16, 4)),
    # latent: registers, 2026-11-24.
    ("latent", 16, 512): tiles(C(16, 16, 4, 2)),
    ("latent", 32, 512): tiles(C(16, 16, 4)),
    ("latent-extend", 16, 512): tiles(C(64, 16, 4, options=ROWS_OF_16)),
    ("latent-extend", 32, 512): tiles(C(16, 16, 4)),
}

_RDNA2: Rows = {
    # decode, 16 bits: registers, 2026-11-21.
    ("decode", 16, 64): tiles(C(16, 32, 8, block_k=16)),
    ("decode", 16, 128): tiles(C(16, 32, 8, block_k=16)),
    ("decode", 16, 256): tiles(C(16, 32, 8, block_k=16)),
    # decode, 32 bits: registers, 2026-11-21.
    ("decode", 32, 64): tiles(C(16, 32, 8, block_k=16)),
    ("decode", 32, 128): tiles(C(16, 32, 8, block_k=16)),
    ("decode", 32, 256): tiles(C(16, 16, 8, block_k=16)),
    # decode-paged, 16 bits: registers, 2026-11-21.
    ("decode-paged", 16, 128): tiles(C(16, 32, 4, block_k=16)),
    # decode-paged, 32 bits: registers, 2026-11-21.
    ("decode-paged", 32, 128): tiles(C(16, 32, 4, block_k=16)),
    # extend, 16 bits: registers, 2026-11-21.
    ("extend", 16, 64): tiles(C(32, 16, 16, block_k=16)),
    ("extend", 16, 128): tiles(C(32, 16, 16, block_k=16)),
    ("extend", 16, 256): tiles(C(64, 16, 16, block_k=16)),
    # extend, 32 bits: registers, 2026-11-21.
    ("extend", 32, 64): tiles(C(32, 16, 16, block_k=16)),
    ("extend", 32, 128): tiles(C(16, 16, 16, block_k=16)),
    ("extend", 32, 256): tiles(C(16, 16, 16, block_k=16)),
    # head dim 512: registers, 2026-11-24.
    ("decode", 16, 512): tiles(C(16, 16, 8, block_k=16)),
    ("decode", 32, 512): tiles(C(16, 16, 8, block_k=16)),
    ("extend", 16, 512): tiles(C(16, 16, 16, block_k=16)),
    ("extend", 32, 512): tiles(C(16, 16, 16, block_k=16)),
    # latent: registers, 2026-11-24.
    ("latent", 16, 512): tiles(C(16, 16, 8, block_k=16)),
    ("latent", 32, 512): tiles(C(16, 16, 8, block_k=16)),
    ("latent-extend", 16, 512): tiles(C(16, 16, 16, block_k=16)),
    ("latent-extend", 32, 512): tiles(C(16, 16, 16, block_k=16)),
}

_RDNA3: Rows = {
    # decode, 16 bits: registers, 2026-11-21.
    ("decode", 16, 64): tiles(C(16, 64, 4)),
    ("decode", 16, 128): tiles(C(16, 32, 4)),
    ("decode", 16, 256): tiles(C(16, 16, 4)),
    # decode, 32 bits: registers, 2026-11-21.
    ("decode", 32, 64): tiles(C(16, 32, 8, block_k=16)),
    ("decode", 32, 128): tiles(C(16, 32, 4, block_k=16)),
    ("decode", 32, 256): tiles(C(16, 16, 8, block_k=16)),
    # decode-paged, 16 bits: registers, 2026-11-21.
    ("decode-paged", 16, 128): tiles(C(16, 64, 4, block_k=32)),
    ("decode-paged", 16, 256): tiles(C(16, 16, 8, block_k=16)),
    # extend, 16 bits: registers, 2026-11-21.
    ("extend", 16, 64): tiles(C(64, 32, 4)),
    ("extend", 16, 128): tiles(C(64, 32, 8, block_k=32)),
    ("extend", 16, 256): tiles(C(32, 16, 8, block_k=16)),
    # extend, 32 bits: registers, 2026-11-21.
    ("extend", 32, 64): tiles(C(64, 32, 8, block_k=16)),
    ("extend", 32, 128): tiles(C(16, 16, 16, block_k=16)),
    ("extend", 32, 256): tiles(C(16, 16, 16, block_k=16)),
    # head dim 512: registers, 2026-11-24.
    ("decode", 16, 512): tiles(C(16, 16, 8, block_k=32)),
    ("decode", 32, 512): tiles(C(16, 16, 16, block_k=16)),
    ("extend", 16, 512): tiles(C(32, 16, 16, block_k=16)),
    ("extend", 32, 512): tiles(C(16, 16, 16, block_k=16)),
    # latent: registers, 2026-11-24.
    ("latent", 16, 512): tiles(C(16, 16, 8, block_k=32)),
    ("latent", 32, 512): tiles(C(16, 16, 16, block_k=16)),
    ("latent-extend", 16, 512): tiles(C(32, 16, 16, block_k=16)),
    ("latent-extend", 32, 512): tiles(C(16, 16, 16, block_k=16)),
}

# RDNA 4 takes the tiles of RDNA 3 (2026-11-21).
_RDNA4: Rows = {
    **_RDNA3,
    # decode, 128: clock on gfx1201, 2026-11-26. 16 bits have RDNA 3's tile of four warps, which uses 96 to 99 % of the
    # memory bandwidth by `decoding`, two warps 84 to 87 %. With two a full unit is faster: 40526 cycles, not 50975.
    # 8 bits: 45288, with the tile of 16 bits and two warps 55597, of four warps 71432.
    ("decode", 8, 128): tiles(C(16, 64, 4, block_k=32)),
    # fp8-fwd: registers, 2026-11-22. Plain, 64 and 128: clock on gfx1201, 2026-11-26: 5153 and 8631 cycles; with
    # 32 keys 5773 and 9486; 128 with 64 rows 8758, with two stages 9391.
    ("fp8-fwd", 8, 64): tiles({"plain": C(128, 64, 8), "others": C(128, 32, 8)}),
    ("fp8-fwd", 8, 128): tiles({"plain": C(128, 64, 8), "others": C(64, 32, 8)}),
    ("fp8-fwd", 8, 256): tiles({"plain": C(128, 32, 8), "others": C(128, 16, 8)}),
}

ROWS: dict[str, Rows] = {"nvidia": _NVIDIA, "cdna": _CDNA, "rdna2": _RDNA2, "rdna3": _RDNA3, "rdna4": _RDNA4}
