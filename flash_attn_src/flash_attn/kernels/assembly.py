"""AMD's assembly kernels that a wheel may carry: one row a family, one kernel a dtype, mask and form of lengths.

Source: the pinned amd-aiter package, whose code objects rocm_wheels/compile/asm lists by the names here. Every kernel
takes grouped query heads and lengths that are no multiple of a tile. Every forward stores the log-sum-exp. A backward
adds up dq in fp32 by atomics, so its sum has no fixed order.

The bf16 kernels of gfx942 exist in three roundings of P. These kernels round to nearest, ties away from zero, because
rounding towards zero has 2.5 times the error. Cycles of a forward for 128 x 128 by the simulator's clock, 2026-11-24:
towards zero 4712, ties away from zero 5296, ties to even 5680.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

PLAIN, CAUSAL, WINDOW = "plain", "causal", "window"
FP16, BF16 = "fp16", "bf16"


class Limits(NamedTuple):
    """What the kernels can address, and how they go through their tiles.

    max_bytes: offsets in bytes are sums of unsigned 32 bits. max_row_bytes: row strides in bytes are multiplied as
    signed 24 bits. mi308_units: compute units of an MI308X, whole and partitioned. max_queries_by_heads: up to so many
    queries a forward goes through its tiles by heads, where every die gets equally many of them.
    """

    max_bytes: int = 1 << 32
    max_row_bytes: int = 1 << 23
    mi308_units: tuple[int, ...] = (80, 64)
    max_queries_by_heads: int = 16384


LIMITS = Limits()


class Kernel(NamedTuple):
    """A kernel and the calls that it serves.

    least_dim, head_dim: the head dims from and up to; value_dim: the head dim of v if it differs, else 0;
    packed: whether sequences lie end to end; rows, columns: queries and keys of a tile; threads: of a work group;
    layout: the form of its argument, by its name in `arguments`.
    """

    name: str
    target: str
    op: str
    dtype: str
    least_dim: int
    head_dim: int
    value_dim: int
    mask: str
    packed: bool
    rows: int
    columns: int
    threads: int
    layout: str


class _Family(NamedTuple):
    """Kernels that differ in dtype, mask and form. layouts: for dense tensors, then for packed tensors if supported."""

    target: str
    op: str
    dtypes: tuple[str, ...]
    dims: tuple[int, int]
    masks: tuple[str, ...]
    rows: int
    columns: int
    threads: int
    layouts: tuple[str, ...]
    suffix: str = ""
    value_dim: int = 0


_BOTH = (FP16, BF16)
_MASKS = (PLAIN, CAUSAL)
_FORWARD = ("forward", "forward")
_BACKWARD = ("backward", "packed")

# fmt: off
_FAMILIES = (
    _Family("gfx942", "fwd", (BF16,), (128, 128), _MASKS, 256, 32, 512, _FORWARD),
    # MI308X: programs go to four dies in turn instead of eight.
    _Family("gfx942", "fwd", (BF16,), (128, 128), _MASKS, 256, 32, 512, _FORWARD, "-mi308"),
    _Family("gfx942", "bwd", _BOTH, (64, 64), _MASKS, 32, 192, 256, _BACKWARD),
    _Family("gfx942", "bwd", _BOTH, (72, 128), _MASKS, 16, 192, 256, _BACKWARD),
    _Family("gfx942", "bwd", _BOTH, (72, 128), (WINDOW,), 16, 192, 256, ("window",)),
    _Family("gfx942", "bwd", _BOTH, (136, 192), _MASKS, 16, 64, 256, _BACKWARD),
    _Family("gfx950", "fwd", (BF16,), (128, 128), _MASKS, 256, 64, 512, _FORWARD),
    _Family("gfx950", "fwd", (BF16,), (192, 192), _MASKS, 128, 128, 256, _FORWARD, value_dim=128),
    _Family("gfx950", "bwd", _BOTH, (64, 64), _MASKS, 32, 192, 256, _BACKWARD),
    _Family("gfx950", "bwd", _BOTH, (72, 128), _MASKS, 16, 256, 256, ("backward950", "backward950")),
    _Family("gfx950", "bwd", _BOTH, (72, 128), (WINDOW,), 16, 192, 256, ("window",)),
    _Family("gfx950", "bwd", _BOTH, (136, 192), _MASKS, 16, 64, 256, _BACKWARD),
)
# fmt: on


def _name(row: _Family, dtype: str, mask: str, packed: bool) -> str:
    values = f"-v{row.value_dim}" if row.value_dim else ""
    return f"asm-{row.op}-{dtype}-d{row.dims[1]}{values}-{mask}{'-varlen' if packed else ''}{row.suffix}"


KERNELS = tuple(
    Kernel(
        _name(row, dtype, mask, packed), row.target, row.op, dtype, *row.dims, row.value_dim, mask, packed, row.rows,
        row.columns, row.threads, layout,
    )
    for row in _FAMILIES
    for dtype in row.dtypes
    for mask in row.masks
    for packed, layout in zip((False, True), row.layouts, strict=False)
)  # fmt: skip


@cache
def find(
    target: str, op: str, dtype: str, head_dim: int, mask: str, packed: bool, units: int, value_dim: int = 0
) -> Kernel | None:
    """The kernel that serves a call, or None.

    units: compute units, which distinguish an MI308X from an MI300X. value_dim: the head dim of v, if it is not
    head_dim.
    """
    served = [
        row
        for row in KERNELS
        if (row.target, row.op, row.dtype, row.mask, row.packed) == (target, op, dtype, mask, packed)
        and row.value_dim == value_dim
        and row.least_dim <= head_dim <= row.head_dim
        and head_dim % 8 == 0
    ]
    return min(served, key=lambda row: row.name.endswith("-mi308") != (units in LIMITS.mi308_units), default=None)
