"""How a variant is compiled and launched on a target: module, function, constants and compiler options.

Read by the ahead-of-time compiler and by the JIT path, so that both run the same kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flash_attn.kernels import decode_tuning, layers, tuning
from flash_attn.kernels.tuning import Config
from flash_attn.runtime.variants import BLOCKS, OPS, Variant, fp8_format

# The modules tuned by decode_tuning, and the constants that their kernels take.
_OF_A_CACHE = {
    "decode": ("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "DEPTH", "PAGED", "SHAPED", "HALF_UP"),
    "combine": ("BLOCK_N", "BLOCK_D"),
    "append": ("VEC", "BLOCK_M", "BLOCK_D"),
    "fp8": (),
    "fp8_cast": (),
}

_SEARCHED = (
    *("fwd", "fwd-paged", "fwd-paged-whole", "fp8-fwd", "bwd-dq", "bwd-dkdv"),
    *("decode", "decode-paged", "extend", "extend-paged"),
)

# How keys find their page: tiles.ROWS, tiles.WHOLE_BLOCKS; 0 where there are none.
_PAGED = {
    **dict.fromkeys(("fwd-paged", "decode-paged", "extend-paged"), 1),
    **dict.fromkeys(("fwd-paged-whole", "decode", "extend"), 2),
}


class Specification(NamedTuple):
    """Everything but the argument types, which `runtime.variants` knows."""

    module: str
    symbol: str
    constants: dict[str, Any]
    options: dict[str, int | str]


def configuration(variant: Variant, target: str) -> Config:
    """The launch configuration of a variant of attention, by the table that has it. Raises ValueError for a target
    without tuning."""
    return (decode_tuning if OPS[variant.op][0] in _OF_A_CACHE else tuning).config(target, variant)


def candidates(variant: Variant, target: str) -> list[Config]:
    """What a search on a GPU compares, the table's own configuration first; of an operation whose tile is no choice
    nothing. Raises ValueError for a target without tuning."""
    if variant.op not in _SEARCHED:
        return []
    own = configuration(variant, target)
    # A block of keys in FP8 must not reach beyond those of its sequence: fp8_cast.COLUMNS.
    most = 128 if variant.op == "fp8-fwd" else 256
    return [own, *(one for one in tuning.neighbours(target, own) if one.block_n <= most)]


def specification(variant: Variant, target: str, config: Config | None = None) -> Specification:
    """The specification of a variant for a target, by its own configuration or that of the tuning table.
    Raises ValueError for a target without tuning."""
    module, symbol = OPS[variant.op]
    if variant.op in BLOCKS:
        return Specification(module, symbol, *layers.launch(variant, target))
    cached = module in _OF_A_CACHE
    config = config or configuration(variant, target)
    constants: dict[str, Any] = {
        "VEC": {"fp32": 4, "fp16": 8, "bf16": 8}.get(variant.dtype, 16),
        "BLOCK_M": config.block_m,
        "BLOCK_D": variant.block_d,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options)}
    if variant.op.startswith("fp8-"):
        return Specification(module, symbol, _fp8_constants(variant, target, constants, config), options)
    if cached:
        constants |= {"BLOCK_N": config.block_n, "DEPTH": min(config.depth or variant.block_d, variant.block_d)}
        constants |= {"PAGED": _PAGED.get(variant.op, 0), "SHAPED": variant.kind != "plain"}
        constants["HALF_UP"] = tuning.half_up(target)
        taken = {name: value for name, value in constants.items() if name in _OF_A_CACHE[module]}
        return Specification(module, symbol, taken, options)
    depth = min(config.depth or variant.block_d, variant.block_d)
    constants |= {"BLOCK_N": config.block_n, "DEPTH": depth, "SHARED": tuning.dropout_bits(target)}
    if variant.op != "probabilities":
        power = 1 << (variant.block_d.bit_length() - 1)
        constants |= {
            "BLOCK_D": power,
            "TAIL": variant.block_d - power,
            "KIND": variant.kind,
            "DIES": tuning.dies(target),
            "HALF_UP": tuning.half_up(target),
        }
    if symbol == "attn_fwd":
        constants["PAGED"] = _PAGED.get(variant.op, 0)
    return Specification(module, symbol, constants, options)


def _fp8_constants(variant: Variant, target: str, constants: dict[str, Any], config: tuning.Config) -> dict[str, Any]:
    if variant.op == "fp8-fwd":
        constants |= {"BLOCK_N": config.block_n, "EXTRA": variant.kind != "plain", "DIES": tuning.dies(target)}
        return constants | {"SHARED": tuning.dropout_bits(target)}
    if variant.op == "fp8-amax":
        return constants
    fnuz = fp8_format(target) == "fp8e4b8"
    return constants | {"BLOCK_N": config.block_n, "FNUZ": fnuz, "TRANSPOSED": variant.op == "fp8-cast-v"}
