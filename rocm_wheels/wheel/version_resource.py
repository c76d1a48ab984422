"""The version resource of a Windows library: what Explorer shows under Properties, Details.

The format is VS_VERSIONINFO inside of a .res file, as Microsoft documents both. ziglang's resource compiler compiles
itself first, which takes a minute.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence

_VERSION_TYPE, _ENGLISH, _UTF16 = 16, 0x409, 1200
_SIGNATURE, _STRUCTURE_VERSION = 0xFEEF04BD, 0x10000
_NT_WINDOWS, _DLL = 0x40004, 2


def resource(version: str, strings: Mapping[str, str]) -> bytes:
    """A .res file with a version such as 2.8.3, and further strings such as FileDescription."""
    high, low = _numbers(version)
    fixed = struct.pack(
        "<13I", _SIGNATURE, _STRUCTURE_VERSION, high, low, high, low, 0, 0, _NT_WINDOWS, _DLL, 0, 0, 0
    )  # fmt: skip
    texts = {"FileVersion": version, "ProductVersion": version, **strings}
    table = _node(f"{_ENGLISH:04x}{_UTF16:04x}", [_text(name, text) for name, text in texts.items()])
    translation = _node("Translation", value=struct.pack("<HH", _ENGLISH, _UTF16))
    content = _node(
        "VS_VERSION_INFO", [_node("StringFileInfo", [table]), _node("VarFileInfo", [translation])], value=fixed
    )
    return _entry(0, 0, b"") + _entry(_VERSION_TYPE, 1, content)


def _numbers(version: str) -> tuple[int, int]:
    """The four numbers of a version, two in each half: 2, 8, 3, 0 for 2.8.3, and 2, 7, 4, 1 for 2.7.4.post1."""
    first, second, third, fourth = [*map(int, re.findall(r"\d+", version)), 0, 0, 0, 0][:4]
    return first << 16 | second, third << 16 | fourth


def _text(name: str, text: str) -> bytes:
    return _node(name, value=(text + "\0").encode("utf-16-le"), is_text=True)


def _node(name: str, children: Sequence[bytes] = (), *, value: bytes = b"", is_text: bool = False) -> bytes:
    """A length, the value's length (in characters for a text), whether it is a text, the name, the value, the nodes
    below it. All begin at multiples of 4 bytes."""
    size = len(value) // 2 if is_text else len(value)
    body = _padded(struct.pack("<HH", size, is_text or not value) + (name + "\0").encode("utf-16-le"), offset=2)
    for child in (value, *children):
        body = _padded(body, offset=2) + child
    return struct.pack("<H", len(body) + 2) + body


def _entry(kind: int, number: int, content: bytes) -> bytes:
    """An entry of a .res file. The first entry is empty."""
    header = struct.pack("<IIHHHH", len(content), 32, 0xFFFF, kind, 0xFFFF, number)
    language = _ENGLISH if content else 0
    return _padded(header + struct.pack("<IHHII", 0, 0x30 if content else 0, language, 0, 0) + content)


def _padded(content: bytes, *, offset: int = 0) -> bytes:
    return content + bytes(-(len(content) + offset) % 4)
