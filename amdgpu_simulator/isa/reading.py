"""Tracks which parts of an instruction its implementation reads.

A part that no implementation reads would be ignored in silence. So instructions are decoded through these two classes,
and `Program` refuses an instruction with unread parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class Modifiers(Mapping[str, str]):
    """The modifiers of an instruction. Asking for a modifier, or whether it is there, counts as reading it."""

    def __init__(self, content: Mapping[str, str]) -> None:
        self._content = dict(content)
        self.forget()

    def __getitem__(self, name: str) -> str:
        self._unread.discard(name)
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def forget(self) -> None:
        """Marks all modifiers as unread."""
        self._unread = set(self._content)

    def unread(self) -> list[str]:
        return [name for name in self._content if name in self._unread]

    def integer(self, name: str, default: int = 0) -> int:
        return int(self[name], 0) if name in self else default

    def switches(self, name: str, default: int = 0) -> list[int]:
        """The bits of a modifier such as op_sel:[0,1]. Without the modifier, four bits with the default value."""
        return [int(bit) for bit in self[name].strip("[]").split(",")] if name in self else [default] * 4


class Operands(tuple[str, ...]):
    """The operands of an instruction. Taking an operand by its index, in a slice or in a loop counts as reading it."""

    _unread: set[int]

    def __new__(cls, content: Iterable[str]) -> Operands:
        made = super().__new__(cls, content)
        made.forget()
        return made

    def forget(self) -> None:
        """Marks all operands as unread."""
        self._unread = set(range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        self._unread -= set(places if isinstance(index, slice) else (places,))
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self._unread.clear()
        return super().__iter__()

    def unread(self) -> list[str]:
        return [super(Operands, self).__getitem__(index) for index in sorted(self._unread)]
