"""Schema checks for JSON from outside: types, lengths, characters, numbers. Every value is checked before any is
used.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rocm_wheels.errors import DataError

MAX_NUMBER = 1e12  # larger than any size, count or time that is measured
MAX_DEPTH = 40  # nesting depth of objects and lists
_MAX_SHOWN = 80  # characters of an invalid value in a message
# Characters that a page turns into a link or a mention: people read text from outside.
_LINK = re.compile(r"(?i)@|://|\bwww\.|mailto:|[<>\[\]`|\\]|!\[|&[#a-z0-9]+;")

Rule = Callable[[Any], bool]


@dataclass(frozen=True)
class ObjectSchema:
    """An object with these fields; `optional` fields may be absent. others: whether other names are allowed."""

    fields: Mapping[str, Schema]
    optional: Mapping[str, Schema] = field(default_factory=dict)
    others: bool = False


@dataclass(frozen=True)
class ListSchema:
    """A list of at most `most` values of one schema."""

    item: Schema
    most: int


@dataclass(frozen=True)
class MapSchema:
    """An object with at most `most` names, whose values have one schema, and those of `required` one of their own.

    key: which names may be there; default: all.
    """

    item: Schema
    most: int
    key: Rule = lambda _name: True
    required: Mapping[str, Schema] = field(default_factory=dict)


Schema: TypeAlias = "Rule | ObjectSchema | ListSchema | MapSchema"


def load(name: str, content: bytes, most: int) -> Any:
    """The value of a JSON text of at most `most` bytes. Raises DataError, also for infinities and deep nesting."""
    if len(content) > most:
        raise DataError(f"{name} has {len(content)} bytes, it may have {most}")
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not JSON: {' '.join(str(error).split())[:_MAX_SHOWN]}") from error
    if _is_deep(value):
        raise DataError(f"{name} has more than {MAX_DEPTH} objects inside each other")
    return value


def problems(value: Any, schema: Schema, place: str = "") -> Iterator[str]:
    """Yields a line for each part of the value that does not have the schema."""
    if isinstance(schema, ObjectSchema):
        if not isinstance(value, dict):
            yield f"{place or 'it'}: {shown(value)} is no object"
            return
        known = {**schema.fields, **schema.optional}
        for name in [name for name in schema.fields if name not in value]:
            yield f"{_below(place, name)} is missing"
        for name, content in value.items():
            if name in known:
                yield from problems(content, known[name], _below(place, name))
            elif not schema.others or not _OTHER_NAME(name):
                yield f"{_below(place, shown(name))} is unknown"
    elif isinstance(schema, ListSchema):
        if not isinstance(value, list) or len(value) > schema.most:
            yield f"{place}: {shown(value)} is no list of at most {schema.most}"
            return
        for index, item in enumerate(value):
            yield from problems(item, schema.item, _below(place, str(index)))
    elif isinstance(schema, MapSchema):
        if not isinstance(value, dict) or len(value) > schema.most:
            yield f"{place}: {shown(value)} is no object of at most {schema.most} names"
            return
        for name in [name for name in schema.required if name not in value]:
            yield f"{_below(place, name)} is missing"
        for name, item in value.items():
            if not schema.key(name):
                yield f"{_below(place, shown(name))} is unknown"
                continue
            inner = schema.required.get(name, schema.item)
            yield from problems(item, inner, _below(place, name if _NAME(name) else shown(name)))
    elif not schema(value):
        yield f"{place}: {shown(value)} has another form"


def shown(value: Any) -> str:
    """A value as part of a message: one printable line of limited length."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "a number of more than 12 digits"
    text = ascii(value) if not isinstance(value, (dict, list)) else f"{type(value).__name__} of {len(value)}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def text(most: int, pattern: str = "", *, empty: bool = False) -> Rule:
    """Schema: one line of printable text that no page turns into a link or a mention.

    pattern: a regular expression that must match the whole text.
    """
    compiled = re.compile(pattern, re.ASCII) if pattern else None

    def good(value: Any) -> bool:
        if not isinstance(value, str) or len(value) > most or (not value and not empty):
            return False
        if any(unicodedata.category(each)[0] == "C" or each in "\u2028\u2029" for each in value) or _LINK.search(value):
            return False
        return value == "" or (value == value.strip() and (compiled is None or bool(compiled.fullmatch(value))))

    return good


def prose(most: int) -> Rule:
    """Schema: text of several lines, as a program prints it. Pages that show it must escape it."""

    def good(value: Any) -> bool:
        return (
            isinstance(value, str)
            and len(value) <= most
            and not any(unicodedata.category(each) in ("Cc", "Cs") and each not in "\n\t" for each in value)
        )

    return good


def number(least: float = 0, most: float = MAX_NUMBER, *, whole: bool = False) -> Rule:
    """Schema: a finite number within these bounds. A bool is not a number."""
    kinds = (int,) if whole else (int, float)
    return lambda value: type(value) in kinds and least <= value <= most


_NAME = text(200)
_OTHER_NAME = prose(10_000)


def none_or(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def one_of(*values: object) -> Rule:
    """Schema: one of these values, with the same type: True is not 1."""
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def _is_deep(value: Any) -> bool:
    """Whether the nesting is deeper than MAX_DEPTH; code that copies or writes the value would recurse too deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            each
            for inner in level
            if isinstance(inner, (dict, list))
            for each in (inner.values() if isinstance(inner, dict) else inner)
        ]
    return any(isinstance(each, (dict, list)) for each in level)


def _below(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")
