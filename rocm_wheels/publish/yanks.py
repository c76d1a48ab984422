"""Yanked wheels, in yanked.toml: a public release cannot be changed, so the index alone marks what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names
from rocm_wheels.tables import Table, parse

DATA_FILE = Path(__file__).with_name("yanked.toml")
_HEAD = """\
# Wheel -> why it is yanked. `python -m rocm_wheels yank` writes this file; commit it, and the next index has the marks.

[wheels]
"""


def load(path: Path = DATA_FILE) -> dict[str, str]:
    """File name of a wheel -> the reason. DataError if the file is malformed."""
    root = Table(path.name, "", parse(path.read_text(encoding="utf-8"), path.name))
    wheels = root.table("wheels")
    found = {name: wheels.text(name) for name in wheels.names()}
    root.finish()
    return found


def mark(wheel: str, reason: str | None, path: Path = DATA_FILE) -> None:
    """Yanks a wheel for a reason, or with None takes the mark away. DataError if that is not possible."""
    if not (names.is_wheel(wheel) or names.is_interface(wheel)):
        raise DataError(f"{wheel!r} is not the file name of one of these wheels", remedy=f"Expected: {names.EXAMPLE}")
    found = load(path)
    if reason is None and wheel not in found:
        raise DataError(f"{wheel} is not yanked")
    others = {name: why for name, why in found.items() if name != wheel}
    _write(others if reason is None else {**others, wheel: reason}, path)


def _write(wheels: Mapping[str, str], path: Path) -> None:
    # JSON's strings are strings of TOML too.
    lines = [f"{json.dumps(name)} = {json.dumps(why)}\n" for name, why in sorted(wheels.items())]
    path.write_text(_HEAD + "".join(lines), encoding="utf-8")
