"""The way of benchmark results into the verdict of the wheel that was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rocm_wheels.errors import DataError
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.publish import catalogue
from rocm_wheels.wheel import verdict


def attach(dist: Path, summary: Path) -> list[str]:
    """Puts what benchmarks/trend.py wrote into the verdict of the wheel of `dist` that was measured; its name.

    DataError if the file is something else; an empty list if that wheel is not there.
    """
    try:
        found = json.loads(summary.read_text(encoding="utf-8"))
        version, python = found["environment"]["flash_attn"], found["environment"]["python"]
        _ = found["comparisons"], found["missing"], found["regressions"], found["bound"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{summary} is not what benchmarks/trend.py writes: {error!r}") from error
    measured = [
        wheel.name
        for wheel in catalogue.from_directory(dist)
        if wheel.version == version and python.startswith(f"{wheel.python}.")
    ]
    for name in measured:
        path = dist / name
        replace(verdict.read(path.with_name(name + VERDICT)), benchmarks=found).write(path)
    return measured
