"""A torch for CPUs as torch for ROCm, in a process of amdgpu_simulator/hip/process.py: its GPUs are the pretended ones.

Tensors "on the GPU" lie in the process's memory. What the package's launcher launches goes through AMD's runtime to the
pretended driver, which computes nothing: a kernel takes the time that SECONDS says of it, and events read that clock.
PRETEND=TARGET:GPUS installs it when Python starts (as sitecustomize; PRETEND_PYTHON starts such a Python). Shapes are
small here, and calls of the selftest, one of each group, run on the CPU, where their results are right.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amdgpu_simulator import through_hip
from amdgpu_simulator.hip import packets

NS = {"vector": 2.0, "trans": 9.5, "shared": 31.0, "cached": 50.0, "level 2": 150.0, "memory": 300.0, "barrier": 8.0}
TFLOPS, GBPS, LAUNCH_NS, KERNEL_NS = 100.0, 500.0, 5000.0, 200_000.0
COMPUTE_UNITS, FREE = 4, 1 << 24


class Clock:
    """The time of the pretended GPU, in nanoseconds."""

    def __init__(self, images: Callable[[], dict[bytes, str]]) -> None:
        self.now = 0.0
        self._images = images
        self.gpus: set[int] = set()

    def arrived(self, packet: packets.Packet) -> None:
        name = self._images().get(packet.code(256), "")
        self.gpus.add(packet.gpu)
        self.now += LAUNCH_NS + (_probed(packet) if name.startswith("probe") else KERNEL_NS)


def _probed(packet: packets.Packet) -> float:
    """What the loops of a probe take."""
    from flash_attn.diagnosis.firstlight import probes

    _, _, _, *turns = struct.unpack_from("<3Q7i", packet.content())
    asked = dict(zip(probes.LOOPS, turns, strict=True))
    programs, size = packet.blocks[0], probes.BLOCK["wide" if packet.block[0] > 64 else "plain"]
    taken: float = asked["products"] * 2 * size**3 * programs / TFLOPS / 1e3
    taken += asked["streams"] * 4 * probes.STREAM * programs / GBPS
    for name, loop in (("vector", "adds"), ("trans", "exps"), ("shared", "exchanges"), ("barrier", "barriers")):
        taken += asked[loop] * probes.CHAIN * NS[name]
    level = "memory"
    for probe in probes.PROBES:
        if probe.loop == "loads" and asked["loads"] in probe.turns:
            level = probe.name
    return float(taken + asked["loads"] * NS[level])


class _OnTheCpu(TorchFunctionMode):
    """Puts what a program asks a GPU for into the memory of the process."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moved = {name: _moved(value) for name, value in (kwargs or {}).items()}
        return func(*map(_moved, args), **moved)


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


@contextmanager
def installed(
    target: str, gpus: int, images: Callable[[], dict[bytes, str]], *, put: Any = setattr, event: float = 0.0
) -> Iterator[Clock]:
    """Makes this process's torch one for ROCm. images: first bytes of code -> name of the kernel. put: sets an
    attribute. event: nanoseconds from an event to what follows it."""
    from flash_attn.core import stored

    runtime, clock = packets.runtime(), Clock(images)

    def synchronize(_: Any = None) -> None:
        runtime.call("hipDeviceSynchronize")
        while not runtime._served.empty():
            if problem := runtime._served.get():
                raise problem

    class Event:
        def __init__(self, **_: object) -> None:
            self.at = 0.0

        def record(self) -> None:
            synchronize()
            self.at = clock.now
            clock.now += event

        def synchronize(self) -> None:
            synchronize()

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e6

    put(torch.version, "hip", "6.4.43482")
    gpu = SimpleNamespace(
        name="AMD Radeon Graphics", gcnArchName=target, total_memory=64 << 30, multi_processor_count=COMPUTE_UNITS
    )
    changes: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: gpus, "get_device_properties": lambda _: gpu,
        "set_device": lambda number: runtime.call("hipSetDevice", int(number)), "synchronize": synchronize,
        "mem_get_info": lambda _=None: (FREE, 64 << 30), "Event": Event, "current_device": lambda: _current(runtime),
    }  # fmt: skip
    for name, value in changes.items():
        put(torch.cuda, name, value)
    put(stored, "_current_stream", lambda _: 0)
    runtime._run = clock.arrived
    try:
        with _OnTheCpu():
            yield clock
    finally:
        runtime._run = None


def _current(runtime: packets.Runtime) -> int:
    number = ctypes.c_int()
    runtime.call("hipGetDevice", ctypes.byref(number))
    return number.value


_kept = ExitStack()


def _started() -> None:
    """What sitecustomize does in each process of a run of firstlight."""
    target, _, gpus = os.environ["PRETEND"].partition(":")

    result: dict[bytes, str] = {}

    def images() -> dict[bytes, str]:
        from flash_attn.core import store

        archive = store.open_store(target)
        if not result and archive is not None:
            for name, image in archive.images():
                entry = archive.kernels[name]
                if entry["params"][0] not in "BK":
                    result[through_hip.code_of(image, entry["symbol"])[:256]] = name
        return result

    sys.executable = os.environ["PRETEND_PYTHON"]
    if importlib.util.find_spec("flash_attn") is None:  # the one file, before it unpacks the package
        return
    event = 0.0 if "probes" in sys.orig_argv else 1e8  # else a call would be repeated, to be timed
    clock = _kept.enter_context(installed(target, int(gpus), images, event=event))
    from flash_attn.attention import backends
    from flash_attn.attention.backends import triton
    from flash_attn.core import device, driver
    from flash_attn.diagnosis.firstlight import shapes
    from flash_attn.diagnosis.selftest import cases

    every = {case.group: case for case in reversed(cases.cases()) if case.check != "captured"}
    setattr(cases, "cases", lambda repeats=0: tuple(reversed(every.values())))  # noqa: ARG005, B010
    cases.SPEEDS = [replace(shape, batch=1, seqlen=shape.seqlen // 64) for shape in cases.SPEEDS]  # type: ignore[assignment]
    for row in shapes.PUBLISHED:
        object.__setattr__(row.shape, "seqlen", row.shape.seqlen // 64)
        object.__setattr__(row.shape, "batch", 1)
    attend = torch.nn.functional.scaled_dot_product_attention

    def sdpa(*args: Any, **kwargs: Any) -> Any:
        clock.now += 2 * KERNEL_NS
        return attend(*args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = sdpa
    if "flash_attn.diagnosis.selftest.worker" not in " ".join(sys.orig_argv):
        device._devices[-1] = driver.Driver(0)
        _kept.enter_context(backends.using(triton))


if "PRETEND" in os.environ and __name__ == "sitecustomize":
    _started()
