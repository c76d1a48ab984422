"""A simulated AMD GPU for flash_attn: calls on CPU tensors run the kernels that were compiled for the GPU.

    with gpu.pretend("gfx942"):  # by Triton
        out = flash_attn_func(q, k, v)
    gpu.run("gfx942", launches, tensors) # recorded launches of Composable Kernel

Everything above the driver is the code that a user runs: the public API, the backend, grids and arguments. The
simulator replaces only the launch. In a process of `amdgpu_simulator/hip/process.py`, the launcher and AMD's runtime
are the real ones too.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import multiprocessing
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from flash_attn.attention import backends
from flash_attn.attention.backends import triton
from flash_attn.core import device
from flash_attn.core.arguments import Arguments
from flash_attn.core.ck_planner import Launch
from flash_attn.kernels import assembly as assembly_table
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.variants import Variant

from amdgpu_simulator import assembly_kernels, through_hip
from amdgpu_simulator.hip import packets
from amdgpu_simulator.isa import assembly, machine
from rocm_wheels.compile import cache as disk
from rocm_wheels.compile import sources, workers
from rocm_wheels.compile.ck import compiler as ck_compiler
from rocm_wheels.compile.ck import instances as ck_instances
from rocm_wheels.compile.ck import sources as ck_sources
from rocm_wheels.compile.triton import compiler as triton_compiler
from rocm_wheels.packages import version_of
from rocm_wheels.paths import FLASH_ATTN_SRC, ROOT

_FORMS = {"P": "<Q", "0": "<Q", "i": "<i", "f": "<f"}


# The code object of a kernel, its manifest entry and its instructions.
Found = tuple[bytes, dict[str, Any], assembly.Kernel]
Code = Callable[[str, Variant, Config | None], Found]


def compiled_code(target: str, variant: Variant, config: Config | None) -> Found:
    """Triton's code for a kernel. Raises CompileFailed."""
    image, entry, text = compiled(target, variant, config)
    return image, entry, _parsed(text)


_parsed = lru_cache(32)(assembly.parse)  # calls of one kernel share the decoded program


class Kernel:
    """Implements the kernel interface of `core.device`: a launch runs on the simulator."""

    def __init__(self, gpu: SimulatedGpu, variant: Variant) -> None:
        image, entry, kernel = gpu.code(gpu.target, variant, gpu.configs.get(variant.op))
        self.variant = variant
        self.block_m: int = entry["constants"].get("BLOCK_M", 0)
        self.block_n: int = entry["constants"].get("BLOCK_N", 0)
        self.num_xcds: int = entry["constants"].get("NUM_XCDS", 1)
        self.arguments = Arguments.of(variant, gpu.target)
        self._gpu = gpu
        self._entry = entry
        self._program = gpu.program(kernel)
        self._loaded = through_hip.Kernel(variant.name, image, entry, self._program) if packets.running() else None

    def launch(self, grid: device.Grid, tensors: device.Tensors, numbers: Sequence[int | float]) -> None:
        """Runs the kernel. It may access the memory of these tensors and no other memory."""
        self._gpu.launched.append(self.variant.name)
        arguments = [*(None if x is None else x.data_ptr() for x in tensors), *numbers]
        if self._loaded is not None:
            self._loaded.launch(grid, arguments, ranges(tensors), backwards=self._gpu.backwards)
            return
        letters = self._entry["params"]
        kernel = self._program.kernel
        content = bytearray(kernel.descriptor["kernarg_size"])
        values = [*arguments, *[0] * (len(letters) - len(arguments))]
        for (offset, size, _), letter, value in zip(kernel.arguments, letters, values, strict=False):
            form = _FORMS[letter]
            if struct.calcsize(form) != size:
                raise ValueError(
                    f"{self.variant.name}: the argument at byte {offset} has {size} bytes, the launcher passes {form}"
                )
            struct.pack_into(form, content, offset, value or 0)
        machine.launch(
            self._program,
            grid,
            self._entry["threads"],
            bytes(content),
            ranges(tensors),
            shared=self._entry["shared"],
            backwards=self._gpu.backwards,
        )


def ranges(tensors: device.Tensors) -> list[tuple[int, int]]:
    """(address, bytes) of the memory of the tensors, each storage once."""
    storages = [x.untyped_storage() for x in tensors if x is not None]
    return list({storage.data_ptr(): storage.nbytes() for storage in storages}.items())


class SimulatedGpu:
    """An AMD GPU with the interface of `core.device`. Triton's kernels are compiled for it as for a wheel."""

    compute_units = 4

    def __init__(
        self,
        target: str,
        *,
        backwards: bool = False,
        configs: Mapping[str, Config] | None = None,
        program: Callable[[assembly.Kernel], machine.Program] = machine.Program,
        code: Code = compiled_code,
    ) -> None:
        """backwards: as in `machine.launch`. configs: launch configurations by operation, in place of the tuning table.
        program: makes the program, for example with an observer. code: the origin of kernels.
        """
        self.target = target
        self.backwards = backwards
        self.configs = configs or {}
        self.program = program
        self.code = code
        self.launched: list[str] = []

    def kernel(self, variant: Variant) -> device.Kernel:
        return Kernel(self, variant)

    def has_composable_kernel(self) -> bool:
        return True

    def has_stored(self, name: str) -> bool:
        return any((row.target, row.name) == (self.target, name) for row in assembly_table.KERNELS)

    def submit(self) -> bool:
        return True  # each launch has ended when it returns

    def run(self, launches: Sequence[Launch], tensors: device.Tensors) -> None:
        run(self.target, launches, tensors, backwards=self.backwards)


class _JitGpu(SimulatedGpu):
    """A GPU whose Triton kernels come from Triton's JIT (`jit.active`)."""

    def kernel(self, variant: Variant) -> device.Kernel:
        from amdgpu_simulator.jit import Kernel  # imports Triton, which a process that interprets kernels must not

        return Kernel(variant, self.target, self.configs.get(variant.op), self.launched)


@contextmanager
def pretend(
    target: str,
    *,
    backwards: bool = False,
    configs: Mapping[str, Config] | None = None,
    program: Callable[[assembly.Kernel], machine.Program] = machine.Program,
    jit: bool = False,
    code: Code = compiled_code,
) -> Iterator[list[str]]:
    """Sends flash_attn's calls on CPU tensors to the Triton backend and kernels of `target`. Yields the list of kernels
    that ran, which grows.

    jit: kernels from Triton's JIT, see `jit`. The other arguments: `SimulatedGpu`.
    """
    gpu = SimulatedGpu(target, backwards=backwards, configs=configs, program=program, code=code)
    with ExitStack() as stack:
        if jit:
            from amdgpu_simulator import jit as simulated_jit

            stack.enter_context(simulated_jit.active(target, program, backwards))
            gpu = _JitGpu(target, configs=configs)
        stack.enter_context(device.using(gpu))
        stack.enter_context(backends.using(triton))
        yield gpu.launched


@cache
def _compiler() -> ProcessPoolExecutor:
    """A process that compiles, because Triton may be set to interpret kernels in this process."""
    scratch = tempfile.TemporaryDirectory(prefix="amdgpu-")
    atexit.register(scratch.cleanup)
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=workers.start, initargs=(scratch.name,))


@cache
def compiled(target: str, variant: Variant, config: Config | None = None) -> tuple[bytes, dict[str, Any], str]:
    """The code object of a kernel, its manifest entry and its assembly text; cached on disk. Raises CompileFailed."""
    asked = (target, tuple(variant), None if config is None else tuple(config))

    def translated() -> str:
        image, entry, text = _compiler().submit(triton_compiler.translate, *asked).result()
        return json.dumps([image.hex(), entry, text])

    image, entry, text = json.loads(_kept(f"{target}-{variant.name}", repr((asked, _recipe())), translated))
    return bytes.fromhex(image), entry, text


@cache
def _recipe() -> str:
    """A digest of Triton's version and of every file that decides about its code objects."""
    roots = (FLASH_ATTN_SRC / "flash_attn/kernels", ROOT / "rocm_wheels/compile")
    files = (path for root in roots for path in sorted(root.rglob("*.py")))
    return hashlib.sha256(b"".join([version_of("triton").encode(), *map(Path.read_bytes, files)])).hexdigest()


CACHE = ROOT / "build" / "test-cache"


def _kept(name: str, made_of: str, make: Callable[[], str]) -> str:
    """A text that processes make once. It is kept on disk, for all that it is made of."""
    kept = CACHE / "assembly" / f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    if not kept.exists():
        text = make()
        kept.parent.mkdir(parents=True, exist_ok=True)
        disk.write(kept, text.encode())
    return kept.read_text(encoding="utf-8")


def run(target: str, launches: Sequence[Launch], tensors: device.Tensors, *, backwards: bool = False) -> None:
    """Runs launches of AMD's kernels one after another, on the CPU memory of the tensors."""
    for launch in launches:
        if launch.kernel.startswith("asm-"):
            assembly_kernels.run(target, launch.kernel, launch.grid, launch.argument, ranges(tensors))
            continue
        program, threads = _composable(target, launch.kernel)
        if packets.running():
            loaded = _through_hip(target, launch.kernel)
            loaded.launch(launch.grid, (launch.argument,), ranges(tensors), backwards=backwards)
        else:
            machine.launch(program, launch.grid, threads, launch.argument, ranges(tensors), backwards=backwards)


def _instance(name: str) -> ck_instances.Instance:
    (instance,) = (entry for _, unit in ck_instances.units(name) for entry in unit if entry.name == name)
    return instance


@cache
def _through_hip(target: str, name: str) -> through_hip.Kernel:
    """A kernel of Composable Kernel, compiled as for a wheel."""
    image, entries = ck_compiler.compile_unit(target, name, [_instance(name)], cache=CACHE, toolchain="pypi")
    return through_hip.Kernel(name, image, entries[name], _composable(target, name)[0])


@cache
def _composable(target: str, name: str) -> tuple[machine.Program, int]:
    """Returns a kernel of Composable Kernel and the number of threads of its blocks."""
    text, threads = composable(target, name)
    return machine.Program(assembly.parse(text)), threads


_ROUNDING = "-DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT="


def composable(target: str, name: str, rounding: int | None = None) -> tuple[str, int]:
    """The assembly of a kernel of Composable Kernel and the threads of its blocks; cached on disk.

    rounding: the value of CK's macro for rounding to bf16 (default: the mode of the wheels). Raises
    CompileFailed.
    """
    instance = _instance(name)
    defines: tuple[str, ...] = ck_compiler.DEFINES
    if rounding is not None:
        defines = tuple(f"{_ROUNDING}{rounding}" if define.startswith(_ROUNDING) else define for define in defines)
    made_of = (
        ck_compiler.source([instance]),
        ck_compiler.FLAGS + defines,
        sources.digest(*ck_compiler.SOURCES),
        ck_sources.load().key,
    )

    def translated() -> str:
        with (
            tempfile.TemporaryDirectory(prefix="ck-") as directory,
            mock.patch.object(ck_compiler, "DEFINES", defines),
        ):
            return ck_compiler.translate(target, name, [instance], Path(directory), cache=CACHE, toolchain="pypi")

    text = _kept(f"{target}-{name}", repr(made_of), translated)
    threads = re.search(r"\.max_flat_workgroup_size:\s+(\d+)", text)
    if threads is None:
        raise ValueError(f"the assembly of {name} does not say how many threads a block has")
    return text, int(threads[1])
