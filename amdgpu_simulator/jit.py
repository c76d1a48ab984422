"""Triton's JIT for a simulated AMD GPU: the simulator runs the kernels that the JIT compiles and launches.

On a user's GPU, the JIT of the installed Triton compiles kernels that a wheel lacks. `pytest --gfx TARGET --jit`
selects it, because a process either compiles kernels or interprets them.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from flash_attn.core import device
from flash_attn.core.jit import JitKernel, triton_version
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.variants import Variant
from triton.backends.compiler import GPUTarget

from amdgpu_simulator.hip import packets
from amdgpu_simulator.isa import assembly, machine, targets

_FORMS = {"i32": "<i", "i64": "<q", "fp32": "<f"}


class Kernel(JitKernel):
    """The kernel of `core.jit`, on CPU tensors."""

    def __init__(self, variant: Variant, target: str, config: Config | None, launched: list[str]) -> None:
        super().__init__(variant, target, config)
        self._launched = launched

    def launch(self, grid: device.Grid, tensors: device.Tensors, numbers: Sequence[int | float]) -> None:
        self._launched.append(self.variant.name)
        super().launch(grid, tensors, numbers)


class _Driver:
    """Triton's driver interface: one GPU of the target, and no stream."""

    def __init__(
        self, target: str, directory: Path, program: Callable[[assembly.Kernel], machine.Program], backwards: bool
    ) -> None:
        self._target = target
        self._backwards = backwards
        self._directory = directory
        self._program = cache(lambda text: program(assembly.parse(text)))
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self._target, self._wave)

    @property
    def _wave(self) -> int:
        return targets.get(self._target).wave

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 16}

    def load_binary(self, name: str, image: bytes, _shared: int, _device: int) -> tuple[Any, ...]:
        """Returns a module, the function, its registers and spills; from Triton 3.4 on also the maximum number of
        threads.
        """
        made = next(path for path in self._directory.glob(f"*/{name}.hsaco") if path.read_bytes() == image)
        program = self._program(made.with_suffix(".amdgcn").read_text(encoding="utf-8"))
        return None, program, 0, 0, *[1024][: triton_version() >= (3, 4)]

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return partial(self._launch, source, metadata)

    def _launch(self, source: Any, metadata: Any, *values: Any) -> None:
        x, y, z, _stream, program, _packed, _metadata, _enter, _exit, *arguments = values
        content, ranges = bytearray(program.kernel.descriptor["kernarg_size"]), []
        places = iter(program.kernel.arguments)
        for (name, type_), value in zip(source.signature.items(), arguments, strict=True):
            if type_ == "constexpr" or name in source.constants:  # a constant in the compiled code
                continue
            offset, _, _ = next(places)
            if type_.startswith("*"):
                struct.pack_into("<Q", content, offset, value.data_ptr())
                ranges.append((value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()))
            else:
                struct.pack_into(_FORMS[type_], content, offset, value)
        threads = metadata.num_warps * self._wave
        machine.launch(
            program, (x, y, z), threads, bytes(content), ranges, shared=metadata.shared, backwards=self._backwards
        )


@contextmanager
def active(target: str, program: Callable[[assembly.Kernel], machine.Program], backwards: bool) -> Iterator[None]:
    """Lets Triton compile for the target and launch on the simulator. program, backwards: see `gpu.pretend`."""
    if packets.running():
        raise ValueError(
            "kernels of Triton's JIT cannot be launched through AMD's runtime: leave out --jit or hip/process.py"
        )
    with (
        tempfile.TemporaryDirectory(prefix="jit-") as directory,
        mock.patch.dict("os.environ", TRITON_CACHE_DIR=directory),
    ):
        triton.runtime.driver.set_active(_Driver(target, Path(directory), program, backwards))
        yield
