"""Launch parameters of every kernel per GPU family, operation, element size and head-dim bucket.

One table, read by the ahead-of-time compiler and by the JIT path. `benchmarks/tune.py` measures its rows on a GPU.

cuda: measured on an H200 with code of Triton 3.7.1 (2026-11-22, bf16, full, causal and window, and the kinds that have
a tile of their own, of dim 32 plain alone); fp16 follows bf16, fp32 by size.
cdna, 16-bit types: no such GPU was at hand. Of a list of tiles, that with the fewest cycles by the clock of
`flash_attn_src/tests/count_cycles.py`, with loads of 500 and of 900: for each kind in bf16 (`any`: dropout with ALiBi,
not of dim 32), on gfx942, which counts twice, gfx90a and gfx950; fp16 was compiled for its registers. A target has rows
of its own where another tile gains a third there. Of nearly equal ones that whose reads of shared memory wait less for
its banks (plain backward of 64). Two stages, so that a wave's loads run under its own arithmetic, are worth more than a
second wave on the SIMD; two warps, of which fewer wait for each other, more than four; and in nearly all AMD's orders
of the instructions. No kernel spills a vector register to memory in code of Triton 3.7.1; in that of others some that
take more than 300 registers do.
rdna3, 16-bit types: no such GPU was at hand. The same, plain on gfx1100 alone; other kinds take the same tile where it
spills no more, or gains half with what it spills. The forward of dim 256 spills up to 56 registers, dk and dv of 128 up
to 39 and of 192 up to 10, dq of 256 up to 14. Kind `any`, and with dropout dk and dv up to 96, have a tile that an
earlier count of units chose: all columns of a score row in one warp, else P goes through LDS, and no more warps than a
product has rows of tiles, else they repeat each other's.
rdna2, fp32: no such GPU was at hand either. The largest tile of a list whose compiled code spills no vector register to
memory; of kind `any`, backward, every one does on rdna2 with dims 192 and 256 or fp16 and 128, and on rdna3 with fp32
and 192, or 16 bits and 64 to 128: what is there spills least. rdna2 has no matrix cores: a thread keeps whole rows of
its operands, so the head dim is taken in pieces of 16.
"""

from __future__ import annotations

from typing import NamedTuple

from flash_attn.runtime.variants import Variant, kinds


class Config(NamedTuple):
    """One launch configuration. depth: head-dim piece of the score products, 0 for the whole at once
    (see `tiles.deep_dot`). options: the compiler's own, beside warps and stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    depth: int = 0
    options: tuple[tuple[str, int | str], ...] = ()


def family(target: str) -> str:
    """The tuning family of a target: targets of one family share their tiles."""
    for prefix, name in _FAMILIES:
        if target.startswith(prefix):
            return name
    raise ValueError(f"no tuning for target {target!r}: add its family to flash_attn/kernels/tuning.py")


def config(target: str, variant: Variant) -> Config:
    """The launch configuration of one variant on one target. Raises ValueError for an unknown target."""
    bits = 32 if variant.dtype == "fp32" else 16
    table = _TABLE[family(target)] | _TABLE.get(target, {})
    if variant.op == "probabilities":
        return Config(32, 32, 4, depth=16)  # asked for when debugging; never worth a tile of its own
    # Without a row of its own a paged cache takes the tile of packed keys, and 96 and 192 that of 128 and 256.
    op, block_d = variant.op, variant.block_d
    if (op, bits, block_d) not in table and op.startswith("fwd-paged"):
        op = "fwd"
    if (op, bits, block_d) not in table:
        block_d = 1 << block_d.bit_length()
    configs = table[op, bits, block_d]
    if variant.op.startswith("fwd-paged"):
        return configs[0 if variant.kind == "plain" else -1]
    return configs[min(kinds(variant.op, variant.dtype).index(variant.kind), len(configs) - 1)]


def neighbours(target: str, own: Config) -> list[Config]:
    """What is near a configuration in tile, warps and stages, and its own tile with other options of the compiler."""
    options = dict(own.options)
    others = [(name, value) for name, value in _OPTIONS[family(target)] if value != "none" or name in options]
    found = [own._replace(options=tuple((options | dict([other])).items())) for other in others]
    fewest = 4 if family(target) == "cuda" else 2
    for block_m, block_n in ((1, 1), (2, 1), (1, 2), (0.5, 1), (1, 0.5)):
        for num_warps in sorted({fewest, 4, 8, own.num_warps}):
            for num_stages in (1, 2, 3):
                tile = int(own.block_m * block_m), int(own.block_n * block_n)
                if min(tile) >= 16 and max(tile) <= 256:
                    found.append(own._replace(
                        block_m=tile[0], block_n=tile[1], num_warps=num_warps, num_stages=num_stages
                    ))  # fmt: skip
    return [one for one in found if one != own]


def dies(target: str) -> int:
    """Compute dies of a target with a level-2 cache each, to which programs go in turn: 8 on MI300 and MI350."""
    return 8 if target in ("gfx942", "gfx950") else 1


def dropout_bits(target: str) -> int:
    """Bits of a column's number in which the columns of a thread differ, by the layout of the target's matrix
    instructions: see `dropout.keep_mask`."""
    return next(bits for prefix, bits in _DROPOUT_BITS if target.startswith(prefix))


def half_up(target: str) -> bool:
    """Whether fp32 becomes bfloat16 by `common.narrow`: the AMD targets without an instruction for it."""
    return target.startswith("gfx") and target != "gfx950"


# The compilers' options that trade registers of a program against programs beside it, and AMD's orders of the
# instructions of a loop with two products.
_WAVES = tuple(("waves_per_eu", waves) for waves in (1, 2, 3, 4))
_ORDERS = tuple(
    ("schedule_hint", order)
    for order in ("none", "attention", "memory-bound-attention", "attention,memory-bound-attention")
)
_OPTIONS: dict[str, tuple[tuple[str, int | str], ...]] = {
    "cuda": (("maxnreg", 128), ("maxnreg", 168)), "cdna": _WAVES + _ORDERS, "rdna2": _WAVES, "rdna3": _WAVES + _ORDERS,
}  # fmt: skip

# gfx12 has gfx11's wavefronts and registers and a WMMA that holds less: what fits one fits the other.
_FAMILIES = (("sm_", "cuda"), ("gfx9", "cdna"), ("gfx10", "rdna2"), ("gfx11", "rdna3"), ("gfx12", "rdna3"))

# mma from sm_80 on: columns 8 apart, and rows. MFMA of 32 x 32: four columns, and those 8 and 16 further on. WMMA of
# gfx11: every second column; of gfx12: 8 columns, and those 16 further on. Without matrix instructions: neighbours.
_DROPOUT_BITS = (("sm_", 0b111000), ("gfx9", 0b11011), ("gfx11", 0b11110), ("gfx12", 0b10111), ("gfx10", 0b1111))

C = Config
_16 = (("matrix_instr_nonkdim", 16),)
_BOTH = (("schedule_hint", "attention,memory-bound-attention"),)
_TABLE: dict[str, dict[tuple[str, int, int], tuple[Config, ...]]] = {
    # (op, element bits, head-dim bucket): one of each kind in the order of `variants.kinds`, the last for the rest.
    # Of a family, or of a target: what its family has for it otherwise.
    "cuda": {
        ("fwd", 16, 32): (C(64, 64, 4, 3),),
        ("fwd", 16, 64): (
            C(64, 64, 4, 3, options=(("maxnreg", 128),)),
            C(64, 64, 4, 3, options=(("maxnreg", 128),)),
            C(64, 64, 4, 3, options=(("maxnreg", 168),)),
            C(64, 64, 4, 3, options=(("maxnreg", 128),)),
        ),
        ("fwd", 16, 96): (C(128, 64, 4, 3), C(128, 64, 4, 3), C(64, 64, 4, 2, options=(("maxnreg", 168),))),
        ("fwd", 16, 128): (C(64, 64, 4, 3),),
        ("fwd", 16, 192): (*(C(128, 64, 8, 3),) * 4, C(128, 64, 8, 2)),
        ("fwd", 16, 256): (C(128, 64, 8, 2),),
        ("fwd-paged", 16, 64): (C(64, 64, 4, 3), C(64, 64, 4, 3, options=(("maxnreg", 128),))),
        ("fwd", 32, 32): (C(64, 32, 4, 2), C(32, 32, 4, 2)),
        ("fwd", 32, 64): (C(32, 32, 4, 2),),
        ("fwd", 32, 128): (C(32, 32, 4, 2),),
        ("fwd", 32, 256): (C(16, 16, 4),),
        ("bwd-dkdv", 16, 32): (C(32, 128, 4, 3), C(64, 64, 4, 2)),
        ("bwd-dkdv", 16, 64): (
            C(64, 64, 4, 3),
            C(32, 64, 4, 3, options=(("maxnreg", 168),)),
            C(64, 64, 4, 3),
            C(32, 64, 4, 3),
        ),
        ("bwd-dkdv", 16, 96): (C(32, 64, 4, 3),),
        ("bwd-dkdv", 16, 128): (*(C(32, 64, 4, 3),) * 4, C(32, 64, 4, 2)),
        ("bwd-dkdv", 16, 192): (C(32, 128, 8, 3),),
        ("bwd-dkdv", 16, 256): (*(C(64, 64, 8, 2),) * 3, C(32, 64, 8, 3)),
        ("bwd-dkdv", 32, 32): (C(32, 32, 4, 2),),
        ("bwd-dkdv", 32, 64): (C(32, 32, 4, 2),),
        ("bwd-dkdv", 32, 128): (C(32, 32, 4, 2),),
        ("bwd-dkdv", 32, 256): (C(16, 16, 4),),
        ("bwd-dq", 16, 32): (C(64, 64, 4, 3), C(64, 64, 4, 2)),
        ("bwd-dq", 16, 64): (
            C(128, 64, 8, 3, options=(("maxnreg", 128),)),
            C(64, 64, 4, 3, options=(("maxnreg", 168),)),
        ),
        ("bwd-dq", 16, 96): (C(128, 64, 8, 3), C(64, 64, 4, 3)),
        ("bwd-dq", 16, 128): (*(C(128, 64, 8, 3),) * 4, C(64, 64, 4, 2)),
        ("bwd-dq", 16, 192): (C(128, 64, 8, 2),),
        ("bwd-dq", 16, 256): (*(C(128, 32, 8, 3),) * 3, C(128, 32, 8, 2)),
        ("bwd-dq", 32, 32): (C(32, 32, 4, 2),),
        ("bwd-dq", 32, 64): (C(32, 32, 4, 2),),
        ("bwd-dq", 32, 128): (C(32, 32, 4, 2),),
        ("bwd-dq", 32, 256): (C(16, 16, 4),),
    },
    "cdna": {
        ("fwd", 16, 32): (*(C(128, 64, 4, 2, options=_BOTH),) * 4, C(128, 64, 4)),
        ("fwd", 16, 64): (*(C(128, 64, 4, 2, options=_BOTH),) * 4, C(128, 32, 4, 2, options=_BOTH)),
        ("fwd", 16, 96): (*(C(128, 64, 4, 2, options=_BOTH),) * 4, C(128, 32, 4, 2)),
        ("fwd", 16, 128): (
            C(128, 32, 4, 2, options=_BOTH),
            C(128, 32, 4, 2, options=_BOTH),
            C(128, 32, 4, 2),
            C(128, 32, 4, 2, options=_BOTH),
            C(128, 32, 4, 2),
        ),
        ("fwd", 16, 192): (C(128, 32, 4, 2, options=_BOTH),),
        ("fwd", 16, 256): (C(128, 32, 4, 2, options=_BOTH),),
        ("fwd", 32, 32): (C(128, 32, 4, options=(("waves_per_eu", 2),)),),
        ("fwd", 32, 64): (C(128, 32, 4, options=(("waves_per_eu", 2),)),),
        ("fwd", 32, 128): (C(128, 32, 8), C(128, 32, 4)),
        ("fwd", 32, 256): (C(64, 32, 4),),
        ("bwd-dkdv", 16, 32): (C(16, 128, 2, 2, options=_16), *(C(16, 64, 2, 2, options=_16),) * 3, C(16, 128, 4)),
        ("bwd-dkdv", 16, 64): (C(32, 64, 2), *(C(16, 64, 2, 2, options=_16 + _BOTH),) * 3, C(16, 128, 4)),
        ("bwd-dkdv", 16, 96): (C(16, 64, 2, 2, options=_BOTH),),
        ("bwd-dkdv", 16, 128): (
            C(16, 128, 4, 2, options=_BOTH),
            C(32, 64, 2, options=_16),
            C(32, 64, 2, options=_16),
            C(16, 128, 4, 2, options=_BOTH),
            C(32, 128, 4, options=_16),
        ),
        ("bwd-dkdv", 16, 192): (C(16, 64, 4, 2, options=_BOTH),),
        ("bwd-dkdv", 16, 256): (C(16, 64, 4), C(16, 64, 4), C(16, 64, 4, options=_BOTH), C(16, 64, 4)),
        ("bwd-dkdv", 32, 32): (C(32, 128, 8), C(64, 64, 4)),
        ("bwd-dkdv", 32, 64): (C(64, 64, 4), C(32, 64, 4)),
        ("bwd-dkdv", 32, 128): (C(32, 32, 4), C(16, 64, 4)),
        ("bwd-dkdv", 32, 256): (C(16, 32, 4),),
        ("bwd-dq", 16, 32): (C(64, 32, 2, 2, options=_BOTH),),
        ("bwd-dq", 16, 64): (C(128, 64, 4), *(C(64, 32, 2, 2, options=_BOTH),) * 4),
        ("bwd-dq", 16, 96): (C(64, 32, 2, 2, options=_BOTH),),
        ("bwd-dq", 16, 128): (
            C(128, 32, 4),
            *(C(64, 16, 2, 2, options=_BOTH),) * 3,
            C(64, 32, 2, 2, options=_BOTH),
        ),
        ("bwd-dq", 16, 192): (*(C(128, 32, 4, 2, options=_BOTH),) * 4, C(64, 32, 2, 2, options=_BOTH)),
        ("bwd-dq", 16, 256): (C(128, 16, 4, 2, options=_BOTH),),
        ("bwd-dq", 32, 32): (C(64, 64, 4),),
        ("bwd-dq", 32, 64): (C(64, 32, 4),),
        ("bwd-dq", 32, 128): (C(64, 32, 4),),
        ("bwd-dq", 32, 256): (C(32, 16, 4),),
    },
    "gfx942": {
        ("bwd-dkdv", 16, 256): (
            C(32, 64, 4, options=_16),
            C(32, 64, 4, options=_16),
            C(16, 64, 4, options=_BOTH),
            C(32, 64, 4, options=_16),
            C(16, 64, 4),
        ),
    },
    "gfx950": {
        ("bwd-dkdv", 16, 128): (*(C(16, 64, 2, 2, options=_BOTH),) * 4, C(16, 64, 2, 2, options=_16 + _BOTH)),
        ("bwd-dkdv", 16, 256): (C(16, 64, 4, 2, options=_16 + _BOTH),),
        ("bwd-dq", 16, 64): (C(64, 32, 2, 2, options=_BOTH),),
        ("bwd-dq", 16, 128): (
            C(128, 32, 4, 2, options=_BOTH),
            *(C(64, 16, 2, 2, options=_BOTH),) * 3,
            C(64, 32, 2, 2, options=_BOTH),
        ),
    },
    "rdna2": {
        ("fwd", 16, 32): (C(64, 16, 8, depth=16),),
        ("fwd", 16, 64): (C(64, 16, 8, depth=16),),
        ("fwd", 16, 128): (C(64, 16, 8, depth=16),),
        ("fwd", 16, 256): (C(32, 16, 8, depth=16),),
        ("fwd", 32, 32): (C(32, 16, 8, depth=16),),
        ("fwd", 32, 64): (C(32, 16, 8, depth=16),),
        ("fwd", 32, 128): (C(32, 16, 8, depth=16),),
        ("fwd", 32, 256): (C(32, 16, 8, depth=16),),
        ("bwd-dkdv", 16, 32): (C(16, 32, 4, depth=16), C(16, 32, 8, depth=16)),
        ("bwd-dkdv", 16, 64): (C(16, 32, 4, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dkdv", 16, 128): (C(16, 32, 8, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dkdv", 16, 256): (C(16, 32, 8, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dkdv", 32, 32): (C(16, 16, 16, depth=16),),
        ("bwd-dkdv", 32, 64): (C(16, 16, 16, depth=16),),
        ("bwd-dkdv", 32, 128): (C(16, 16, 16, depth=16),),
        ("bwd-dkdv", 32, 256): (C(16, 16, 16, depth=16),),
        ("bwd-dq", 16, 32): (C(64, 16, 8, depth=16), C(32, 16, 8, depth=16)),
        ("bwd-dq", 16, 64): (C(64, 16, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dq", 16, 128): (C(64, 16, 8, depth=16), *(C(16, 16, 8, depth=16),) * 3, C(16, 16, 16, depth=16)),
        ("bwd-dq", 16, 256): (C(32, 16, 8, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dq", 32, 32): (C(16, 16, 8, depth=16),),
        ("bwd-dq", 32, 64): (C(16, 16, 8, depth=16),),
        ("bwd-dq", 32, 128): (C(16, 16, 8, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dq", 32, 256): (C(16, 16, 8, depth=16), C(16, 16, 16, depth=16)),
    },
    "rdna3": {
        ("fwd", 16, 32): (C(64, 32, 4, 2),),
        ("fwd", 16, 64): (*(C(64, 32, 4, 2),) * 4, C(128, 32, 8, depth=32)),
        ("fwd", 16, 96): (*(C(64, 32, 4),) * 4, C(64, 32, 8, depth=32)),
        ("fwd", 16, 128): (C(64, 32, 4), *(C(128, 32, 8),) * 3, C(64, 32, 8, depth=64)),
        ("fwd", 16, 192): (C(64, 32, 8, 2, depth=32),),
        ("fwd", 16, 256): (C(64, 16, 4, depth=16),),
        ("fwd-paged", 16, 96): (C(64, 32, 8, depth=32),),
        ("fwd-paged", 16, 128): (C(64, 32, 8, depth=64), C(64, 32, 8, depth=32)),
        ("fwd-paged", 16, 256): (C(32, 16, 8, depth=32),),
        ("fwd-paged-whole", 16, 128): (C(128, 32, 8, depth=32), C(64, 32, 8, depth=64)),
        ("fwd-paged-whole", 16, 256): (C(64, 16, 8, depth=32),),
        ("fwd", 32, 32): (C(128, 32, 8, depth=16),),
        ("fwd", 32, 64): (C(128, 16, 8, depth=32),),
        ("fwd", 32, 128): (C(64, 16, 8, depth=32),),
        ("fwd", 32, 256): (C(32, 16, 8, depth=32),),
        ("bwd-dkdv", 16, 32): (C(32, 64, 4), C(32, 64, 4), C(32, 32, 4), C(32, 64, 4), C(32, 32, 4)),
        ("bwd-dkdv", 16, 64): (
            C(32, 64, 4, 2, depth=32),
            C(32, 64, 4, 2, depth=32),
            C(32, 32, 8, depth=32),
            C(32, 64, 4, 2, depth=32),
            C(32, 32, 8, depth=32),
        ),
        ("bwd-dkdv", 16, 96): (
            C(16, 64, 4, 2, depth=32),
            C(16, 64, 4, 2, depth=32),
            C(32, 64, 8, depth=32),
            C(16, 64, 4, 2, depth=32),
            C(16, 32, 8, depth=16),
        ),
        ("bwd-dkdv", 16, 128): (*(C(16, 64, 4, depth=16),) * 4, C(16, 32, 8, depth=16)),
        ("bwd-dkdv", 16, 192): (*(C(16, 32, 4, 2, depth=32),) * 4, C(16, 16, 4, depth=16)),
        ("bwd-dkdv", 16, 256): (C(16, 16, 8, depth=32),),
        ("bwd-dkdv", 32, 32): (C(32, 32, 8, depth=16), C(16, 32, 8, depth=16)),
        ("bwd-dkdv", 32, 64): (C(16, 32, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dkdv", 32, 128): (C(16, 16, 8, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dkdv", 32, 192): (C(16, 16, 16, depth=16), C(16, 16, 32, depth=64)),
        ("bwd-dkdv", 32, 256): (C(16, 16, 16, depth=16), C(16, 16, 32, depth=16)),
        ("bwd-dq", 16, 32): (C(64, 32, 4), C(64, 32, 8)),
        ("bwd-dq", 16, 64): (*(C(64, 16, 4),) * 4, C(32, 32, 8, depth=32)),
        ("bwd-dq", 16, 128): (
            C(64, 32, 4, depth=32),
            C(64, 32, 4, depth=32),
            C(64, 16, 4, depth=32),
            C(64, 32, 4, depth=32),
            C(16, 16, 8, depth=16),
        ),
        ("bwd-dq", 16, 192): (*(C(64, 32, 8, depth=32),) * 4, C(32, 16, 8, depth=16)),
        ("bwd-dq", 16, 256): (
            C(32, 16, 4, 2, depth=32),
            C(32, 16, 4, 2, depth=32),
            C(32, 16, 8, depth=32),
            C(32, 16, 4, 2, depth=32),
            C(32, 16, 8, depth=32),
        ),
        ("bwd-dq", 32, 32): (C(32, 32, 8, depth=16), C(32, 16, 8, depth=16)),
        ("bwd-dq", 32, 64): (C(32, 16, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dq", 32, 128): (C(32, 16, 8, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dq", 32, 256): (C(16, 16, 8, depth=16), C(16, 16, 32, depth=16)),
    },
}
