"""The planner of Composable Kernel launches: a small C library. csrc/ck/include/flash_attn_ck.h describes it.

Its structures are packed here by `struct`, which is several times faster than ctypes' own classes.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flash_attn.core.platform import PLATFORM

PATH = Path(__file__).resolve().parent.parent / PLATFORM.planner
VERSION = 1
MAX_SPLITS = 128

OK, INVALID, UNSUPPORTED = range(3)
FP16, BF16 = range(2)

_SHAPE, _TENSOR = "9i3f3q4Q", "Qqqq"
FORWARD = struct.Struct(f"={_SHAPE}{_TENSOR * 4}3Q3q")
BACKWARD = struct.Struct(f"={_SHAPE}{_TENSOR * 8}3Qq2i")
DECODE = struct.Struct(f"={_SHAPE}{_TENSOR * 6}5Q2q2Q6i2Q")

_MESSAGE = 256
_COUNT = struct.Struct("=I")
_LAUNCH = struct.Struct("=64s6I384s")
_PLAN_BYTES = _MESSAGE + 8 + 3 * _LAUNCH.size


class UnsupportedError(NotImplementedError):
    """A sound call for which Composable Kernel has no kernel; the message begins with the parameter's name."""


class Launch(NamedTuple):
    """One launch of a kernel of the store; `argument` is its one parameter, passed by value."""

    kernel: str
    grid: tuple[int, int, int]
    argument: bytes


def check(sha256: str) -> None:
    """Raises ImportError unless the planner is the file of this digest, which the build of the wheel recorded.

    A library is code: one that the wheel does not name is never loaded.
    """
    try:
        digest = hashlib.sha256(PATH.read_bytes()).hexdigest()
    except OSError as error:
        raise ImportError(f"the planner of the CK backend cannot be read ({error}): reinstall the wheel") from error
    if digest != sha256:
        raise ImportError(
            f"{PATH} is not the planner that the wheel was built with (its sha256 is {digest[:16]}..., the wheel names "
            f"{sha256[:16] or 'none'}...): reinstall the wheel"
        )


@cache
def library() -> ctypes.CDLL:
    """The planner library. Raises ImportError if it is missing or has another version."""
    try:
        planner = ctypes.CDLL(str(PATH))
    except OSError as error:
        raise ImportError(f"the planner of the CK backend does not load ({error}): reinstall the wheel") from error
    if (version := planner.flash_attn_ck_version()) != VERSION:
        raise ImportError(f"{PATH} has version {version}, this flash_attn wants {VERSION}: reinstall the wheel")
    for function in (
        planner.flash_attn_ck_plan_forward,
        planner.flash_attn_ck_plan_backward,
        planner.flash_attn_ck_plan_decode,
    ):
        function.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    planner.flash_attn_ck_backward_workspace.argtypes = [ctypes.c_char_p]
    planner.flash_attn_ck_backward_workspace.restype = ctypes.c_int64
    planner.flash_attn_ck_kernel.restype = ctypes.c_char_p
    return planner


def plan(call: str, parameters: bytes) -> list[Launch]:
    """The launches of a "forward", "backward" or "decode". Raises UnsupportedError, ValueError for wrong parameters."""
    buffer = ctypes.create_string_buffer(_PLAN_BYTES)
    function = getattr(library(), "flash_attn_ck_plan_" + call)
    status = function(parameters, buffer)
    raw = buffer.raw
    if status != OK:
        message = raw[: raw.index(b"\0")].decode()
        raise UnsupportedError(message) if status == UNSUPPORTED else ValueError(message)
    launches = []
    for index in range(_COUNT.unpack_from(raw, _MESSAGE)[0]):
        name, x, y, z, _, size, _, content = _LAUNCH.unpack_from(raw, _MESSAGE + 8 + index * _LAUNCH.size)
        launches.append(Launch(name[: name.index(b"\0")].decode(), (x, y, z), content[:size]))
    return launches


def backward_workspace(parameters: bytes) -> int:
    """Bytes of the sums of dq that a "backward" of these parameters wants, zeroed; 0 for wrong parameters."""
    return int(library().flash_attn_ck_backward_workspace(parameters))


def kernels() -> dict[str, int]:
    """Every kernel that a plan may hold: name -> bytes of its argument."""
    size = ctypes.c_uint32()
    sizes: dict[str, int] = {}
    while name := library().flash_attn_ck_kernel(len(sizes), ctypes.byref(size)):
        sizes[name.decode()] = size.value
    return sizes
