"""Converts the arguments of a kernel to the bytes that a launch passes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from amdgpu_simulator.isa.assembly import Array, Kernel

_BUFFER = "global_buffer"
_INTEGERS = {1: "<b", 2: "<h", 4: "<i", 8: "<q"}
_FLOATS = {2: "<e", 4: "<f", 8: "<d"}


def pack(kernel: Kernel, values: Sequence[Array | int | float]) -> tuple[bytes, list[tuple[int, int]]]:
    """Returns the bytes of the arguments, and the memory (address, size in bytes) that the kernel may access.

    values: a numpy array for a pointer, a number for another argument. Pointers at the end may be left out: they are
    null. Triton appends pointers to scratch memory, which a kernel without scratch memory does not read.

    Raises ValueError for a wrong number of values, for a number in the place of a pointer, and the other way round.
    """
    arguments = [argument for argument in kernel.arguments if not argument[2].startswith("hidden_")]
    left_out = arguments[len(values) :]
    if len(values) > len(arguments) or any(kind != _BUFFER for _, _, kind in left_out):
        raise ValueError(f"{kernel.symbol} has {len(arguments)} arguments, and {len(values)} values were passed")
    content = bytearray(kernel.descriptor["kernarg_size"])
    ranges = []
    for index, ((offset, size, kind), value) in enumerate(zip(arguments, values, strict=False)):
        if isinstance(value, np.ndarray) != (kind == _BUFFER):
            raise ValueError(f"{kernel.symbol}: argument {index} is a {kind}, the value is a {type(value).__name__}")
        if isinstance(value, np.ndarray):
            struct.pack_into("<Q", content, offset, value.ctypes.data)
            ranges.append((value.ctypes.data, value.nbytes))
        else:
            forms = _FLOATS if isinstance(value, float) else _INTEGERS
            struct.pack_into(forms[size], content, offset, value)
    return bytes(content), ranges
