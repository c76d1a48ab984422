"""Compiler options that Triton has as switches of the process, or that the installed Triton lacks."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

# The oldest Triton whose JIT compiles the kernels, because it takes named tuples (`groups`), and the oldest torch that
# requires it.
OLDEST_TRITON, OLDEST_TORCH = "3.3", "2.7"

# Those that `switched` turns on, with Triton's names for them.
_SWITCHES = {"in_thread_transpose": "use_in_thread_transpose", "async_copy": "use_async_copy"}
# The compile stage alone takes these. It checks the code that comes out of the first. The second is its own change of
# the assembly, and no option of Triton.
WAVE_PRIORITIES = "wave_priorities"
_AHEAD_OF_TIME = frozenset({"async_copy", WAVE_PRIORITIES})
# Forms of the source, no options of Triton: `backward_dkdv.attn_bwd_dkdv`, `lazy_rescale`.
DK_APART, LAZY_RESCALE = "dk_apart", "lazy_rescale"
# Vendor -> the class in Triton's backend whose fields are the options that a launch may name.
_CLASSES = {"amd": "HIPOptions", "nvidia": "CUDAOptions"}


def known(options: Mapping[str, int | str], vendor: str) -> dict[str, int | str]:
    """The options that the installed Triton has, for the JIT. Triton raises KeyError for other options.

    They change the speed of a kernel, not its results. `schedule_hint` exists from 3.4 on; `kpack` is deprecated.
    """
    taken = _names(vendor) | (_SWITCHES.keys() - _AHEAD_OF_TIME)
    return {name: value for name, value in options.items() if name in taken}


@cache
def _names(vendor: str) -> frozenset[str]:
    module = importlib.import_module(f"triton.backends.{vendor}.compiler")
    return frozenset(field.name for field in dataclasses.fields(getattr(module, _CLASSES[vendor])))


@contextmanager
def switched(options: Mapping[str, int | str]) -> Iterator[dict[str, int | str]]:
    """Turns on the switches of a configuration and yields the other options, which are Triton's.

    A Triton without a switch (older than 3.4 has none) compiles the same results with slower code.
    """
    left = {name: value for name, value in options.items() if name not in (WAVE_PRIORITIES, DK_APART, LAZY_RESCALE)}
    asked = [knob for name, knob in _SWITCHES.items() if left.pop(name, 0)]
    if not asked:
        yield left
        return
    try:
        from triton import knobs
    except ImportError:
        yield left
        return
    with knobs.amd.scope():
        for knob in asked:
            setattr(knobs.amd, knob, True)
        yield left
