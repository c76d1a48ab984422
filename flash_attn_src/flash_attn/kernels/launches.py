"""How a variant is compiled and launched on a target: module, function, constants and compiler options.

The ahead-of-time compiler and the JIT path both read it, so both run the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flash_attn.kernels import switches, targets, tuning
from flash_attn.kernels.int8_rows import KEY_ROWS, QUERY_ROWS
from flash_attn.kernels.targets import Target
from flash_attn.kernels.tuning import Config, layers
from flash_attn.kernels.variants import Variant


class Specification(NamedTuple):
    """Everything but the argument types, which the operation's row has. absent: the arguments that the kernel lacks."""

    module: str
    symbol: str
    constants: dict[str, Any]
    absent: tuple[str, ...]
    options: dict[str, int | str]


def candidates(variant: Variant, target: str) -> list[Config]:
    """The configurations that a search on a GPU compares, the table's own first. Empty for an operation whose tile is
    fixed. Raises ValueError for a target without tuning."""
    if not variant.operation.searched:
        return []
    own = tuning.config(target, variant)
    # A block of FP8 keys must end with the padding of its sequence: fp8_cast.COLUMNS. INT8 rows share scales.
    rows, keys = {"fp8-fwd": (256, 128), "int8-fwd": (QUERY_ROWS, KEY_ROWS)}.get(variant.op, (256, 256))
    near = [tile for tile in tuning.neighbours(target, own) if tile.block_m <= rows and tile.block_n <= keys]
    return [own, *(tile for tile in near if tuning.serves(variant, tile))]


def specification(variant: Variant, target: str, config: Config | None = None) -> Specification:
    """The specification of a variant for a target, by the caller's configuration or the tuning table's.
    Raises ValueError for a target without tuning."""
    row, gpu = variant.operation, targets.get(target)
    config = config or tuning.config(target, variant)
    constants = {name: _CONSTANTS[name](variant, gpu, config) for name in row.constants}
    if (
        "BLOCK_D_TAIL" in constants
    ):  # the columns of BLOCK_D and of BLOCK_D_TAIL are two tiles, since a tile's size is a power of two
        constants["BLOCK_D"] -= constants["BLOCK_D_TAIL"]
    absent = row.absent(variant.kind, variant.dtype, gpu)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options)}
    return Specification(row.module, row.function, constants | row.fixed, absent, options)


def _block_k(variant: Variant, _: Target, config: Config) -> int:
    return min(config.block_k or variant.block_d, variant.block_d)


def _beside(variant: Variant, gpu: Target, config: Config) -> bool:
    """Whether the warps of a tile stand side by side, because it has fewer rows than the 16 that `wgmma` gives to each.

    `any` would drop weights after their cast.
    """
    few_rows = 64 <= config.block_m < 16 * config.num_warps
    return gpu.matrix_unit == "wgmma" and few_rows and variant.dtype != "fp32" and variant.kind != "any"


def _parts(variant: Variant, gpu: Target, _: Config) -> int:
    """How many sums of weights a row has, see `forward.attn_fwd`."""
    measured = variant.op in ("fwd", "sparse-fwd") and variant.kind in ("plain", "sink", "blocks")
    return 4 if measured and variant.dtype != "fp32" and variant.block_d in gpu.partial_sums else 1


# Powers of two by which weights are enlarged where the matrix unit flushes subnormals: `common.shifted`.
_WEIGHT_SHIFT = 14


def _weight_shift(variant: Variant, gpu: Target, _: Config) -> int:
    return _WEIGHT_SHIFT if gpu.loses_range(variant.dtype) else 0


# The name of a constant -> its value for a variant, a target and a launch configuration.
_CONSTANTS: dict[str, Callable[[Variant, Target, Config], Any]] = {
    "VEC": lambda variant, *_: {"fp32": 4, "fp16": 8, "bf16": 8}.get(variant.dtype, 16),
    "UNIT": lambda variant, *_: layers.unit(variant),
    "BLOCK_M": lambda _variant, _gpu, config: config.block_m,
    "BLOCK_N": lambda _variant, _gpu, config: config.block_n,
    "BLOCK_D": lambda variant, *_: variant.block_d,
    "BLOCK_D_TAIL": lambda variant, *_: variant.block_d - (1 << (variant.block_d.bit_length() - 1)),
    "VALUE_DIM": lambda variant, *_: variant.operation.value_dims.get(variant.block_d, 0),
    "BLOCK_V": lambda variant, *_: variant.block_d,
    "BLOCK_K": _block_k,
    "SCORE_MOD": lambda variant, *_: variant.kind,
    "HAS_SCORE_MOD": lambda variant, *_: variant.kind not in ("plain", "sink"),
    "USE_SINKS": lambda variant, *_: variant.kind != "plain",
    "HAS_LONG_ROWS": lambda variant, *_: layers.is_long(variant),
    "USE_PREFETCH": lambda variant, *_: layers.reads_ahead(variant),
    "NUM_XCDS": lambda _variant, gpu, _config: gpu.num_xcds,
    "ROUND_HALF_UP": lambda _variant, gpu, _config: gpu.half_up,
    "BREAK_DOT_CHAIN": _beside,
    "NUM_PARTIAL_SUMS": _parts,
    "WEIGHT_SHIFT": _weight_shift,
    # Elsewhere the product would cost more than it saves, or was not measured.
    "USE_ANCHOR_DOT": lambda variant, gpu, _config: (
        variant.kind == "bias" and variant.dtype != "fp32" and gpu.matrix_unit in ("mfma", "wmma")
    ),
    "USE_PEELING": lambda _variant, _gpu, config: "in_thread_transpose" in dict(config.options),
    "DK_APART": lambda _variant, _gpu, config: switches.DK_APART in dict(config.options),
    "LAZY_RESCALE": lambda _variant, gpu, config: (
        config.num_warps * gpu.wavefront if switches.LAZY_RESCALE in dict(config.options) else 0
    ),
    "ASYNC_COPY": lambda _variant, _gpu, config: "async_copy" in dict(config.options),
    "DROPOUT_BITS_SHARED": lambda _variant, gpu, _config: gpu.dropout_bits,
    # Triton 3.7.1 converts to FP8 by integer arithmetic on gfx12, and casts fp32 to fp16 one by one on gfx942.
    "HAS_CAST": lambda variant, gpu, _config: (
        gpu.family == "rdna4" or (variant.operation.module == "decode" and gpu.fnuz)
    ),
    "USE_FNUZ": lambda _variant, gpu, _config: gpu.fnuz,
}
