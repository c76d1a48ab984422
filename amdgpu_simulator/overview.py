"""Cycles and matrix utilisation of every source of kernels on a target, and the source that calls take.

A cell is "cycles (utilisation in %)" for 128 queries and 128 keys; `measure` says what that is. Forward and backward
without a mask. A backward of this project is two kernels, whose cycles are added. Of a backward by AMD only the main
kernel counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flash_attn.backends import choice
from flash_attn.kernels import assembly as assembly_table
from flash_attn.kernels.assembly import PLAIN
from flash_attn.kernels.providers import ASM, CK, TRITON

from amdgpu_simulator.measure import Taken, measure
from amdgpu_simulator.workloads import assembly, composable, triton
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.targets import has_kernels

DIMS = (64, 128, 192, 256)
DTYPES = ("bf16", "fp16")
OPS = ("fwd", "bwd")
_TOKENS = 4096
# Composable Kernel's backward has no kernel of head dim 192: the one of 256 serves it.
_CK_BACKWARD_DIMS = {192: 256}
_COMPUTE_UNITS = 304


def kernels(target: str, source: str, op: str, dtype: str, head_dim: int) -> tuple[str, ...]:
    """The kernels of a source that a call takes; none where the source cannot serve it."""
    if source == TRITON:
        return tuple(f"{name}-{dtype}-d{head_dim}" for name in (("fwd",) if op == "fwd" else ("bwd-dq", "bwd-dkdv")))
    if source == ASM:
        found = assembly_table.find(target, op, dtype, head_dim, PLAIN, False, _COMPUTE_UNITS)
        return () if found is None else (found.name,)
    if not has_kernels(versions.load(), target, "ck"):
        return ()
    if op == "bwd":
        return (f"dqdkdv-{dtype}-d{_CK_BACKWARD_DIMS.get(head_dim, head_dim)}-batch",)
    return (f"fwd-{dtype}-d{head_dim}-batch",)


def taken(target: str, source: str, name: str) -> Taken:
    """What one kernel takes. Raises CompileFailed."""
    if source == ASM:
        return measure(assembly.workload(target, name))
    if source == CK:
        return measure(composable.workload(target, name))
    variant = triton.parse_kernel(name)
    return measure(triton.workload(target, variant, triton.tiles(target, variant)[0]))


def table(target: str, dims: Sequence[int] = DIMS, dtypes: Sequence[str] = DTYPES) -> Iterator[str]:
    """The lines of a table in Markdown, as they are measured."""
    yield f"| {target} | assembly | Composable Kernel | Triton | calls take |"
    yield "|-|-|-|-|-|"
    for op in OPS:
        for head_dim in dims:
            for dtype in dtypes:
                cells = {}
                for source in (ASM, CK, TRITON):
                    names = kernels(target, source, op, dtype, head_dim)
                    cells[source] = _cell([taken(target, source, name) for name in names])
                wanted = choice.find(target, op, dtype, head_dim, PLAIN, _TOKENS).sources
                first = next(source for source in wanted if cells[source])
                yield f"| {op} {dtype} d{head_dim} | {cells[ASM]} | {cells[CK]} | {cells[TRITON]} | {first} |"


def _cell(parts: Sequence[Taken]) -> str:
    """Cycles of kernels that run one after another, and the part of them in which the matrix units are busy."""
    cycles, matrix = sum(part.cycles for part in parts), sum(part.matrix for part in parts)
    return f"{cycles:.0f} ({100 * matrix / cycles:.0f})" if parts else ""
