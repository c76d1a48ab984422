"""Compiler options that Triton has as switches of the process, not as options of a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def switched(options: Mapping[str, int | str]) -> Iterator[dict[str, int | str]]:
    """Turns on the switches of a configuration and gives the options that are left for the compiler.

    A Triton without a switch (older than 3.4 has none) compiles the same results with slower code.
    """
    left = dict(options)
    if not left.pop("in_thread_transpose", 0):
        yield left
        return
    try:
        from triton import knobs
    except ImportError:
        yield left
        return
    with knobs.amd.scope():
        knobs.amd.use_in_thread_transpose = True
        yield left
