"""Checked reading of TOML tables: an error names the file, the key and the value."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from rocm_wheels.errors import DataError, MissingTool

T = TypeVar("T")


@functools.cache
def version_key(version: str) -> tuple[int, ...]:
    """Sort key of a dotted version: "2.10.0" sorts after "2.9.1", and "2.8.3.post1" after "2.8.3". Raises ValueError
    for other text.
    """
    release, _, post = version.partition(".post")
    return (*(int(part) for part in release.split(".")), *([int(post)] if post or version.endswith(".post") else []))


def parse(text: str, name: str) -> dict[str, object]:
    """The content of a TOML text. Raises DataError, which names the file `name`, if it is not valid TOML."""
    try:
        return cast("dict[str, object]", _toml().loads(text))
    except ValueError as error:
        raise DataError(f"{name}: not valid TOML: {error}") from error


def _toml() -> Any:
    """tomllib, or its backport: Python 3.10 has it as tomli, which every pip for 3.10 contains."""
    for module in ("tomllib", "tomli", "pip._vendor.tomli"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(module)
    raise MissingTool(
        "this Python 3.10 has no TOML reader: neither tomli nor pip is installed",
        remedy="Install pip for it (python3-pip), or run with Python 3.11 or newer.",
    )


class Table:
    """A table of the file that knows its own path. Every read is checked; `finish` finds unread keys."""

    def __init__(self, file: str, path: str, data: Mapping[str, object]) -> None:
        self.file = file
        self.path = path
        self.last = path.rpartition("/")[2]
        self.data = data
        self.read: set[str] = set()

    def error(self, name: str, value: object, reason: str, *, known: Iterable[str] = ()) -> DataError:
        where = "/".join(part for part in (self.path, name) if part)
        names = ", ".join(known)
        remedy = f"Known: {names}." if names else ""
        return DataError(f"{self.file}: {where}: {value!r} {reason}", remedy=remedy)

    def names(self) -> list[str]:
        return list(self.data)

    def get(self, name: str, kind: type[T]) -> T:
        self.read.add(name)
        if name not in self.data:
            raise self.error(name, None, f"is missing: {kind.__name__} expected")
        value = self.data[name]
        if type(value) is not kind:  # isinstance accepts True as an int
            raise self.error(name, value, f"is {type(value).__name__}, not {kind.__name__}")
        return value

    def optional(self, name: str, read: Callable[[str], str]) -> str | None:
        self.read.add(name)
        return read(name) if name in self.data else None

    def text(self, name: str) -> str:
        return self.get(name, str)

    def choice(self, name: str, known: Iterable[str]) -> str:
        return self.check(name, self.text(name), known)

    def check(self, name: str, value: str, known: Iterable[str]) -> str:
        known = list(known)
        if value not in known:
            raise self.error(name, value, "is not known", known=known)
        return value

    def version(self, name: str) -> str:
        return self.check_version(name, self.text(name))

    def check_version(self, name: str, value: str) -> str:
        try:
            version_key(value)
        except ValueError:
            raise self.error(name, value, "is not a dotted version such as 2.8.3") from None
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.get(name, list)
        for value in values:
            if type(value) is not str:
                raise self.error(name, value, f"is {type(value).__name__}, not str")
            if values.count(value) > 1:
                raise self.error(name, value, "is listed twice")
        if not values:
            raise self.error(name, values, "is empty")
        return tuple(values)

    def choices(self, name: str, known: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.check(name, value, known) for value in self.texts(name))

    def versions(self, name: str) -> tuple[str, ...]:
        return tuple(sorted((self.check_version(name, value) for value in self.texts(name)), key=version_key))

    def table(self, name: str) -> Table:
        path = "/".join(part for part in (self.path, name) if part)
        return Table(self.file, path, self.get(name, dict))

    def tables(self, name: str, *, versions: bool = False) -> list[Table]:
        outer = self.table(name)
        if not outer.data:
            raise self.error(name, {}, "is empty")
        if versions:
            return [outer.table(outer.check_version(entry, entry)) for entry in sorted(outer.data, key=lenient)]
        return [outer.table(entry) for entry in outer.data]

    def finish(self) -> None:
        for name in self.data:
            if name not in self.read:
                raise self.error(name, self.data[name], "is a key that nothing reads", known=sorted(self.read))


def lenient(version: str) -> tuple[int, ...]:
    """`version_key` for names that are not checked yet; text that is not a version sorts first and is reported
    later.
    """
    try:
        return version_key(version)
    except ValueError:
        return ()
