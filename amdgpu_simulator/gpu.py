"""A pretended AMD GPU for flash_attn: calls on CPU tensors run the kernels that were compiled for it.

    with gpu.pretend("gfx942"):  # by Triton
        out = flash_attn_func(q, k, v)
    gpu.run("gfx942", launches)  # recorded ones, of Composable Kernel

Everything above the driver is what a user runs: the public API, the backend, grids and arguments. Only the launch is
the simulator's, `amdgpu_simulator`. In a process that `amdgpu_simulator/hip/process.py` runs, the launcher and AMD's
runtime are a user's too.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from flash_attn.backends import triton
from flash_attn.backends.triton import fp8 as triton_fp8
from flash_attn.backends.triton import kernels as triton_kernels
from flash_attn.custom_ops import attention, dispatch, dropout, fp8, kvcache
from flash_attn.kernels.targets import fp8_format
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.variants import Variant
from flash_attn.runtime import launch
from flash_attn.runtime.ck_planner import Launch

from amdgpu_simulator.hip import packets, through_hip
from amdgpu_simulator.isa import assembly, machine
from rocm_wheels.compile import sources
from rocm_wheels.compile.ck import compiler as ck_compiler
from rocm_wheels.compile.ck import instances as ck_instances
from rocm_wheels.compile.ck import sources as ck_sources
from rocm_wheels.compile.triton import compiler as triton_compiler
from rocm_wheels.paths import ROOT

_FORMS = {"P": "<Q", "0": "<Q", "i": "<i", "f": "<f"}


class Kernel:
    """What `runtime.launch` calls a kernel: launches by the simulator."""

    def __init__(
        self,
        target: str,
        variant: Variant,
        config: Config | None,
        program: Callable[[assembly.Kernel], machine.Program],
        backwards: bool,
        launched: list[str],
    ) -> None:
        image, entry, text = compiled(target, variant, config)
        self.variant = variant
        self.block_m: int = entry["constants"].get("BLOCK_M", 0)
        self.block_n: int = entry["constants"].get("BLOCK_N", 0)
        self.num_xcds: int = entry["constants"].get("NUM_XCDS", 1)
        self._entry = entry
        self._program = program(assembly.parse(text))
        self._loaded = through_hip.Kernel(variant.name, image, entry, self._program) if packets.running() else None
        self._backwards = backwards
        self._launched = launched

    def pointer(self, tensor: torch.Tensor) -> int:
        _known[tensor.untyped_storage().data_ptr()] = tensor
        return tensor.data_ptr()

    def optional(self, *tensors: torch.Tensor | None) -> tuple[int | None, ...]:
        return tuple(None if tensor is None else self.pointer(tensor) for tensor in tensors)

    def launch(self, _device: int, _stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
        self._launched.append(self.variant.name)
        ranges = [(start, tensor.untyped_storage().nbytes()) for start, tensor in _known.items()]
        if self._loaded is not None:
            self._loaded.launch((x, y, z), arguments, ranges, backwards=self._backwards)
            return
        letters = self._entry["params"]
        kernel = self._program.kernel
        content = bytearray(kernel.descriptor["kernarg_size"])
        values = [*arguments, *[0] * (len(letters) - len(arguments))]
        for (offset, size, _), letter, value in zip(kernel.arguments, letters, values, strict=False):
            form = _FORMS[letter]
            if struct.calcsize(form) != size:
                raise ValueError(
                    f"{self.variant.name}: argument at {offset} takes {size} bytes, the launcher passes {form}"
                )
            struct.pack_into(form, content, offset, value or 0)
        machine.launch(
            self._program,
            (x, y, z),
            self._entry["threads"],
            bytes(content),
            ranges,
            shared=self._entry["shared"],
            backwards=self._backwards,
        )


_known: dict[int, torch.Tensor] = {}


@contextmanager
def pretend(
    target: str,
    *,
    backwards: bool = False,
    configs: Mapping[str, Config] | None = None,
    program: Callable[[assembly.Kernel], machine.Program] = machine.Program,
    jit: bool = False,
) -> Iterator[list[str]]:
    """flash_attn's calls on CPU tensors go to the Triton backend and kernels of `target`; gives the names of what ran,
    as it runs. `backwards` as in `machine.launch`; configs: launch configurations by operation, in the place of the
    tuning table's; program: makes what runs, for a program with an
    observer; jit: kernels by Triton's JIT, see `jit`."""
    launched: list[str] = []

    def find(_device: int, variant: Variant) -> Any:
        config = (configs or {}).get(variant.op)
        if jit:
            return simulated_jit.Kernel(target, variant, config, launched)
        return Kernel(target, variant, config, program, backwards, launched)

    def format_of(_tensor: torch.Tensor) -> torch.dtype:
        return triton_fp8.TYPES[str(fp8_format(target))]

    _known.clear()
    with ExitStack() as stack:
        if jit:
            from amdgpu_simulator import jit as simulated_jit

            stack.enter_context(simulated_jit.active(target, program, backwards))
            stack.enter_context(mock.patch.object(triton_kernels, "_check_device"))
        for module in (attention, dispatch, dropout, fp8, kvcache):
            stack.enter_context(mock.patch.object(module, "select", return_value=triton))
        for module, name, value in (
            (launch, "_find", find),
            (launch, "device_target", lambda _device: target),
            (launch, "interpreting", lambda: not jit),
            (triton_fp8, "format_of", format_of),
            (triton, "format_of", format_of),
            (launch, "_kernels", {}),
            (triton_kernels, "_kernels", {}),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield launched
    _known.clear()


@cache
def _compiler() -> ProcessPoolExecutor:
    """A process that compiles: where tests run Triton may be set to interpret kernels instead."""
    scratch = tempfile.mkdtemp(prefix="amdgpu-")
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=triton_compiler.prepare, initargs=(scratch,))


@cache
def compiled(target: str, variant: Variant, config: Config | None = None) -> tuple[bytes, dict[str, Any], str]:
    """The code object of a kernel, its manifest entry and its assembly text. Raises CompileFailed."""
    plain = None if config is None else tuple(config)
    return _compiler().submit(triton_compiler.translate, target, tuple(variant), plain).result()


CACHE = ROOT / "build" / "test-cache"


def run(target: str, launches: list[Launch], *, backwards: bool = False) -> None:
    """Launches of Composable Kernel's, one after another, on the CPU memory that their arguments point to."""
    for one in launches:
        program, threads = _composable(target, one.kernel)
        ranges = [
            (found.untyped_storage().data_ptr(), found.untyped_storage().nbytes())
            for found in gc.get_objects()
            if type(found) in (torch.Tensor, torch.nn.Parameter)
        ]
        if packets.running():
            _through_hip(target, one.kernel).launch(one.grid, (one.argument,), ranges, backwards=backwards)
        else:
            machine.launch(program, one.grid, threads, one.argument, ranges, backwards=backwards)


def _instance(name: str) -> ck_instances.Instance:
    (instance,) = (one for _, unit in ck_instances.units(name) for one in unit if one.name == name)
    return instance


@cache
def _through_hip(target: str, name: str) -> through_hip.Kernel:
    """A kernel of Composable Kernel as a wheel has it."""
    image, entries = ck_compiler.compile_unit(target, name, [_instance(name)], cache=CACHE, toolchain="pypi")
    return through_hip.Kernel(name, image, entries[name], _composable(target, name)[0])


@cache
def _composable(target: str, name: str) -> tuple[machine.Program, int]:
    """A kernel of Composable Kernel and the threads of its blocks; its assembly is kept from run to run."""
    instance = _instance(name)
    made_of = (
        ck_compiler.source([instance]),
        ck_compiler.FLAGS + ck_compiler.DEFINES,
        sources.digest(*ck_compiler.SOURCES),
        ck_sources.load().key,
    )
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    kept = CACHE / "assembly" / f"{target}-{name}-{key}.s"
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="ck-") as directory:
            text = ck_compiler.translate(target, name, [instance], Path(directory), cache=CACHE, toolchain="pypi")
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.rename(kept)
    text = kept.read_text(encoding="utf-8")
    threads = re.search(r"\.max_flat_workgroup_size:\s+(\d+)", text)
    if threads is None:
        raise ValueError(f"{kept} does not say how many threads a block has")
    return machine.Program(assembly.parse(text)), int(threads[1])
