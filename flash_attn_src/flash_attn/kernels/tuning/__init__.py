"""Launch configurations of every kernel: a file for each GPU family, one for the kernels of a KV cache, one for the
kernels of layers, one for tiles that are no choice.

The ahead-of-time compiler and the JIT path read the same tables. `benchmarks/tune.py` measures rows on a GPU. Each
group of rows has its reason and date: the file's docstring explains the reasons.
"""

from __future__ import annotations

from functools import cache

from flash_attn.kernels import targets
from flash_attn.kernels.operation import SPARSE_BLOCK
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.tuning import cdna, decode, fixed, layers, nvidia, rdna2, rdna3, rdna4
from flash_attn.kernels.tuning.config import Config, Rows, Tiles
from flash_attn.kernels.variants import Variant

__all__ = ["Config", "config", "neighbours", "rows", "serves"]

_FAMILIES = {"nvidia": nvidia, "cdna": cdna, "rdna2": rdna2, "rdna3": rdna3, "rdna4": rdna4}


@cache
def rows(target: str) -> Rows:
    """The table of a target: its own rows if it has some, else its family's rows.

    Raises ValueError for an unknown target, and for a family without tiles.
    """
    family = targets.get(target).family
    if family not in _FAMILIES or family not in decode.ROWS:
        raise ValueError(
            f"no tiles for {family}, the family of {target}: add a file to flash_attn/kernels/tuning and rows to its "
            f"decode.py; there are {', '.join(_FAMILIES)}"
        )
    own = cdna.TARGET_ROWS.get(target, {})
    return {**_FAMILIES[family].ROWS, **decode.ROWS[family], **own}


def config(target: str, variant: Variant) -> Config:
    """The launch configuration of a variant on a target. Raises ValueError for an unknown target."""
    operation = variant.operation
    if operation.tuning == "fixed":
        targets.get(target)
        return fixed.CONFIGS[variant.op, variant.kind]
    if operation.tuning == "layers":
        return layers.config(target, variant)
    table = rows(target)
    row = _row(table, variant)
    if variant.kind == "bias":
        own = table.get((f"{variant.op}-bias", 32 if variant.dtype == "fp32" else 16, variant.block_d))
        # Otherwise half the keys, because a tile of the bias takes as many registers as a tile of scores.
        return own["any"] if own else row["any"]._replace(block_n=max(row["any"].block_n // 2, 16))
    tile = row["plain" if variant.kind in ("sink", "blocks") else variant.kind]
    if operation.has_mask:
        return tile._replace(**{_inner(variant): min(getattr(tile, _inner(variant)), SPARSE_BLOCK)})
    return tile


def serves(variant: Variant, tile: Config) -> bool:
    """Whether a kernel is right with a tile. With a block mask a tile of the inner loop lies in one block."""
    return not variant.operation.has_mask or SPARSE_BLOCK % getattr(tile, _inner(variant)) == 0


def _inner(variant: Variant) -> str:
    """The side of a tile over which a kernel of attention loops."""
    return "block_m" if variant.op.endswith("dkdv") else "block_n"


def _row(table: Rows, variant: Variant) -> Tiles:
    """The first existing row:

    the operation's own, else a row of an operation with the same tiles, else the row of the next power of two.
    """
    size, names = variant.block_d, [variant.op]
    while (other := OPERATIONS[names[-1]].tile_of) is not None:
        names.append(other)
    bits = {"fp32": (32,), "fp16": (16,), "bf16": (16,)}.get(variant.dtype, (8, 16))
    for name, largest in (*((name, size) for name in names), (names[-1], 1 << size.bit_length())):
        for width in bits:
            if (name, width, largest) in table:
                return table[name, width, largest]
    raise KeyError(f"{variant.name} has no row in flash_attn/kernels/tuning")


def neighbours(target: str, own: Config) -> list[Config]:
    """The configurations near one in tile, warps and stages, and its own tile with other options of the compiler."""
    family = targets.get(target).family
    options = dict(own.options)
    others = [(name, value) for name, value in _FAMILIES[family].OPTIONS if value != "none" or name in options]
    found = [own._replace(options=tuple((options | dict([other])).items())) for other in others]
    fewest = 4 if family == "nvidia" else 2
    for block_m, block_n in ((1, 1), (2, 1), (1, 2), (0.5, 1), (1, 0.5)):
        for num_warps in sorted({fewest, 4, 8, own.num_warps}):
            for num_stages in (1, 2, 3):
                tile = int(own.block_m * block_m), int(own.block_n * block_n)
                if min(tile) >= 16 and max(tile) <= 256:
                    found.append(own._replace(
                        block_m=tile[0], block_n=tile[1], num_warps=num_warps, num_stages=num_stages
                    ))  # fmt: skip
    return [one for one in found if one != own]
