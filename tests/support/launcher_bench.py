"""A test bench for the launcher: bound to a fake driver, with helpers for its cases. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fake_driver import FakeDriver

FUNCTIONS = {
    "hip": {
        "load": "hipModuleLoadData",
        "find": "hipModuleGetFunction",
        "unload": "hipModuleUnload",
        "launch": "hipModuleLaunchKernel",
        "exchange": "hipThreadExchangeStreamCaptureMode",
        "attribute": "hipFuncGetAttribute",
    },
    "cuda": {
        "load": "cuModuleLoadData",
        "find": "cuModuleGetFunction",
        "unload": "cuModuleUnload",
        "launch": "cuLaunchKernel",
        "exchange": "cuThreadExchangeStreamCaptureMode",
        "attribute": "cuFuncGetAttribute",
    },
}


@dataclass(frozen=True)
class Bench:
    """The launcher, bound to a platform, and the driver it is bound to."""

    launcher: Any
    fake: FakeDriver
    platform: str

    @property
    def functions(self) -> dict[str, str]:
        """The driver's name of each of its functions."""
        return FUNCTIONS[self.platform]

    def kernel(self, params: str, *, shared: int = 0, threads: int = 64) -> Any:
        """A kernel whose image is its own list of letters, as fake_driver.c expects it."""
        image = params.encode() or b"\0"
        return self.launcher.Kernel(image, "entry", params, shared, threads, f"kernel_{params}")


Case = Callable[[Bench], None]
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {}


def case(*platforms: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[function.__name__] = (function, platforms)
        return function

    return register


def equal(got: object, wanted: object) -> None:
    assert got == wanted, f"\n   got {got!r}\nwanted {wanted!r}"


@contextmanager
def raises(kind: type[BaseException], *fragments: str) -> Iterator[list[BaseException]]:
    caught: list[BaseException] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    if not caught:
        raise AssertionError(f"{kind.__name__} was not raised")
    missing = [fragment for fragment in fragments if fragment not in str(caught[0])]
    if missing:
        raise AssertionError(f"{missing} not in {caught[0]}")


def in_thread(function: Callable[[], None]) -> None:
    """Runs a function in a new thread, which has a device state of its own. Raises what the function raises."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
