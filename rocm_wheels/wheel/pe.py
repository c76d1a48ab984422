"""The import tables and the checksum of a Windows library, a PE32+ file for x86_64."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from rocm_wheels.errors import DataError

_X86_64, _PE32_PLUS = 0x8664, 0x20B
_FILE_HEADER, _SECTION = 24, 40  # bytes
_CHECKSUM, _DIRECTORIES = 64, 112  # offsets in the optional header
_CERTIFICATES = 4  # the index of this data directory
# Data directory index -> (descriptor size, offset of the DLL name).
_IMPORTS = {1: (20, 12), 13: (32, 4)}  # 13: the DLLs that are loaded when they are first called


def imported(content: bytes) -> tuple[str, ...]:
    """The names of the DLLs that a library imports, in lower case, sorted. Raises DataError for another file."""
    try:
        return tuple(sorted({name.lower() for name in _names(content)}))
    except (struct.error, ValueError, IndexError) as error:
        raise DataError(f"not a Windows library for x86_64: {error}") from error


def with_checksum(content: bytes) -> bytes:
    """The library with the checksum in its header, which the linker leaves 0 and some virus scanners look at.

    It is the sum of the file's 16-bit words, with carries added back, plus the size of the file. Raises DataError for a
    file that is too short for a header.
    """
    try:
        place = _number(content, 0x3C, "<I") + _FILE_HEADER + _CHECKSUM
        cleared = bytearray(content)
        struct.pack_into("<I", cleared, place, 0)
    except struct.error as error:
        raise DataError(f"not a Windows library for x86_64: {error}") from error
    words = bytes(cleared) + b"\0" * (len(cleared) % 2)
    total = sum(struct.unpack(f"<{len(words) // 2}H", words))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("<I", cleared, place, total + len(content))
    return bytes(cleared)


def is_signed(content: bytes) -> bool:
    """Whether a library holds a certificate (Authenticode). Does not check it. Raises DataError for another file."""
    try:
        directory = _number(content, 0x3C, "<I") + _FILE_HEADER + _DIRECTORIES + 8 * _CERTIFICATES
        start, size = struct.unpack_from("<II", content, directory)
    except struct.error as error:
        raise DataError(f"not a Windows library for x86_64: {error}") from error
    return bool(0 < size <= len(content) - start)


def _names(content: bytes) -> Iterator[str]:
    header = _number(content, 0x3C, "<I")
    if content[:2] != b"MZ" or content[header : header + 4] != b"PE\0\0":
        raise ValueError("it has no PE header")
    machine, sections = struct.unpack_from("<HH", content, header + 4)
    optional = header + _FILE_HEADER
    magic = _number(content, optional, "<H")
    if (machine, magic) != (_X86_64, _PE32_PLUS):
        raise ValueError(f"machine {machine:#x}, format {magic:#x}")
    table = optional + _number(content, header + 20, "<H")
    ranges = [struct.unpack_from("<IIII", content, table + _SECTION * index + 8) for index in range(sections)]
    for index, (size, name_at) in _IMPORTS.items():
        if index >= _number(content, optional + 108, "<I"):
            continue
        address = _number(content, optional + _DIRECTORIES + 8 * index, "<I")
        while address:
            name = _number(content, _offset(address, ranges) + name_at, "<I")
            if not name:
                break
            start = _offset(name, ranges)
            yield content[start : content.index(b"\0", start)].decode("ascii")
            address += size


def _offset(address: int, ranges: list[tuple[int, ...]]) -> int:
    """The place in the file of an address in memory. Raises ValueError for an address outside of every section."""
    for _, start, size, place in ranges:
        if start <= address < start + size:
            return place + address - start
    raise ValueError(f"address {address:#x} is in no section")


def _number(content: bytes, place: int, form: str) -> int:
    return int(struct.unpack_from(form, content, place)[0])
