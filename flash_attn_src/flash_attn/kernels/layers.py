"""Launch parameters of the kernels that are not attention: they wait for memory, so one row serves all targets."""

from __future__ import annotations

from typing import Any

from flash_attn.runtime.variants import Variant, blocks

# Elements of a rotary program's tile: two 16-byte accesses a thread of four warps of 32.
_ROTARY_TILE = 2048

# Of a norm's, at least: short rows share a program. A warp has 512 elements, so that a thread of 64 has one 16-byte
# access, of 32 two; where each element has an address, half as many.
_NORM_FWD_TILE = 1024
_NORM_BWD_TILE = 512
_NORM_WARP = 512

# Columns at a time of rows that no block holds. Forward a program has 8 warps at most: with more fewer run at once.
_LONG_NORM_FWD_TILE = 4096
_LONG_NORM_BWD_TILE = 8192
_NORM_FWD_WARPS = 8

# Blocks whose backward reads a row while it works on the one before: on the H200 1.1 to 1.5 times as fast. Others were
# not faster there, as enough programs share a multiprocessor or registers are short.
_NORM_AHEAD = {"norm-bwd": (8192,), "norm-bwd-w32": (8192,), "norm-bwd-r32": (1024, 2048, 4096)}

# Pieces in which a block of the cross entropy is read, forward: as many as the kernel has by name.
_LOSS_PIECES = 4


def launch(variant: Variant, target: str) -> tuple[dict[str, Any], dict[str, int]]:
    """(constants, compiler options) of a variant of a layer."""
    unit = 1 if variant.kind == "uneven" else 4 if variant.dtype == "fp32" else 8
    family = {"rotary": _rotary, "norm": _norm, "cross": _loss}[variant.op.partition("-")[0]]
    tile, warps = family(variant, unit)
    options = {"num_warps": warps, "num_stages": 1}
    if target.startswith("sm_") and variant.op.startswith("norm-bwd") and warps < (8 if "r32" in variant.op else 16):
        options["maxnreg"] = 128  # with up to 164, which it takes unasked, fewer programs run at once
    return {"UNIT": unit, **tile}, options


def _rotary(variant: Variant, _: int) -> tuple[dict[str, Any], int]:
    block = variant.block_d
    return {"BLOCK_M": _ROTARY_TILE // block, "BLOCK_D": block, "INTERLEAVED": "interleaved" in variant.op}, 4


def _norm(variant: Variant, unit: int) -> tuple[dict[str, Any], int]:
    block = variant.block_d
    is_forward = variant.op.startswith("norm-fwd")
    is_long = block == blocks(variant.op, variant.kind)[-1]
    if is_long:
        block = min(block, _LONG_NORM_FWD_TILE if is_forward else _LONG_NORM_BWD_TILE)
    elements = max(block, _NORM_FWD_TILE if is_forward else _NORM_BWD_TILE)
    tile = {"BLOCK_M": elements // block, "BLOCK_N": block, "LONG": is_long}
    warps = elements // (_NORM_WARP if unit > 1 else _NORM_WARP // 2)
    if is_forward:
        return tile, min(warps, _NORM_FWD_WARPS)
    return {**tile, "AHEAD": unit == 8 and not is_long and block in _NORM_AHEAD[variant.op]}, warps


def _loss(variant: Variant, unit: int) -> tuple[dict[str, Any], int]:
    if variant.op == "cross-entropy-bwd":
        return {"BLOCK_N": variant.block_d}, 8
    return {"BLOCK_N": variant.block_d // _LOSS_PIECES}, 4 if unit > 1 else 8
