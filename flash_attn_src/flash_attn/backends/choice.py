"""Which source of kernels serves a call, as a table: AMD's assembly, Composable Kernel, or Triton.

A row has the cycles of a compute unit for 128 queries and 128 keys in bf16, by `python -m amdgpu_simulator cycles` on
2026-11-24. docs/notes/clock.md compares that clock with hardware. The source with the fewest cycles goes first. bwd
counts all kernels of a backward that work on tiles. A figure with an asterisk is from the clock before it was compared
with hardware; the clock does not run that kernel now.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flash_attn.kernels.assembly import BF16, CAUSAL, FP16, PLAIN, WINDOW

ASM, CK, TRITON = "asm", "ck", "triton"
SOURCES = (ASM, CK, TRITON)


class Row(NamedTuple):
    """Calls and the sources to try, the fastest first.

    dims: head dims from and up to; least_q: queries of the longest sequence from which the row holds; why: cycles.
    """

    target: str
    op: str
    dtypes: tuple[str, ...]
    dims: tuple[int, int]
    masks: tuple[str, ...]
    least_q: int
    sources: tuple[str, ...]
    why: str


_BOTH = (FP16, BF16)
_ANY = (PLAIN, CAUSAL, WINDOW)
_NO_WINDOW = (PLAIN, CAUSAL)

# The first row that a call fits in decides. fmt: off
ROWS = (
    # A tile of the assembly has 256 queries. With 128 or fewer it is half empty.
    Row("gfx942", "fwd", (BF16,), (128, 128), _NO_WINDOW, 129, (ASM, CK, TRITON), "asm 5296, ck 7242, triton 7272"),
    Row("gfx942", "fwd", _BOTH, (65, 128), _ANY, 1, (CK, TRITON), "d128: ck 7242, triton 7272"),
    Row("gfx942", "fwd", _BOTH, (1, 64), _ANY, 1, (TRITON, CK), "d64: triton 4136, ck 4528"),
    Row("gfx942", "bwd", _BOTH, (64, 64), _NO_WINDOW, 1, (ASM, TRITON, CK), "asm 9424, triton 16052, ck 29584*"),
    Row("gfx942", "bwd", _BOTH, (65, 128), _ANY, 1, (ASM, TRITON, CK), "asm 15669, triton 32808, ck 40256*"),
    Row("gfx942", "bwd", _BOTH, (1, 64), _ANY, 1, (TRITON, CK), "d64: triton 16052, ck 29584*"),
    Row("gfx950", "fwd", (BF16,), (128, 128), _NO_WINDOW, 129, (ASM, TRITON, CK), "asm 2722, triton 4741, ck 5958"),
    Row("gfx950", "fwd", _BOTH, (65, 128), _ANY, 1, (TRITON, CK), "d128: triton 4741, ck 5958"),
    Row("gfx950", "fwd", _BOTH, (1, 64), _ANY, 1, (TRITON, CK), "d64: triton 2835, ck 3885"),
    Row("gfx950", "bwd", _BOTH, (65, 128), _ANY, 1, (ASM, TRITON, CK), "asm 8552, triton 16312, ck 36992*"),
)
# fmt: on
# Head dims above 256, and values with a head dim of their own.
LARGEST = 256
TRITON_ALONE = Row("", "", (), (0, 0), (), 0, (TRITON,), "Triton's kernels alone have these head dims")
DEFAULT = Row("", "", (), (0, 0), (), 0, (CK, TRITON), "no measurement: Composable Kernel, as upstream")


@cache
def find(target: str, op: str, dtype: str, head_dim: int, mask: str, longest_q: int) -> Row:
    """The row that decides about an op, fwd or bwd, of a call."""
    for row in ROWS:
        if (
            (row.target, row.op) == (target, op)
            and dtype in row.dtypes
            and row.dims[0] <= head_dim <= row.dims[1]
            and mask in row.masks
            and row.least_q <= longest_q
        ):
            return row
    return DEFAULT
