"""A recording launcher: calls on CPU tensors go through the CK backend, and its launches are kept, not run.

    with recording.record("gfx942") as launches:
        flash_attn_func(q, k, v)
    for launch in launches:
        print(launch.kernel, launch.grid, len(launch.argument))

A call that goes to the Triton kernels shows as one launch "triton.forward" or the like, and PyTorch computes it. What
a recorded call returns otherwise is whatever its memory held. One recording at a time, of one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flash_attn.runtime.ck_planner import Launch


class Recording:
    """The target that is pretended to be there, and the launches so far."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.launches: list[Launch] = []

    def add(self, launches: list[Launch]) -> None:
        """Called once for each call, while the memory that its launches name is there."""
        self.launches += launches


current: Recording | None = None


@contextmanager
def record(target: str) -> Iterator[list[Launch]]:
    """Record what would be launched on a GPU of `target`; gives the list that fills. Raises RuntimeError if nested."""
    global current
    if current is not None:
        raise RuntimeError("a recording is under way already")
    current = Recording(target)
    try:
        yield current.launches
    finally:
        current = None
