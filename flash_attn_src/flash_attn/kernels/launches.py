"""How a variant is compiled and launched on a target: module, function, constants and compiler options.

Read by the ahead-of-time compiler and by the JIT path, so that both run the same kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flash_attn.kernels import tuning
from flash_attn.kernels.tuning import Config
from flash_attn.runtime.variants import OPS, Variant


class Specification(NamedTuple):
    """Everything but the argument types, which `runtime.variants` knows."""

    module: str
    symbol: str
    constants: dict[str, Any]
    options: dict[str, int]


def specification(variant: Variant, target: str, config: Config | None = None) -> Specification:
    """The specification of a variant for a target, by its own configuration or that of the tuning table.
    Raises ValueError for a target without tuning."""
    module, symbol = OPS[variant.op]
    config = config or tuning.config(target, variant)
    constants: dict[str, Any] = {
        "VEC": 4 if variant.dtype == "fp32" else 8,
        "BLOCK_M": config.block_m,
        "BLOCK_D": variant.block_d,
    }
    if variant.op != "bwd-delta":
        depth = min(config.depth or variant.block_d, variant.block_d)
        constants |= {"BLOCK_N": config.block_n, "DEPTH": depth, "STEP": tuning.dropout_step(target)}
        if variant.op != "probabilities":
            constants |= {
                "EXTRA": variant.kind != "plain",
                "SOFTCAP": variant.kind == "softcap",
                "DIES": tuning.dies(target),
                "HALF_UP": tuning.half_up(target),
            }
        if symbol == "attn_fwd":
            constants["PAGED"] = variant.op == "fwd-paged"
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options)}
    return Specification(module, symbol, constants, options)
