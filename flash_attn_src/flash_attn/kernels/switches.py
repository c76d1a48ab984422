"""Compiler options that Triton has as switches of the process, or that the installed Triton lacks."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

# Those that `switched` turns on.
_SWITCHES = frozenset({"in_thread_transpose"})
# Vendor -> the class in Triton's backend whose fields are the options that a launch may name.
_CLASSES = {"amd": "HIPOptions", "nvidia": "CUDAOptions"}


def known(options: Mapping[str, int | str], vendor: str) -> dict[str, int | str]:
    """The options that the installed Triton has. A launch that names another one raises KeyError.

    They change the speed of a kernel, not its results. `schedule_hint` exists from 3.4 on; `kpack` is deprecated.
    """
    return {name: value for name, value in options.items() if name in _SWITCHES or name in _names(vendor)}


@cache
def _names(vendor: str) -> frozenset[str]:
    module = importlib.import_module(f"triton.backends.{vendor}.compiler")
    return frozenset(field.name for field in dataclasses.fields(getattr(module, _CLASSES[vendor])))


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
