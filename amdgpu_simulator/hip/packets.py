"""Kernels that arrive in the queues of the mock GPU, in a process of `process.py`.

Sources: HSA Platform System Architecture, "Kernel dispatch packet"; LLVM, "User Guide for AMDGPU Backend", "Kernel
Descriptor".
"""

from __future__ import annotations

import ctypes
import os
import queue
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple


class Packet(NamedTuple):
    """One launch: number of the GPU, threads of a block and of the grid, bytes of private memory per thread and of
    shared memory per block, addresses of the kernel descriptor and of the arguments.
    """

    gpu: int
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    private: int
    shared: int
    kernel: int
    arguments: int

    @property
    def blocks(self) -> tuple[int, int, int]:
        x, y, z = (threads // size for threads, size in zip(self.grid, self.block, strict=True))
        return x, y, z

    def content(self, least: int = 0) -> bytes:
        """All bytes of the kernel's arguments, including those that HIP adds, and at least `least` bytes, because AMD's
        assembly kernels do not state their number.
        """
        size = struct.unpack("<I", ctypes.string_at(self.kernel + 8, 4))[0]
        return ctypes.string_at(self.arguments, max(size, least))

    def code(self, size: int) -> bytes:
        """The first bytes of the kernel's code as it was loaded."""
        (entry,) = struct.unpack("<q", ctypes.string_at(self.kernel + 16, 8))
        return ctypes.string_at(self.kernel + entry, size)


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_void_p)


class Runtime:
    """The HIP runtime in this process."""

    def __init__(self) -> None:
        self.hip = ctypes.CDLL(os.environ["AMDGPU_HIP"])
        self._run: Callable[[Packet], None] | None = None
        self._served: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._callback = _CALLBACK(self._arrived)
        ctypes.CDLL(os.environ["AMDGPU_KFD"]).kfd_on_kernel(self._callback)

    def _arrived(self, gpu: int, address: int) -> None:
        """Runs on the thread of a queue, which C started."""
        try:
            words = struct.unpack("<HHHHHHIIIIIQQQQ", ctypes.string_at(address, 64))
            _, _, *block, _, gx, gy, gz, private, shared, kernel, arguments, _, _ = words
            x, y, z = block
            if self._run is None:
                raise ValueError(f"nobody launched the kernel at {kernel:#x}")
            self._run(Packet(gpu, (x, y, z), (gx, gy, gz), private, shared, kernel, arguments))
        except BaseException as problem:  # C cannot catch it
            self._served.put(problem)
        else:
            self._served.put(None)

    def call(self, function: str, *arguments: object) -> None:
        """Calls a HIP function. Raises RuntimeError if it fails."""
        if code := getattr(self.hip, function)(*arguments):
            raise RuntimeError(f"{function} fails with {code}")

    def _next(self) -> BaseException | None:
        try:
            return self._served.get(timeout=1800)
        except queue.Empty:
            raise TimeoutError("a kernel that was launched has not ended within half an hour") from None

    @contextmanager
    def serving(self, run: Callable[[Packet], None], count: int) -> Iterator[None]:
        """Expects `count` launches within the block and passes each packet to the function. Raises what the function
        raises.
        """
        self._run = run
        try:
            yield
            # Run packets before HIP waits, because HIP may poll and occupy the core.
            problems = [self._next() for _ in range(count)]
            self.call("hipDeviceSynchronize")
        finally:
            self._run = None
        if not self._served.empty():
            raise ValueError(f"more than {count} kernels arrived")
        for problem in filter(None, problems):
            raise problem


@cache
def runtime() -> Runtime:
    """The runtime of this process."""
    return Runtime()


def running() -> bool:
    """Whether this process has AMD's runtime with a mock GPU."""
    return "AMDGPU_HIP" in os.environ
