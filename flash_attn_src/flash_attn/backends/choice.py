"""Which provider of kernels serves a call: the first row of a table that the call fits in.

Rows that `benchmarks/tune_sources.py` measured on this machine come first. They are a file in the user's cache. The
rows of `kernels/providers.py` follow.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from flash_attn.kernels.providers import DEFAULT, ROWS, SOURCES, Row
from flash_attn.runtime.build_info import VERSION
from flash_attn.runtime.files import write_whole
from flash_attn.runtime.platform import PLATFORM


def cache_file(target: str) -> Path:
    """Where rows that were measured on a target lie: one file for each release, since kernels change."""
    return PLATFORM.cache_directory(os.environ) / "choice" / f"{target}-{VERSION}.json"


def write(target: str, rows: Sequence[Row]) -> Path:
    """Saves rows that take precedence on this machine. Returns the file. Raises OSError if it cannot be written."""
    path = cache_file(target)
    write_whole(path, json.dumps([row._asdict() for row in rows], indent=1))
    _measured.cache_clear()
    find.cache_clear()
    return path


@cache
def _measured(target: str) -> tuple[Row, ...]:
    """The rows of the user's cache. If the file is invalid, warns and ignores it."""
    try:
        path = cache_file(target)
    except RuntimeError:  # a user without a home, such as the bare number of a container's user
        return ()
    try:
        rows = tuple(_row(target, **fields) for fields in json.loads(PLATFORM.read(path)))
    except (FileNotFoundError, NotADirectoryError):  # HOME=/dev/null
        return ()
    except PermissionError as error:
        if os.access(path.parent, os.X_OK):  # else it is in the home of somebody else
            warnings.warn(
                f"{path} cannot be read ({error}), so the wheel's own table of the fastest kernels is used: close the "
                "program that holds the file, and start Python again",
                RuntimeWarning,
                stacklevel=2,
            )
        return ()
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(
            f"{path} is invalid ({error}), so the wheel's own table of the fastest kernels is used: delete "
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
