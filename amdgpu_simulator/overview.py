"""Simulated cycles and matrix utilisation of every kernel provider on a target, and the provider that flash_attn
chooses.

An entry is "cycles (utilisation in %)" for 128 queries and 128 keys (see `measure`), forward and backward without a
mask. A backward of this project is two kernels, whose cycles are added. Of AMD's backwards only the main kernel counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flash_attn.attention.backends import choice
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
# Composable Kernel has no backward for head dim 192: the kernel for 256 serves it.
_CK_BACKWARD_DIMS = {192: 256}
_COMPUTE_UNITS = 304


def kernels(target: str, source: str, op: str, dtype: str, head_dim: int) -> tuple[str, ...]:
    """The kernels of a provider for a call; empty if the provider does not support the call."""
    if source == TRITON:
        return tuple(f"{name}-{dtype}-d{head_dim}" for name in (("fwd",) if op == "fwd" else ("bwd-dq", "bwd-dkdv")))
    if source == ASM:
        kernel = assembly_table.find(target, op, dtype, head_dim, PLAIN, False, _COMPUTE_UNITS)
        return () if kernel is None else (kernel.name,)
    if not has_kernels(versions.load(), target, "ck"):
        return ()
    if op == "bwd":
        return (f"dqdkdv-{dtype}-d{_CK_BACKWARD_DIMS.get(head_dim, head_dim)}-batch",)
    return (f"fwd-{dtype}-d{head_dim}-batch",)


def taken(target: str, source: str, name: str) -> Taken:
    """The cycles and resources of one kernel. Raises CompileFailed if it does not compile."""
    if source == ASM:
        return measure(assembly.workload(target, name))
    if source == CK:
        return measure(composable.workload(target, name))
    variant = triton.parse_kernel(name)
    return measure(triton.workload(target, variant, triton.tiles(target, variant)[0]))


def table(target: str, dims: Sequence[int] = DIMS, dtypes: Sequence[str] = DTYPES) -> Iterator[str]:
    """Yields the lines of a Markdown table when they are measured."""
    yield f"| {target} | assembly | Composable Kernel | Triton | calls take |"
    yield "|-|-|-|-|-|"
    for op in OPS:
        for head_dim in dims:
            for dtype in dtypes:
                cells = {}
                for source in (ASM, CK, TRITON):
                    names = kernels(target, source, op, dtype, head_dim)
                    cells[source] = _cell([taken(target, source, name) for name in names])
                sources = choice.find(target, op, dtype, head_dim, PLAIN, _TOKENS).sources
                first = next(source for source in sources if cells[source])
                yield f"| {op} {dtype} d{head_dim} | {cells[ASM]} | {cells[CK]} | {cells[TRITON]} | {first} |"


def _cell(parts: Sequence[Taken]) -> str:
    """The sum of cycles of consecutive kernels, and their utilisation."""
    cycles, matrix = sum(part.cycles for part in parts), sum(part.matrix for part in parts)
    return f"{cycles:.0f} ({100 * matrix / cycles:.0f})" if parts else ""
