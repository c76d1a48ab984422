"""Launch parameters of the kernels that are not attention: they wait for memory, so one row serves all targets."""

from __future__ import annotations

from typing import Any

from flash_attn.runtime.variants import Variant, blocks

# Elements of a rotary program's tile: two 16-byte accesses a thread of four warps of 32.
_ROTARY_TILE = 2048


def launch(variant: Variant) -> tuple[dict[str, Any], dict[str, int]]:
    """(constants, compiler options) of a variant of a layer."""
    unit = 1 if variant.kind == "uneven" else 4 if variant.dtype == "fp32" else 8
    block = variant.block_d
    warps = 8 if block > 1024 else 4
    if variant.op.startswith("rotary"):
        tile = {"BLOCK_M": _ROTARY_TILE // block, "BLOCK_D": block, "INTERLEAVED": "interleaved" in variant.op}
    elif variant.op.startswith("norm-bwd"):
        is_long = block == blocks(variant.op, variant.kind)[-1]
        tile = {"BLOCK_N": block, "LONG": is_long}
        warps = 16 if is_long else warps
    else:
        tile = {"BLOCK_N": block}
    return {"UNIT": unit, **tile}, {"num_warps": warps, "num_stages": 1}
