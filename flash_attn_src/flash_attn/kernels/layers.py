"""Launch parameters of the kernels that are not attention: they wait for memory, so one row serves all targets."""

from __future__ import annotations

from typing import Any

from flash_attn.runtime.variants import Variant

# Elements of a rotary program's tile: two 16-byte accesses a thread of four warps of 32.
_ROTARY_TILE = 2048


def launch(variant: Variant) -> tuple[dict[str, Any], dict[str, int]]:
    """(constants, compiler options) of a variant of a layer."""
    unit = 1 if variant.kind == "uneven" else 4 if variant.dtype == "fp32" else 8
    block = variant.block_d
    if variant.op.startswith("rotary"):
        tile = {"BLOCK_M": _ROTARY_TILE // block, "BLOCK_D": block, "INTERLEAVED": variant.op.endswith("interleaved")}
    elif variant.op.startswith("norm-bwd-weights"):
        tile = {"BLOCK_M": 32, "BLOCK_N": block}
    else:
        tile = {"BLOCK_N": block}
    return {"UNIT": unit, **tile}, {"num_warps": 8 if block > 1024 else 4, "num_stages": 1}
