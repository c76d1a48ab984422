"""Composable Kernel's forward, with any of its roundings to bf16."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from flash_attn import flash_attn_func
from flash_attn.backends import recording
from flash_attn.runtime import ck_planner
from flash_attn.runtime.ck_planner import Launch
from flash_attn.runtime.device import Tensors
from flash_attn.runtime.store import Store

from amdgpu_simulator import gpu
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.isa import assembly, disassembly, machine
from amdgpu_simulator.workloads import Workload, every_tile
from rocm_wheels.compile.ck import planner

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NAME = re.compile(r"fwd-(fp16|bf16)-d(\d+)-batch(-mask)?$")
_ROWS = 128


@contextmanager
def _planner() -> Iterator[None]:
    """The planner of launches, built from these sources."""
    with tempfile.TemporaryDirectory(prefix="planner-") as directory:
        path = planner.build(Path(directory), cache=gpu.CACHE)
        with mock.patch.object(ck_planner, "PATH", path):
            ck_planner.library.cache_clear()
            yield
    ck_planner.library.cache_clear()


def workload(target: str, name: str, *, rounding: int | None = None) -> Workload:
    """A kernel by its name, fwd-bf16-d64-batch. A masked one is measured with a causal mask.

    rounding: how it rounds to bf16, as CK_TILE_FLOAT_TO_BFLOAT16_DEFAULT counts them; by default as wheels have it.
    Raises ValueError for another name, CompileFailed for a kernel that does not compile.
    """
    _parse(name)
    text, threads = gpu.composable(target, name, rounding)
    kernel = assembly.parse(text)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    entry = {
        "threads": threads,
        "shared": 0,
        "resources": {
            "vgprs": kernel.descriptor["next_free_vgpr"],
            "vgpr_spills": int(spills[1]) if spills else 0,
            "lds": kernel.descriptor["group_segment_fixed_size"],
        },
    }

    return _workload(target, name, kernel, entry)


def stored(store: Store, name: str) -> Workload:
    """A kernel of a kernel store. Raises as `workload`, KernelError, `debian.UnavailableError`."""
    _parse(name)
    if name not in store.kernels:
        raise ValueError(f"{store.path} has no kernel {name}; see `rocm_wheels inspect`")
    entry = store.kernels[name]
    return _workload(store.target, name, disassembly.kernel(store.image(name), entry["symbol"]), entry)


def _parse(name: str) -> tuple[torch.dtype, int, bool]:
    """The type, the head dim and whether it has a mask."""
    if (found := _NAME.match(name)) is None:
        raise ValueError(f"{name}: of Composable Kernel, want a forward of batches such as fwd-bf16-d64-batch-mask")
    return _DTYPES[found[1]], int(found[2]), found[3] is not None


def _workload(target: str, name: str, kernel: assembly.Kernel, entry: dict[str, Any]) -> Workload:
    dtype, head_dim, causal = _parse(name)

    def run(length: int) -> Record:
        record = Record(kernel)
        program = machine.Program(kernel, record)

        def launched(launches: Sequence[Launch], tensors: Tensors) -> None:
            (one,) = launches
            if one.kernel != name:
                raise ValueError(f"{name} was to run on {target}, {one.kernel} is what a call takes")
            machine.launch(program, one.grid, entry["threads"], one.argument, gpu.ranges(tensors))

        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, rows, 1, head_dim, generator=generator).to(dtype) for rows in (_ROWS, length, length))
        with _planner(), recording.record(target, run=launched), torch.no_grad():
            flash_attn_func(q, k, v, causal=causal)
        return record

    return Workload(
        target=target, rows=_ROWS, entry=entry, run=run, programs=every_tile(_ROWS), operations=4 * head_dim
    )
