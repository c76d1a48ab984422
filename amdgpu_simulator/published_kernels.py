"""Runs the kernels of published.toml on the simulator: their arguments, and what a work group executes."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from amdgpu_simulator import measure
from amdgpu_simulator.clock.record import Executed, Record
from amdgpu_simulator.isa import assembly, machine
from amdgpu_simulator.isa.assembly import Array

_SLACK = 1 << 25  # bytes that a kernel may read beyond a tensor; sgemm kernel 8 has the offsets of N = 4096


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a work group executed. resident: work groups that share its units. units: 1 in CU mode, else None."""

    group: list[list[Executed]]
    resident: int
    units: int | None

    def steady(self, target: str) -> float:
        return measure.steady(self.group, self.resident, target, units=self.units)


def run(row: dict[str, Any], directory: Path, length: int) -> Run:
    """Runs one work group of a kernel with so many keys, or instructions of a loop.

    Raises FileNotFoundError without its text, and ValueError if its result is wrong.
    """
    text = _loop(row, length) if "instruction" in row else _text(row, directory, length)
    kernel = assembly.parse(text)
    record = Record(kernel)
    program = machine.Program(kernel, record, ignore_hazards=True)
    threads = row.get("threads") or int(_resource(text, "max_flat_workgroup_size"))
    tensors = _tensors(row, length)
    content = _arguments(row, length, tensors)
    ranges = [(array.ctypes.data - _SLACK, array.nbytes + 2 * _SLACK) for array in tensors.values()]
    shared = row.get("shared", 0)
    machine.launch(program, (1, 1, 1), threads, content, ranges, shared=shared, in_step=row["family"] == "sgemm")
    _check(row, tensors)
    units = 1 if kernel.descriptor.get("workgroup_processor_mode") == 0 else None
    static = int(kernel.descriptor.get("group_segment_fixed_size", 0))
    entry = {
        "threads": threads,
        "shared": shared,
        "resources": {"reserved_vgprs": kernel.descriptor["next_free_vgpr"], "lds": static},
    }
    resident = measure.resident(row["target"], entry, units)
    return Run(group=record.groups[0], resident=resident, units=units)


def _text(row: dict[str, Any], directory: Path, length: int) -> str:
    return (directory / str(row["file"]).format(keys=length)).read_text(encoding="utf-8")


def _resource(text: str, name: str) -> str:
    match = re.search(rf"\.{name}:\s+(\d+)", text)
    if match is None:
        raise ValueError(f"an assembly text has no .{name}: compile the source to assembly with metadata")
    return str(match[1])


def _tensors(row: dict[str, Any], length: int) -> dict[str, Array]:
    """The tensors of a work group by name. Numbers are small, so that products are finite."""
    random = np.random.default_rng(0)
    if "instruction" in row:
        return {}
    if row["family"] == "sgemm":
        return {name: _aligned(random.standard_normal((length, length)).astype(np.float32)) for name in "abc"}
    shape = (length, row.get("stride", 1), row["head_dim"])
    tensors = {name: _aligned(_to_bf16(random.standard_normal(shape) / 2)) for name in "qkv"}
    if row.get("transposed"):
        tensors["v"] = _aligned(np.ascontiguousarray(tensors["v"].reshape(length, -1).T))
    return {**tensors, "o": _aligned(np.zeros(shape, np.uint16)), "lse": _aligned(np.zeros(shape[:2], np.float32))}


def _arguments(row: dict[str, Any], length: int, tensors: dict[str, Array]) -> bytes:
    """The bytes of the arguments: addresses, integers and fp32 numbers, aligned as in C."""
    if "instruction" in row:
        return bytes(8)
    head_dim = row.get("head_dim", 1)
    line = row.get("stride", 1) * head_dim
    numbers = {"n": length, "head_dim": head_dim, "scale": head_dim**-0.5, "row": line, "size": length * line}
    form, values = "@", []
    for name in row["arguments"]:
        value = tensors[name].ctypes.data if name in tensors else numbers.get(name, name)
        form += "Q" if name in tensors else "f" if isinstance(value, float) else "i"
        values.append(value)
    return struct.pack(form, *values) + bytes(8)


def _check(row: dict[str, Any], tensors: dict[str, Array]) -> None:
    """Raises ValueError if the first rows of an attention are wrong: then its arguments are not those of the kernel."""
    if "o" not in tensors:
        return
    q, k, v, o = (_from_bf16(tensors[name]) for name in ("q", "k", "v", "o"))
    if row.get("transposed"):
        v = v.T[:, None]
    scores = np.exp(q[: row["rows"], 0] @ k[:, 0].T * row["head_dim"] ** -0.5)
    expected = scores / scores.sum(axis=1, keepdims=True) @ v[:, 0]
    if not np.abs(o[: row["rows"], 0] - expected).max() < 0.01:
        raise ValueError(f"{row['name']}: the result of its text is wrong: is it the kernel that published.toml means?")


def _aligned(content: Array) -> Array:
    """A copy at an address that is a multiple of 4096, with slack before and after it."""
    room = np.zeros(content.nbytes + 2 * _SLACK + 4096, np.uint8)
    first = _SLACK + -(room.ctypes.data + _SLACK) % 4096
    copy = room[first : first + content.nbytes].view(content.dtype).reshape(content.shape)
    copy[...] = content
    return copy


def _to_bf16(numbers: Array) -> Array:
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _from_bf16(words: Array) -> Array:
    return (words.astype(np.uint32) << 16).view(np.float32)


_LOOP = """
\t.amdgcn_target "amdgcn-amd-amdhsa--{target}"
kernel:

{code}
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel kernel
\t\t.amdhsa_kernarg_size 8
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_next_free_vgpr 96
\t\t.amdhsa_next_free_sgpr 32
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t.end_amdhsa_kernel
    .max_flat_workgroup_size: 128
    .vgpr_count: 96
"""


def _loop(row: dict[str, Any], length: int) -> str:
    """A kernel that executes an instruction so many times, with eight destinations in turn."""
    name = row["instruction"]
    lines = []
    for index in range(length):
        first = 16 + 8 * (index % 8)
        result = f"v[{first}:{first + 7}]"
        operands = f"{result}, v[1:4], v[6:9], {result}" if "wmma" in name else f"v{first}, v1"
        lines.append(f"\t{name} {operands}")
    return _LOOP.format(target=row["target"], code="\n".join(lines))
