"""A launcher without a driver: it records its arguments and refuses what the real launcher refuses.

launcher_argument_cases.py checks that both agree. Standard library only: it runs under every Python.
"""

from __future__ import annotations

import re
import struct
from typing import Any, ClassVar

MAX_PARAMS, MAX_STRUCTURE, MAX_THREADS = 128, 4096, 1024
_LEADING = ("device", "stream", "grid_x", "grid_y", "grid_z")
_FORMS = {"P": "<Q", "i": "<i", "I": "<q", "f": "<f", "d": "<d"}
_WANTED = {
    "P": "an address from 0 to 2**64-1, or None",
    "i": "an int of 32 bits",
    "I": "an int of 64 bits",
    "f": "a float of 32 bits",
    "d": "a float of 64 bits",
}


class Kernel:
    """Like flash_attn._launcher.Kernel. launched: (arguments of the kernel's constructor, arguments of the launch)."""

    launched: ClassVar[list[Any]]
    platform = "hip"

    def __init__(self, image: bytes, symbol: str, params: str, shared: int, threads: int, name: str) -> None:
        for what, text in (("name", name), ("symbol", symbol)):
            if not text or "\0" in text:
                raise ValueError(f"{what} {text!r} is empty or has a null character")
        if not image:
            raise ValueError(f"kernel {name}: the image is empty")
        if not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"kernel {name}: threads is {threads}, wanted 1 to {MAX_THREADS}")
        if shared < 0:
            raise ValueError(f"kernel {name}: shared is {shared}, wanted a number of bytes")
        self._given = (image, symbol, params, shared, threads, name)
        self._name, self._threads = name, threads
        self._size = self._structure(params)
        self._letters = "B" if self._size else self._checked(params)

    def _structure(self, params: str) -> int:
        """Bytes of the single structure argument, 0 for a kernel with several arguments."""
        if not params.startswith(("B", "K")):
            return 0
        size = int(params[1:]) if re.fullmatch(r"[BK][1-9][0-9]*", params) else 0
        if not 1 <= size <= MAX_STRUCTURE:
            raise ValueError(
                f"kernel {self._name}: params {params!r}, {params[0]} wants a number of bytes from 1 to {MAX_STRUCTURE}"
            )
        return size

    def _checked(self, params: str) -> str:
        """The letters of the arguments of a launch."""
        if len(params) > MAX_PARAMS:
            raise ValueError(f"kernel {self._name}: {len(params)} params, at most {MAX_PARAMS}")
        for index, letter in enumerate(params):
            if letter not in "PiIfd0":
                raise ValueError(f"kernel {self._name}: params {params!r}, letter {index} is none of P i I f d 0")
            if letter != "0" and "0" in params[:index]:
                raise ValueError(f"kernel {self._name}: params {params!r}, a 0 before letter {index}: they come last")
        return params.rstrip("0")

    def launch(self, *given: Any) -> None:
        expected = len(_LEADING) + len(self._letters)
        if len(given) != expected:
            raise TypeError(
                f"kernel {self._name} wants {len(self._letters)} arguments after device, stream and grid, "
                f"got {len(given)} in all (wanted {expected})"
            )
        limits = (2**31 - 1, None, 2**32 - 1, 2**32 - 1, 2**32 - 1)
        for what, limit, value in zip(_LEADING, limits, given, strict=False):
            if limit is None:
                self._convert("P", value, f"stream is {value!r}, wanted its address, or 0", TypeError)
            elif not 0 <= value <= limit:
                raise OverflowError(f"kernel {self._name}: {what} is {value!r}, wanted 0 to {limit}")
        if self.platform == "hip" and given[2] * self._threads > 2**32 - 1:
            raise OverflowError(
                f"kernel {self._name}: {given[2]} blocks of {self._threads} threads are more than the 2**32 - 1 "
                "threads that a launch on an AMD GPU may have: pass fewer rows or sequences at once"
            )
        arguments = given[len(_LEADING) :]
        if self._size:
            self._check_structure(arguments[0])
        else:
            for index, (letter, value) in enumerate(zip(self._letters, arguments, strict=True)):
                self._check(index, letter, value)
        self.launched.append((self._given, given))

    def _check_structure(self, content: Any) -> None:
        if not isinstance(content, bytes):
            raise TypeError(f"expected bytes, {type(content).__name__} found")
        if len(content) != self._size:
            raise ValueError(f"kernel {self._name}: argument 0 has {len(content)} bytes, wanted {self._size}")

    def _check(self, index: int, letter: str, value: Any) -> None:
        if letter == "P" and value is None:
            return
        kinds = (int, float) if letter in "fd" else (int,)
        if not isinstance(value, kinds):
            raise TypeError(f"kernel {self._name}: argument {index} is of {type(value)}, wanted {_WANTED[letter]}")
        self._convert(letter, value, f"argument {index} is {value!r}, wanted {_WANTED[letter]}", OverflowError)

    def _convert(self, letter: str, value: Any, problem: str, kind: type[Exception]) -> None:
        try:
            struct.pack(_FORMS[letter], value)
        except (struct.error, OverflowError):
            raise kind(f"kernel {self._name}: {problem}") from None
