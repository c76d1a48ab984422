"""Which provider of kernels serves a call: the first row of a table that the call fits in.

Rows that `python -m flash_attn.firstlight --keep` measured on this machine come first. They are a file in the user's
cache, and hold for the wheel, the GPU, its driver and HIP that they were measured with. The rows of
`kernels/providers.py` follow.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flash_attn.core import store
from flash_attn.core.build_info import VERSION
from flash_attn.core.files import write_whole
from flash_attn.core.platform import PLATFORM
from flash_attn.kernels.providers import DEFAULT, ROWS, SOURCES, Row
from flash_attn.kernels.targets import serving_targets


def cache_file(target: str) -> Path:
    """Where rows that were measured on a target lie: one file for each release, since kernels change."""
    return PLATFORM.cache_directory(os.environ) / "choice" / f"{target}-{VERSION}.json"


def machine(target: str) -> dict[str, str]:
    """What measured rows hold for: a digest of the wheel's kernels, GPUs of the target, their driver, HIP."""
    stores = map(store.open_store, serving_targets(target, torch.version.hip))
    archive = next((candidate for candidate in stores if candidate is not None), None)
    kernels = {} if archive is None else {name: entry["sha256"] for name, entry in archive.kernels.items()}
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if torch.cuda.is_available() else 0))
    return {
        "wheel": hashlib.sha256(json.dumps(kernels, sort_keys=True).encode()).hexdigest(),
        "gpu": ", ".join(sorted({gpu.name for gpu in gpus if getattr(gpu, "gcnArchName", "").startswith(target)})),
        "driver": PLATFORM.gpu_driver(),
        "hip": torch.version.hip or "",
    }


def write(target: str, rows: Sequence[Row]) -> Path:
    """Saves rows that take precedence on this machine. Returns the file. Raises OSError if it cannot be written."""
    path = cache_file(target)
    content = {"machine": machine(target), "rows": [row._asdict() for row in rows]}
    write_whole(path, json.dumps(content, indent=1))
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
        content = json.loads(PLATFORM.read(path))
        rows = tuple(_row(target, **fields) for fields in content["rows"])
        changed = _changed(content["machine"], machine(target))
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
    except (OSError, ValueError, TypeError, LookupError) as error:
        warnings.warn(
            f"{path} is invalid ({error}), so the wheel's own table of the fastest kernels is used: delete "
            f"it, or write it again by `{PLATFORM.python} -m flash_attn.firstlight --keep`",
            RuntimeWarning,
            stacklevel=2,
        )
        return ()
    if changed:
        warnings.warn(
            f"{path} was measured before {changed} changed, so the wheel's own table of the fastest kernels is used: "
            f"delete it, or measure again by `{PLATFORM.python} -m flash_attn.firstlight --keep`",
            RuntimeWarning,
            stacklevel=2,
        )
        return ()
    return rows


def _changed(then: dict[str, Any], now: dict[str, str]) -> str:
    """The names of what has changed since rows were measured."""
    return ", ".join(name for name, value in now.items() if then.get(name) != value)


def _row(
    expected: str,
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
    if row.target != expected or not row.sources or not set(row.sources) <= set(SOURCES):
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
