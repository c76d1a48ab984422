"""Which tile each score modifier takes, as a table: the launch configurations of an operation on a GPU target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rocm_wheels.compile import sources
from rocm_wheels.errors import DataError


def table(target: str, operation: str, size: str) -> Iterator[str]:
    """A line for each element type and score modifier. size: d128, as in the names of kernels. Raises DataError for an
    unknown target or operation, and for a size that the operation lacks."""
    targets, operations = (sources.module(name) for name in ("kernels.targets", "kernels.operations"))
    if target not in targets.TARGETS:
        raise DataError(f"unknown GPU target {target}", remedy=f"choose one of {', '.join(targets.TARGETS)}")
    if operation not in operations.OPERATIONS:
        raise DataError(f"unknown operation {operation}", remedy=f"choose one of {', '.join(operations.OPERATIONS)}")
    variants = [variant for variant in sources.module("kernels.variants").table(target) if variant.op == operation]
    sizes = {f"d{variant.block_d}": None for variant in variants}
    if size not in sizes:
        remedy = f"choose one of {', '.join(sizes)}" if sizes else "choose another GPU target"
        raise DataError(f"{operation} on {target} has no size {size}", remedy=remedy)
    yield f"{'type':9}{'modifier':10}{'rows x keys':>11}  block_k  warps  stages  compiler options"
    for variant in variants:
        if f"d{variant.block_d}" == size:
            yield _line(variant, sources.module("kernels.tuning").config(target, variant))


def _line(variant: Any, config: Any) -> str:
    options = ", ".join(f"{name}={value}" for name, value in config.options) or "-"
    tile, block_k = f"{config.block_m} x {config.block_n}", config.block_k or "-"
    numbers = f"{tile:>11}  {block_k:>7}  {config.num_warps:>5}  {config.num_stages:>6}"
    return f"{variant.dtype:9}{variant.kind:10}{numbers}  {options}"
