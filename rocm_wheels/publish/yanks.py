"""Yanked and withdrawn wheels, in yanked.toml. A public release cannot be changed, so only the index changes.

A yanked wheel stays in the index with a mark: pip takes an older build, and uv takes the wheel only for an exact pin. A
withdrawn wheel is in no page of the index.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

from rocm_wheels.compile import cache as files
from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names
from rocm_wheels.tables import Table, parse

MAX_REASON = 300  # characters; pip shows the reason in one line
DATA_FILE = Path(__file__).with_name("yanked.toml")
YANKED, WITHDRAWN = "wheels", "withdrawn"  # names of the tables
_HEAD = """\
# Wheel -> why it is yanked or withdrawn. `python -m rocm_wheels yank` and `withdraw` write this file; commit it, and
# the next index obeys.
"""


def load(path: Path = DATA_FILE) -> dict[str, str]:
    """File name of a yanked wheel -> the reason. Raises DataError if the file is malformed."""
    return _tables(path)[YANKED]


def withdrawn(path: Path = DATA_FILE) -> dict[str, str]:
    """File name of a withdrawn wheel -> the reason. Raises DataError if the file is malformed."""
    return _tables(path)[WITHDRAWN]


def _tables(path: Path) -> dict[str, dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="Restore it: git checkout -- FILE.") from error
    root = Table(path.name, "", parse(text, path.name))
    tables = {}
    for table in (YANKED, WITHDRAWN):
        wheels = root.table(table)
        tables[table] = {name: wheels.text(name) for name in wheels.names()}
    root.finish()
    return tables


def mark(wheel: str, reason: str | None, path: Path = DATA_FILE) -> None:
    """Yanks a wheel for a reason; None removes the mark. Raises DataError if that is not possible."""
    _mark([wheel], reason, path, YANKED)


def withdraw(wheels: Sequence[str], reason: str | None, path: Path = DATA_FILE) -> None:
    """Withdraws wheels for a reason; None takes them back. All of them, or none if it raises DataError."""
    _mark(wheels, reason, path, WITHDRAWN)


def _mark(wheels: Sequence[str], reason: str | None, path: Path, table: str) -> None:
    for wheel in wheels:
        if not (names.is_wheel(wheel) or names.is_interface(wheel)):
            remedy = f"Expected: {names.EXAMPLE}"
            raise DataError(f"{wheel!r} is not the file name of one of these wheels", remedy=remedy)
    if reason is not None:
        _check_reason(reason)
    tables = _tables(path)
    for wheel in wheels if reason is None else ():
        if wheel not in tables[table]:
            raise DataError(f"{wheel} is not {'yanked' if table == YANKED else 'withdrawn'}")
    others = {name: why for name, why in tables[table].items() if name not in wheels}
    _write({**tables, table: others if reason is None else {**others, **dict.fromkeys(wheels, reason)}}, path)


def _check_reason(reason: str) -> None:
    """Raises DataError unless installers, the index pages and the notes can show the reason in one line."""
    remedy = "Give one line of text: --reason 'dQ is wrong with ALiBi on gfx90a'."
    if not reason.strip():
        raise DataError("the reason is empty", remedy=remedy)
    if len(reason) > MAX_REASON:
        raise DataError(f"the reason has {len(reason)} characters, it may have {MAX_REASON}", remedy=remedy)
    # Categories C*: control and format characters, lone surrogates, private and unassigned code points. A joiner (Cf)
    # is part of an emoji.
    bad = [each for each in reason if unicodedata.category(each)[0] == "C" and each != "\u200d"]
    if bad or any(unicodedata.category(each) in ("Zl", "Zp") for each in reason):
        raise DataError(f"the reason {reason!r} holds characters that are not printed", remedy=remedy)


def _write(tables: Mapping[str, Mapping[str, str]], path: Path) -> None:
    text = _HEAD
    for table, wheels in tables.items():
        text += f"\n[{table}]\n" + "".join(
            f"{_quoted(name)} = {_quoted(why)}\n" for name, why in sorted(wheels.items())
        )
    assert parse(text, path.name) == tables
    files.write(path, text.encode())


def _quoted(text: str) -> str:
    """The text as a TOML string. JSON's escapes are also escapes of TOML, except for surrogate pairs, which stand for
    an emoji.
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
