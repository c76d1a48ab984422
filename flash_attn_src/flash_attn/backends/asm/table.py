"""AMD's assembly kernels that a wheel may carry: one row a family, one kernel a dtype, mask and form of lengths.

Source: what the pinned amd-aiter package documents about its code objects (rocm_wheels/compile/asm says which ones).
Every kernel stores the log-sum-exp, takes grouped query heads and lengths that are no multiple of a tile. bf16 kernels
of gfx942 exist in three roundings of P. These round to nearest, ties away from zero: rounding towards zero is faster
by the simulator's clock (4892 instead of 5956 cycles, 2026-11-24) and has 2.5 times the error; ties to even cost 6724
cycles for the same error.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

PLAIN, CAUSAL, WINDOW = "plain", "causal", "window"
# Compute units of an MI308X, whole or partitioned. Its kernels give programs to four dies instead of eight.
MI308_UNITS = (80, 64)


class Kernel(NamedTuple):
    """One kernel: a head dim from least_dim to head_dim, and for the values of keys head_dim_v. rows: queries of a tile;
    columns: keys of a tile; layout: the form of its argument, in `arguments`; threads: of a work group."""

    name: str
    target: str
    op: str
    dtype: str
    least_dim: int
    head_dim: int
    head_dim_v: int
    mask: str
    packed: bool
    rows: int
    columns: int
    layout: str
    threads: int


class _Family(NamedTuple):
    target: str
    op: str
    dtypes: tuple[str, ...]
    dims: tuple[int, int, int]  # least, greatest, of the values
    masks: tuple[str, ...]
    forms: tuple[bool, ...]  # packed sequences or not
    tile: tuple[int, int]
    threads: int
    layouts: tuple[str, ...]  # by form
    suffix: str = ""


_BOTH = ("fp16", "bf16")
_MASKS = (PLAIN, CAUSAL)
_FORMS = (False, True)
_BATCH_PACKED = ("backward", "packed")

_FAMILIES = (
    _Family("gfx942", "fwd", ("bf16",), (128, 128, 128), _MASKS, _FORMS, (256, 32), 512, ("forward",) * 2),
    _Family("gfx942", "fwd", ("bf16",), (128, 128, 128), _MASKS, _FORMS, (256, 32), 512, ("forward",) * 2, "-mi308"),
    _Family("gfx942", "bwd", _BOTH, (64, 64, 64), _MASKS, _FORMS, (32, 192), 256, _BATCH_PACKED),
    _Family("gfx942", "bwd", _BOTH, (72, 128, 128), _MASKS, _FORMS, (16, 192), 256, _BATCH_PACKED),
    _Family("gfx942", "bwd", _BOTH, (72, 128, 128), (WINDOW,), (False,), (16, 192), 256, ("window",)),
    _Family("gfx942", "bwd", _BOTH, (136, 192, 192), _MASKS, _FORMS, (16, 64), 256, _BATCH_PACKED),
    _Family("gfx950", "fwd", ("bf16",), (128, 128, 128), _MASKS, _FORMS, (256, 64), 512, ("forward",) * 2),
    _Family("gfx950", "fwd", ("bf16",), (192, 192, 128), _MASKS, _FORMS, (128, 128), 256, ("forward",) * 2),
    _Family("gfx950", "bwd", _BOTH, (64, 64, 64), _MASKS, _FORMS, (32, 192), 256, _BATCH_PACKED),
    _Family("gfx950", "bwd", _BOTH, (72, 128, 128), _MASKS, _FORMS, (16, 256), 256, ("backward950",) * 2),
    _Family("gfx950", "bwd", _BOTH, (72, 128, 128), (WINDOW,), (False,), (16, 192), 256, ("window",)),
    _Family("gfx950", "bwd", _BOTH, (136, 192, 192), _MASKS, _FORMS, (16, 64), 256, _BATCH_PACKED),
)


def kernels() -> tuple[Kernel, ...]:
    """Every kernel, of every target."""
    return tuple(
        Kernel(
            f"asm-{row.op}-{dtype}-d{row.dims[1]}-{mask}{'-varlen' if packed else ''}{row.suffix}",
            row.target, row.op, dtype, *row.dims, mask, packed, *row.tile, row.layouts[form], row.threads,
        )
        for row in _FAMILIES
        for dtype in row.dtypes
        for mask in row.masks
        for form, packed in enumerate(row.forms)
    )  # fmt: skip


@cache
def find(
    target: str, op: str, dtype: str, head_dim: int, head_dim_v: int, mask: str, packed: bool, units: int
) -> Kernel | None:
    """The kernel that serves a call, or None. Of the two for MI300X and MI308X the one for so many compute units."""
    served = [
        row
        for row in kernels()
        if (row.target, row.op, row.dtype, row.mask, row.packed) == (target, op, dtype, mask, packed)
        and row.least_dim <= head_dim <= row.head_dim
        and head_dim_v in (row.head_dim_v, head_dim if row.head_dim == row.head_dim_v else row.head_dim_v)
    ]
    mi308 = units in MI308_UNITS
    served.sort(key=lambda row: row.name.endswith("-mi308") != mi308)
    return served[0] if served else None
