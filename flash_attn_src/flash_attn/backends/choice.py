"""Which source of kernels serves a call, as a table: AMD's assembly, Composable Kernel, or Triton.

A row has the cycles of a compute unit for 128 queries and 128 keys, in bf16 unless it says fp16, by
`python -m amdgpu_simulator table` on 2026-11-25. docs/notes/clock.md compares that clock with hardware. The source with
the fewest cycles goes first. bwd counts the kernels of a backward that work on tiles.

Rows that `benchmarks/tune_sources.py` measured on this machine come before them. They are a file in the user's cache.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flash_attn.kernels.assembly import BF16, CAUSAL, FP16, PLAIN, WINDOW
from flash_attn.runtime.build_info import VERSION

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
    Row("gfx90a", "fwd", _BOTH, (1, 64), _ANY, 1, (TRITON, CK), "d64: triton 5526, ck 5838"),
    Row("gfx90a", "fwd", _BOTH, (65, 128), _ANY, 1, (CK, TRITON), "d128: ck 10745, triton 11202"),
    Row("gfx90a", "fwd", _BOTH, (129, 192), _ANY, 1, (TRITON, CK), "d192: triton 25480, ck 27818"),
    Row("gfx90a", "fwd", (BF16,), (193, 256), _ANY, 1, (TRITON, CK), "d256: triton 32976, ck 34178"),
    Row("gfx90a", "fwd", (FP16,), (193, 256), _ANY, 1, (CK, TRITON), "d256, fp16: ck 33062, triton 33080"),
    Row("gfx90a", "bwd", _BOTH, (1, 64), _ANY, 1, (CK, TRITON), "d64: ck 23840, triton 24567"),
    Row("gfx90a", "bwd", _BOTH, (65, 128), _ANY, 1, (CK, TRITON), "d128: ck 40181, triton 44951"),
    Row("gfx90a", "bwd", _BOTH, (129, 192), _ANY, 1, (CK, TRITON), "d192: ck 49114, triton 86032"),
    Row("gfx90a", "bwd", _BOTH, (193, 256), _ANY, 1, (CK, TRITON), "d256: ck 49114, triton 158611"),
)
# fmt: on
# Head dims above 256, and values with a head dim of their own.
LARGEST = 256
TRITON_ALONE = Row("", "", (), (0, 0), (), 0, (TRITON,), "Triton's kernels alone have these head dims")
DEFAULT = Row("", "", (), (0, 0), (), 0, (CK, TRITON), "no measurement: Composable Kernel, as upstream")


def cache_file(target: str) -> Path:
    """Where rows that were measured on a target lie: one file for each release, since kernels change."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "flash_attn" / "choice" / f"{target}-{VERSION}.json"


def write(target: str, rows: Sequence[Row]) -> Path:
    """Makes rows the ones that come first on this machine. Returns the file. Raises OSError where it cannot be kept."""
    path = cache_file(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps([row._asdict() for row in rows], indent=1), encoding="utf-8")
    part.replace(path)
    _measured.cache_clear()
    find.cache_clear()
    return path


@cache
def _measured(target: str) -> tuple[Row, ...]:
    """The rows of the user's cache. Warns where the file holds something else, which then does not count."""
    try:
        path = cache_file(target)
    except RuntimeError:  # a user without a home, such as the bare number of a container's user
        return ()
    try:
        rows = tuple(_row(target, **fields) for fields in json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # HOME=/dev/null, or the home of somebody else
        return ()
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(
            f"{path} does not say which kernels are fastest here ({error}), so the wheel's own table counts: delete "
            "it, or write it again by `python benchmarks/tune_sources.py`",
            RuntimeWarning,
            stacklevel=2,
        )
        return ()
    return rows


def _row(
    wanted: str,
    *,
    target: str,
    op: str,
    dtypes: Sequence[str],
    dims: Sequence[int],
    masks: Sequence[str],
    least_q: int,
    sources: Sequence[str],
    why: str,
    value_dim: int = 0,
) -> Row:
    """A row of a file. Raises ValueError or TypeError."""
    low, high = dims
    row = Row(
        target, op, tuple(dtypes), (int(low), int(high)), tuple(masks), int(least_q), tuple(sources), str(why),
        int(value_dim),
    )  # fmt: skip
    if row.target != wanted or not row.sources or not set(row.sources) <= set(SOURCES):
        raise ValueError(f"a row for {row.target} names the sources {', '.join(map(str, row.sources)) or 'none'}")
    return row


@cache
def find(target: str, op: str, dtype: str, head_dim: int, mask: str, longest_q: int, value_dim: int = 0) -> Row:
    """The row that decides about an op, fwd or bwd, of a call. value_dim: as in `Row`."""
    for row in (*_measured(target), *ROWS):
        if (
            (row.target, row.op) == (target, op)
            and dtype in row.dtypes
            and row.dims[0] <= head_dim <= row.dims[1]
            and mask in row.masks
            and row.least_q <= longest_q
            and row.value_dim == value_dim
        ):
            return row
    return DEFAULT
