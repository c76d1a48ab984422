"""Tests of AMD's runtime with the launcher and every kernel of the store in the variable STORE.

test_rocm_runtime.py runs it in processes that `amdgpu_simulator/hip/process.py` starts.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import flash_attn
import pytest
import torch
import torch_on_hip
from flash_attn.core import device
from flash_attn.core import store as runtime_store
from flash_attn.diagnosis.firstlight import bench

from amdgpu_simulator import through_hip
from amdgpu_simulator.hip import packets
from rocm_wheels.compile import sources
from rocm_wheels.wheel import ctypes_launcher

FORMS = {"P": "Q", "i": "i", "f": "f", "0": "Q"}
BITS = {"P": 47, "i": 31, "f": 23}


class Stored:
    """A kernel of the store, with arguments that all differ, so that a test detects exchanged arguments."""

    def __init__(self, image: bytes, name: str, entry: dict[str, Any]) -> None:
        self.entry = entry
        self.code = through_hip.code_of(image, entry["symbol"])
        how = (entry["symbol"], entry["params"], entry["shared"], entry["threads"], name)
        self.kernel = through_hip.launcher_module().Kernel(image, *how)
        draw = random.Random(name)
        if entry["params"][0] in "BK":  # one structure, for Composable Kernel and for AMD's assembly
            self.letters, self.form = "B", struct.Struct(f"{entry['params'][1:]}s")
            self.arguments: list[Any] = [draw.randbytes(self.form.size)]
        else:
            self.letters = entry["params"]
            self.form = struct.Struct("@" + "".join(FORMS[letter] for letter in self.letters))  # aligned
            self.arguments = [draw.getrandbits(BITS[letter]) for letter in self.letters.rstrip("0")]

    def check(self, packet: packets.Packet, grid: tuple[int, int, int]) -> None:
        given = self.form.pack(*self.arguments, *[0] * (len(self.letters) - len(self.arguments)))
        assert (packet.blocks, packet.block) == (grid, (self.entry["threads"], 1, 1))
        assert packet.shared == self.entry["shared"] + self.entry["resources"]["lds"]
        assert packet.private == self.entry["resources"]["private"]
        assert self.form.unpack_from(packet.content(self.form.size)) == self.form.unpack(given)
        assert packet.code(len(self.code)) == self.code


@pytest.fixture(scope="session")
def store() -> dict[str, Stored]:
    archive = sources.module("core.store").Store(Path(os.environ["STORE"]))
    return {name: Stored(image, name, archive.kernels[name]) for name, image in sorted(archive.images())}


@pytest.fixture
def one(store: dict[str, Stored]) -> Stored:
    """A kernel that nothing has loaded; each test takes another one."""
    name = next(iter(store))
    return store.pop(name)


def test_every_launch_arrives_unchanged(store: dict[str, Stored]) -> None:
    for number, kernel in enumerate(store.values()):
        grid = (1 + number % 5, 1 + number % 3, 1 + number % 2)
        with packets.runtime().serving(partial(kernel.check, grid=grid), 1):
            kernel.kernel.launch(0, 0, *grid, *kernel.arguments)
        resources = kernel.entry["resources"]
        assert kernel.kernel.attributes(0) == {
            "registers": resources["vgprs"],
            "local_bytes": resources["private"],
            "static_shared_bytes": resources["lds"],
            "max_threads": kernel.entry["threads"],
        }


@pytest.mark.parametrize("launcher", ["compiled", "ctypes"])
def test_firstlight_measures_the_second_gpu(
    launcher: str, store: dict[str, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels, from the store, by the package's launcher and by the one of the one file."""
    module = through_hip.launcher_module() if launcher == "compiled" else ctypes_launcher
    monkeypatch.setitem(sys.modules, "flash_attn._launcher", module)
    monkeypatch.setattr(flash_attn, "_launcher", module, raising=False)
    archive = runtime_store.Store(Path(os.environ["STORE"]))
    monkeypatch.setattr(runtime_store, "open_store", {"gfx1030": archive}.get)
    for name, value in {"_LOAD_SECONDS": 0.0, "_LAUNCHES": 10, "_LEAST_TABLE": 1 << 22}.items():
        monkeypatch.setattr(bench, name, value)
    images = {kernel.code[:256]: name for name, kernel in store.items()}
    with torch_on_hip.installed("gfx1030", 2, lambda: images, put=monkeypatch.setattr) as clock:
        torch.cuda.set_device(1)
        lines = {line.pop("probe"): line for line in bench.Bench(1).run()}
        torch.cuda.set_device(0)
    device._devices.pop(1)
    assert {name: lines[name]["ns"] for name in torch_on_hip.NS} == torch_on_hip.NS
    assert lines["matrix rate"] == lines["matrix rate under load"] == {"tflops": torch_on_hip.TFLOPS}
    assert lines["bandwidth"] == {"gbps": torch_on_hip.GBPS}
    assert lines["launch, GPU"] == {"ns": torch_on_hip.LAUNCH_NS}
    assert clock.gpus == {1}


def test_a_kernel_that_is_first_launched_in_a_capture(one: Stored) -> None:
    """The load must not spoil the capture. Each replay of the graph launches the kernel once."""
    runtime = packets.runtime()
    stream, graph, ready = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    with runtime.serving(partial(one.check, grid=(2, 3, 1)), 6):
        runtime.call("hipStreamCreateWithFlags", ctypes.byref(stream), 1)
        runtime.call("hipStreamBeginCapture", stream, 0)  # capture mode global: for all threads
        for _ in range(2):
            one.kernel.launch(0, stream.value, 2, 3, 1, *one.arguments)
        runtime.call("hipStreamEndCapture", stream, ctypes.byref(graph))
        runtime.call("hipGraphInstantiate", ctypes.byref(ready), graph, None, None, ctypes.c_size_t(0))
        for _ in range(3):
            runtime.call("hipGraphLaunch", ready, stream)


def test_a_kernel_on_the_second_gpu_while_the_first_is_current(one: Stored) -> None:
    runtime = packets.runtime()
    seen: list[packets.Packet] = []
    current = ctypes.c_int()
    runtime.call("hipSetDevice", 1)
    try:
        with runtime.serving(seen.append, 1):
            runtime.call("hipSetDevice", 0)
            one.kernel.launch(1, 0, 1, 1, 1, *one.arguments)
            runtime.call("hipGetDevice", ctypes.byref(current))
            runtime.call("hipSetDevice", 1)  # the end of the block waits for this GPU
    finally:
        runtime.call("hipSetDevice", 0)
    assert [packet.gpu for packet in seen] == [1]
    assert current.value == 0


def test_threads_load_it_once_and_each_launch_arrives(one: Stored) -> None:
    start = threading.Barrier(8)
    arrived: list[packets.Packet] = []

    def launch(number: int) -> None:
        start.wait()
        one.kernel.launch(0, 0, number, 1, 1, *one.arguments)

    threads = [threading.Thread(target=launch, args=(1 + number,)) for number in range(8)]
    with packets.runtime().serving(arrived.append, 8):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(packet.blocks for packet in arrived) == [(1 + number, 1, 1) for number in range(8)]
    assert len({packet.kernel for packet in arrived}) == 1


def test_the_largest_grid(one: Stored) -> None:
    """The launcher must refuse one more block, because some releases of HIP launch only a part of such a grid."""
    grid = ((2**32 - 1) // one.entry["threads"], 1, 1)
    with packets.runtime().serving(partial(one.check, grid=grid), 1):
        one.kernel.launch(0, 0, *grid, *one.arguments)
    with pytest.raises(OverflowError, match="pass fewer rows"):
        one.kernel.launch(0, 0, grid[0] + 1, 1, 1, *one.arguments)


def test_refused_by_a_gpu_of_another_target(one: Stored) -> None:
    """Runs on a GPU of another target. Only the launcher raises: HIP keeps no error that torch would report as its
    own.
    """
    with pytest.raises(RuntimeError, match=r"on device 0: hipModuleLoadData failed: hipErrorNoBinaryForGpu \(209\)"):
        one.kernel.launch(0, 0, 1, 1, 1, *one.arguments)
    assert packets.runtime().hip.hipGetLastError() == 0
