"""Which provider of kernels serves a call, as a table: AMD's assembly, Composable Kernel, or Triton.

A row has the cycles of a compute unit for 128 queries and 128 keys, in bf16 unless it says fp16, by
`python -m amdgpu_simulator table` on 2026-11-25. docs/notes/clock.md compares that clock with hardware. The provider
with the fewest cycles goes first. bwd counts the kernels of a backward that work on tiles.

A kernel store carries the rows of its target (`choice`) for readers that do not import this module. Standard library
only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flash_attn.kernels import targets
from flash_attn.kernels.assembly import BF16, CAUSAL, FP16, PLAIN, WINDOW
from flash_attn.kernels.modifiers import DOORS

ASM, CK, TRITON = "asm", "ck", "triton"
SOURCES = (ASM, CK, TRITON)


class Row(NamedTuple):
    """Calls and the sources to try, the fastest first.

    dims: head dims from and up to; least_q: queries of the longest sequence from which the row holds; why: cycles;
    value_dim: the head dim of v where it is another one, else 0.
    """

    target: str
    op: str
    dtypes: tuple[str, ...]
    dims: tuple[int, int]
    masks: tuple[str, ...]
    least_q: int
    sources: tuple[str, ...]
    why: str
    value_dim: int = 0


_BOTH = (FP16, BF16)
_ANY = (PLAIN, CAUSAL, WINDOW)
_NO_WINDOW = (PLAIN, CAUSAL)

# The first row that a call fits in decides. fmt: off
ROWS = (
    # A tile of the assembly has 256 queries. With 128 or fewer it is half empty.
    Row("gfx942", "fwd", (BF16,), (128, 128), _NO_WINDOW, 129, (ASM, TRITON, CK), "asm 5288, triton 5594, ck 7242"),
    Row("gfx942", "fwd", _BOTH, (1, 64), _ANY, 1, (TRITON, CK), "d64: triton 3569, ck 4528"),
    Row("gfx942", "fwd", _BOTH, (65, 128), _ANY, 1, (TRITON, CK), "d128: triton 5594, ck 7242"),
    Row("gfx942", "fwd", _BOTH, (129, 192), _ANY, 1, (TRITON, CK), "d192: triton 10560, ck 24030"),
    Row("gfx942", "fwd", _BOTH, (193, 256), _ANY, 1, (TRITON, CK), "d256: triton 13760, ck 30270"),
    Row("gfx942", "bwd", _BOTH, (64, 64), _NO_WINDOW, 1, (ASM, TRITON, CK), "asm 9424, triton 14925, ck 21044"),
    Row("gfx942", "bwd", _BOTH, (1, 64), _ANY, 1, (TRITON, CK), "d64: triton 14925, ck 21044"),
    Row("gfx942", "bwd", _BOTH, (65, 128), _ANY, 1, (ASM, TRITON, CK), "asm 15669, triton 30231, ck 33224"),
    # Composable Kernel serves 192 by its kernel of 256. Its 8 % are less than the largest error of the clock.
    Row("gfx942", "bwd", _BOTH, (129, 192), _NO_WINDOW, 1, (ASM, CK, TRITON), "asm 45728, ck 41888, triton 66481"),
    Row("gfx942", "bwd", _BOTH, (193, 256), _ANY, 1, (CK, TRITON), "d256: ck 41888, triton 81906"),
    Row("gfx950", "fwd", (BF16,), (128, 128), _NO_WINDOW, 129, (ASM, TRITON, CK), "asm 2722, triton 3410, ck 5958"),
    # A tile has 128 queries.
    Row("gfx950", "fwd", (BF16,), (192, 192), _NO_WINDOW, 65, (ASM, TRITON), "192/128: asm 3222, triton 5840", 128),
    Row("gfx950", "fwd", _BOTH, (1, 64), _ANY, 1, (TRITON, CK), "d64: triton 2420, ck 3885"),
    Row("gfx950", "fwd", _BOTH, (65, 128), _ANY, 1, (TRITON, CK), "d128: triton 3410, ck 5958"),
    Row("gfx950", "fwd", _BOTH, (129, 192), _ANY, 1, (TRITON, CK), "d192: triton 6768, ck 16932"),
    Row("gfx950", "fwd", _BOTH, (193, 256), _ANY, 1, (TRITON, CK), "d256: triton 8252, ck 20832"),
    Row("gfx950", "bwd", _BOTH, (64, 64), _NO_WINDOW, 1, (ASM, TRITON, CK), "asm 8789, triton 9733, ck 20800"),
    Row("gfx950", "bwd", _BOTH, (1, 64), _ANY, 1, (TRITON, CK), "d64: triton 9733, ck 20800"),
    Row("gfx950", "bwd", _BOTH, (65, 128), _ANY, 1, (ASM, TRITON, CK), "asm 8104, triton 14068, ck 30712"),
    Row("gfx950", "bwd", _BOTH, (129, 192), _ANY, 1, (TRITON, CK), "d192: triton 29728, ck 38656, asm 41152"),
    Row("gfx950", "bwd", _BOTH, (193, 256), _ANY, 1, (TRITON, CK), "d256: triton 36144, ck 38656"),
    # fp16 on gfx90a: see FLUSHED.
    Row("gfx90a", "fwd", (BF16,), (1, 64), _ANY, 1, (TRITON, CK), "d64: triton 5526, ck 5838"),
    Row("gfx90a", "fwd", (BF16,), (65, 128), _ANY, 1, (CK, TRITON), "d128: ck 10745, triton 11202"),
    Row("gfx90a", "fwd", (BF16,), (129, 192), _ANY, 1, (TRITON, CK), "d192: triton 25480, ck 27818"),
    Row("gfx90a", "fwd", (BF16,), (193, 256), _ANY, 1, (TRITON, CK), "d256: triton 32976, ck 34178"),
    Row("gfx90a", "bwd", (BF16,), (1, 64), _ANY, 1, (CK, TRITON), "d64: ck 23840, triton 24567"),
    Row("gfx90a", "bwd", (BF16,), (65, 128), _ANY, 1, (CK, TRITON), "d128: ck 40181, triton 44951"),
    Row("gfx90a", "bwd", (BF16,), (129, 192), _ANY, 1, (CK, TRITON), "d192: ck 49114, triton 86032"),
    Row("gfx90a", "bwd", (BF16,), (193, 256), _ANY, 1, (CK, TRITON), "d256: ck 49114, triton 158611"),
)
# fmt: on
ERROR = 0.18  # of a ratio of these cycles: amdgpu_simulator/accuracy.toml
# Head dims above 256, and values with a head dim of their own.
LARGEST = 256
TRITON_ALONE = Row("", "", (), (0, 0), (), 0, (TRITON,), "Triton's kernels alone have these head dims")
# Composable Kernel does nothing against the flush of `Target.loses_range`, and Triton's kernels do. It costs: in the
# backward on gfx90a, ck 23840, 40181 and 49114 cycles at 64, 128 and 256, triton 24567, 44951 and 158611 (bf16).
FLUSHED = Row("", "", (), (0, 0), (), 0, (TRITON,), "Triton's kernels alone keep small numbers of this type here")
BLOCKS = Row("", "", (), (0, 0), (), 0, (TRITON,), "Triton's kernels alone take a mask of blocks or ranges")
DEFAULT = Row("", "", (), (0, 0), (), 0, (CK, TRITON), "no measurement: Composable Kernel, as upstream")


# The doors between the kernels of a store.
_OF_STORES = ("measured-fwd", "measured-bwd", "asm-fwd", "asm-bwd", "ck-fwd", "ck-bwd", "int8", "fp8")


def choice(target: str) -> dict[str, Any]:
    """The table for the manifest of a target's kernel store: docs/notes/kernel-store.md."""
    rows = [row._asdict() for row in ROWS if row.target == target]
    for row in rows:
        del row["target"]
    return {
        "max_head_dim": LARGEST,
        "rows": rows,
        "default": list(DEFAULT.sources),
        "larger": list(TRITON_ALONE.sources),
        "serves": {name: sorted(DOORS[name].serves) for name in _OF_STORES},
        "flushed": [dtype for dtype in _BOTH if targets.get(target).loses_range(dtype)],
    }
