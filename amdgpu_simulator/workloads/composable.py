"""Composable Kernel's forward, with any of its roundings to bf16, and the main kernel of its backward."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from flash_attn import flash_attn_func
from flash_attn.attention.backends import recording
from flash_attn.core import ck_planner
from flash_attn.core.ck_planner import Launch
from flash_attn.core.device import Tensors
from flash_attn.core.store import Store

from amdgpu_simulator import gpu
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.isa import assembly, disassembly, machine
from amdgpu_simulator.workloads import Workload, every_tile
from rocm_wheels.compile.ck import planner

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NAME = re.compile(
    r"(?:(?P<op>fwd)|dqdkdv)-(?P<dtype>fp16|bf16)-d(?P<dim>\d+)-batch"
    r"(?P<options>(?(op)(?:-mask(?:-softcap|(?:-alibi)?(?:-dropout)?))?|(?:-alibi)?(?:-dropout)?))$"
)
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
    """A kernel by its name, fwd-bf16-d64-batch-mask-alibi or dqdkdv-bf16-d64-batch-dropout. A masked kernel is measured
    with a causal mask.

    rounding: a value of CK_TILE_FLOAT_TO_BFLOAT16_DEFAULT (default: the value of the wheels). Raises ValueError for
    another name, CompileFailed for a kernel that does not compile.
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
            "reserved_vgprs": kernel.descriptor["next_free_vgpr"],
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
    kernel = disassembly.kernel(store.image(name), entry["symbol"], target=store.target)
    return _workload(store.target, name, kernel, entry)


class _Parsed(NamedTuple):
    is_forward: bool
    dtype: torch.dtype
    head_dim: int
    options: list[str]


def _parse(name: str) -> _Parsed:
    match = _NAME.match(name)
    if match is None:
        raise ValueError(
            f"{name}: of Composable Kernel, only the forward and backward of batches can be measured, such as "
            "fwd-bf16-d64-batch-mask, dqdkdv-bf16-d64-batch"
        )
    return _Parsed(bool(match["op"]), _DTYPES[match["dtype"]], int(match["dim"]), match["options"].split("-")[1:])


def _workload(target: str, name: str, kernel: assembly.Kernel, entry: dict[str, Any]) -> Workload:
    is_forward, dtype, head_dim, options = _parse(name)

    def run(length: int) -> Record:
        record = Record(kernel)
        program = machine.Program(kernel, record)

        def launched(launches: Sequence[Launch], tensors: Tensors) -> None:
            """Runs the kernel. The results of the other kernels of a backward do not affect its cycles."""
            for launch in launches:
                if launch.kernel == name:
                    machine.launch(program, launch.grid, entry["threads"], launch.argument, gpu.ranges(tensors))

        rows_q, rows_k = (_ROWS, length) if is_forward else (length, _ROWS)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, rows, 1, head_dim, generator=generator).to(dtype).requires_grad_(not is_forward)
            for rows in (rows_q, rows_k, rows_k)
        )
        with _planner(), recording.record(target, alone=True, run=launched):
            out = flash_attn_func(
                q, k, v, causal="mask" in options, softcap=30.0 * ("softcap" in options),
                dropout_p=0.1 * ("dropout" in options), alibi_slopes=torch.ones(1) if "alibi" in options else None,
            )  # fmt: skip
            assert isinstance(out, torch.Tensor)
            if not is_forward:
                torch.autograd.backward(out, torch.ones_like(out))
        if not record.groups:
            raise ValueError(f"{name} was requested for {target}, but the call launches another kernel")
        return record

    return Workload(
        target=target, rows=_ROWS, entry=entry, run=run, programs=every_tile(_ROWS),
        operations=(4 if is_forward else 10) * head_dim,
    )  # fmt: skip
