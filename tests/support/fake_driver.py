"""Controls and reads fake_driver.c from tests. Standard library only: it runs under every Python."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """One launch that the driver received; each argument as the hexadecimal of its bytes."""

    device: int
    loaded: int
    stream: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    args: tuple[str, ...]


class FakeDriver:
    """The library that the launcher is bound to, opened a second time."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.fake_log.restype = self.library.fake_submissions.restype = ctypes.c_char_p
        self.library.fake_begin_capture.argtypes = (ctypes.c_void_p,)

    def reset(self, devices: int = 2) -> None:
        """Clears the log and all instructions."""
        self.library.fake_reset()
        self.library.fake_set_devices(devices)

    def fail(self, function: str, code: int) -> None:
        """Lets the next call of a function return this code without an effect."""
        self.library.fake_fail(function.encode(), code)

    def take_log(self) -> list[str]:
        """The calls since the last call of this method, one per line."""
        lines: list[str] = self.library.fake_log().decode().splitlines()
        self.library.fake_reset()
        return lines

    def take_submissions(self) -> list[list[int]]:
        """The submissions since the last call of this method: the stream, and the blocks of each launch."""
        lines: list[str] = self.library.fake_submissions().decode().splitlines()
        self.library.fake_reset()
        return [[*map(int, line.split())] for line in lines]

    def take_launches(self) -> list[Launch]:
        """The launches since the last call of this method; other calls are dropped."""
        return [parse_launch(line) for line in self.take_log() if "Launch" in line.split(maxsplit=1)[0]]


def parse_launch(line: str) -> Launch:
    """Parses a line of the log."""
    fields = dict(field.split("=", 1) for field in line.split()[1:])
    return Launch(
        device=int(fields["device"]),
        loaded=int(fields["loaded"]),
        stream=int(fields["stream"]),
        grid=tuple(int(size) for size in fields["grid"].split(",")),
        block=tuple(int(size) for size in fields["block"].split(",")),
        shared=int(fields["shared"]),
        args=tuple(argument for argument in fields["args"].split(",") if argument),
    )
