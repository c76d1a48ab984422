"""The run-time arguments of the kernels, by name: read from the kernels' sources. Standard library only.

A parameter without an annotation is a run-time argument. Pointers come before numbers.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from flash_attn.kernels import targets
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.variants import Variant, table


@cache
def parameters(module: str, function: str) -> tuple[str, ...]:
    """The run-time arguments of a kernel function, in order. Raises LookupError for an unknown function."""
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return tuple(argument.arg for argument in node.args.args if argument.annotation is None)
    raise LookupError(f"kernels/{module}.py has no function {function}")


def names(variant: Variant, target: str) -> tuple[str, ...]:
    """The run-time arguments of a variant's kernel on a target, in order."""
    row = variant.operation
    absent = row.absent(variant.kind, variant.dtype, targets.get(target))
    return tuple(name for name in parameters(row.module, row.function) if name not in absent)


@cache
def vocabulary() -> frozenset[str]:
    """Every name that a run-time argument of some kernel has."""
    return frozenset(name for row in OPERATIONS.values() for name in parameters(row.module, row.function))


def signatures(target: str) -> list[str]:
    """The signatures of all kernels of a target, each the names of the arguments separated by spaces."""
    return sorted({" ".join(names(variant, target)) for variant in table(target)})
