"""Launches of the C library, recorded below it, and the launches that Python's backend records for the same call.

A store of made-up code objects has every kernel of a target, so nothing is compiled: `stub_hip.c` of the crate's tests
writes down the name, the grid and the arguments of each launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import zipfile
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from flash_attn.kernels import launches, signatures
from flash_attn.kernels.flags import ROTARY_INTERLEAVED, ROTARY_MOVES
from flash_attn.kernels.operation import launch_letter
from flash_attn.kernels.variants import Variant, table

from rocm_wheels.compile import store
from rocm_wheels.compile.compiler import Compiled

TARGET = "gfx942"

# (kernel, grid, arguments by name); an address is a number in the order of first appearance, after those of the call's
# tensors.
Launch = tuple[str, tuple[int, ...], dict[str, object]]

# Kernel -> the names of its arguments, and the launcher's letters for their types.
Signatures = dict[str, tuple[tuple[str, ...], str]]

# What `append` does not read without rotary embedding: each side passes an address that it has.
NOT_READ = {"q", "q_turned", "cos", "sin", *(f"stride_{tensor}{axis}" for tensor in "qr" for axis in "bmh")}


def signature_of(variant: Variant, target: str) -> tuple[tuple[str, ...], str]:
    """The names and letters of a kernel's arguments."""
    names = signatures.names(variant, target)
    return names, "".join(launch_letter(variant.operation.argument_type(name, variant.dtype)) for name in names)


def write_store(directory: Path, left_out: Container[str] = (), target: str = TARGET) -> Signatures:
    """Writes the store of a target, with all kernels but `left_out`. Returns what their arguments are."""
    objects: dict[str, tuple[str, Compiled]] = {}
    every: Signatures = {}
    for variant in (each for each in table(target) if each.name not in left_out):
        names, letters = every[variant.name] = signature_of(variant, target)
        image = f"stub {variant.name} {len(names)}\n\0".encode()
        entry = {
            "symbol": variant.op, "threads": 256, "shared": 0, "params": letters,
            "constants": launches.specification(variant, target).constants,
            "sha256": hashlib.sha256(image).hexdigest(),
        }  # fmt: skip
        objects[variant.name] = ("triton-stub", Compiled(image, {variant.name: entry}))
    (directory / f"{target}.zip").write_bytes(store.archive(target, ("triton", "stub"), objects))
    return every


def change_planning(directory: Path, to: Path, facts: dict[str, Any]) -> None:
    """Copies the store of a directory, with other numbers of planning in its manifest."""
    with zipfile.ZipFile(directory / f"{TARGET}.zip") as old, zipfile.ZipFile(to / f"{TARGET}.zip", "w") as new:
        for member in old.namelist():
            content = old.read(member)
            if member == "manifest.json":
                content = json.dumps({**json.loads(content), "planning": facts}).encode()
            new.writestr(member, content)


class Recorder:
    """The HIP runtime that records, which the library under test has opened."""

    def __init__(self, runtime: Path, every: Signatures) -> None:
        library = ctypes.CDLL(str(runtime))
        self._text = (ctypes.c_char * (1 << 20)).in_dll(library, "stub_launches")
        self._written = ctypes.c_size_t.in_dll(library, "stub_written")
        self._signatures = every

    def clear(self) -> None:
        self._written.value = 0

    def launched(self, known: Iterable[int]) -> list[Launch]:
        """What was launched since `clear`. known: the addresses of the call's tensors."""
        lines = self._text.raw[: self._written.value].decode().splitlines()
        return numbered([self._parse(line) for line in lines], known)

    def _parse(self, line: str) -> Launch:
        name, *grid, content = line.split(" ")
        slots = [bytes.fromhex(content[start : start + 16])[::-1] for start in range(0, len(content), 16)]
        formats = {"P": "<Q", "i": "<i", "f": "<f"}
        names, letters = self._signatures[name]
        values: dict[str, object] = {}
        for argument, letter, slot in zip(names, letters, slots, strict=True):
            (value,) = struct.unpack_from(formats[letter], slot)
            values[argument] = Address(value) if letter == "P" else value
        return name, tuple(map(int, grid)), values


class Address(int):
    """An address, as opposed to a number."""


def numbered(launched: Iterable[Launch], known: Iterable[int]) -> list[Launch]:
    """Launches with addresses as numbers: those of the call's tensors first, others in the order of appearance."""
    place: dict[int, int] = {0: 0}
    for address in known:
        place.setdefault(address, len(place))
    result: list[Launch] = []
    for kernel, grid, values in launched:
        if kernel.startswith("append-") and values["rotary_half"] == 0:
            values = {name: value for name, value in values.items() if name not in NOT_READ}
            values["flags"] = int(str(values["flags"])) & ~(ROTARY_INTERLEAVED | ROTARY_MOVES)
        for name, value in values.items():
            if isinstance(value, Address):
                values[name] = f"address {place.setdefault(value, len(place))}"
        result.append((kernel, grid, values))
    return result


def by_python(kept: Iterable[tuple[Any, ...]], known: Iterable[int], every: Signatures) -> list[Launch]:
    """What `record_launches.Gpu` has kept, likewise."""
    launched: list[Launch] = []
    for kernel, grid, addresses, numbers, _ in kept:
        floats = [struct.unpack("<f", struct.pack("<f", x))[0] if isinstance(x, float) else x for x in numbers]
        names, letters = every[kernel]
        pointers, others = map(Address, addresses), iter(floats)
        values = {
            name: next(pointers if letter == "P" else others) for name, letter in zip(names, letters, strict=True)
        }
        launched.append((kernel, tuple(grid), values))
    return numbered(launched, known)
