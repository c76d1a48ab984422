"""Launch configurations of the kernels of layers. They wait for memory, so the same rules serve every target."""

from __future__ import annotations

from flash_attn.kernels import targets
from flash_attn.kernels.tuning.config import Config
from flash_attn.kernels.variants import Variant

# Elements of a rotary program's tile: two accesses of 16 bytes for each thread of four warps of 32 (2026-11-21).
_ROTARY_TILE = 2048

# The fewest elements of a norm's tile: short rows share a program. A warp has 512 elements, so that a thread of 64 has
# one access of 16 bytes, and a thread of 32 has two. Where each element has an address, a warp has half as many.
# Measured on an H200, 2026-11-23.
_NORM_FWD_TILE = 1024
_NORM_BWD_TILE = 512
_NORM_WARP = 512

# Columns at a time of rows that no block holds. A forward program has 8 warps at most: with more, fewer programs run at
# once. Measured on an H200, 2026-11-23.
_LONG_NORM_FWD_TILE = 4096
_LONG_NORM_BWD_TILE = 8192
_NORM_FWD_WARPS = 8

# Block sizes whose backward loads the next row while it processes the current row: 1.1 to 1.5 times as fast on the
# H200. Other blocks were not faster there, because enough programs share a multiprocessor or registers are short
# (2026-11-23).
_NORM_AHEAD = {"norm-bwd": (8192,), "norm-bwd-w32": (8192,), "norm-bwd-r32": (1024, 2048, 4096)}

# The pieces in which the forward of the cross entropy reads a block: as many as the kernel has by name (2026-11-23).
_LOSS_PIECES = 4

# NVIDIA: the backward of a norm takes up to 164 registers unless it is limited, and then fewer programs run at once.
_NORM_BWD_REGISTERS = 128


def unit(variant: Variant) -> int:
    """Elements that a thread reads at once: 16 bytes, or one element of uneven rows."""
    return 1 if variant.kind == "uneven" else 4 if variant.dtype == "fp32" else 8


def config(target: str, variant: Variant) -> Config:
    """The launch configuration of a variant of a layer. Raises ValueError for an unknown target."""
    gpu, op = targets.get(target), variant.operation
    block = variant.block_d
    if op.module == "rotary":
        return Config(_ROTARY_TILE // block, 0, 4)
    if op.function == "cross_entropy_bwd":
        return Config(0, block, 8)
    if op.module == "cross_entropy":
        return Config(0, block // _LOSS_PIECES, 4 if unit(variant) > 1 else 8)
    is_forward = op.function == "norm_fwd"
    if is_long(variant):
        block = min(block, _LONG_NORM_FWD_TILE if is_forward else _LONG_NORM_BWD_TILE)
    elements = max(block, _NORM_FWD_TILE if is_forward else _NORM_BWD_TILE)
    warps = elements // (_NORM_WARP if unit(variant) > 1 else _NORM_WARP // 2)
    if is_forward:
        return Config(elements // block, block, min(warps, _NORM_FWD_WARPS))
    many_warps = 8 if "residual" in op.fp32_arguments else 16
    limited = gpu.family == "nvidia" and warps < many_warps
    return Config(elements // block, block, warps, options=(("maxnreg", _NORM_BWD_REGISTERS),) if limited else ())


def is_long(variant: Variant) -> bool:
    """Whether a norm's rows may be longer than its block: in the largest block of a kind."""
    return variant.block_d == variant.operation.sizes_for(variant.kind)[-1]


def reads_ahead(variant: Variant) -> bool:
    """Whether the backward of a norm reads the next row while it works on one."""
    return unit(variant) == 8 and not is_long(variant) and variant.block_d in _NORM_AHEAD[variant.op]
