"""Compares stand-ins of a program's classes with its sources: names, signatures, fields, defaults and bases.

`python flash_attn_src/tests/clients/stand_ins.py vllm DIRECTORY` compares vllm_stand_in.py with the sources of vLLM in
a directory that has vllm/.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def differences(stand_in: ModuleType, directory: Path) -> list[str]:
    """Where a module of stand-ins and a program's sources in a directory differ.

    stand_in has MODULES, which maps each module to the classes and functions that stand for the module's own, and
    UNCOMPARED, the classes whose bases and the methods whose parameters differ on purpose.
    """
    own = _parts(ast.parse(Path(str(stand_in.__file__)).read_text(encoding="utf-8")))
    result = []
    for module, things in stand_in.MODULES.items():
        theirs = _parts(ast.parse((directory / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")))
        for thing in things:
            for name, mine in own.items():
                if name.partition(".")[0] != thing.__name__:
                    continue
                expected = theirs.get(name, "nothing of that name")
                if isinstance(mine, list) and name in stand_in.UNCOMPARED:
                    continue
                if "." not in name and isinstance(thing, type):
                    expected = [base for base in expected if base in mine] if isinstance(expected, list) else expected
                if mine != expected:
                    result.append(f"{module}: {name} is {mine} here, {expected} there")
    return result


def _parts(tree: ast.Module) -> dict[str, Any]:
    """What a module defines: parameters of functions, methods as Class.method, and fields as Class.field."""
    result: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            result[node.name] = _parameters(node)
        if not isinstance(node, ast.ClassDef):
            continue
        result[node.name] = [_base(base) for base in node.bases]
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef):
                result[f"{node.name}.{inner.name}"] = _parameters(inner)
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                result[f"{node.name}.{inner.target.id}"] = inner.value and ast.unparse(inner.value)
            elif isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                result[f"{node.name}.{inner.targets[0].id}"] = ast.unparse(inner.value)
    return result


def _parameters(node: ast.FunctionDef) -> list[str]:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    defaults = [ast.unparse(x) for x in node.args.defaults]
    return [each.arg for each in every] + defaults


def _base(node: ast.expr) -> str:
    return ast.unparse(node.value if isinstance(node, ast.Subscript) else node)


if __name__ == "__main__":
    lines = differences(importlib.import_module(f"{sys.argv[1]}_stand_in"), Path(sys.argv[2]))
    print("\n".join(lines) or f"the stand-ins are as in {sys.argv[2]}")
    sys.exit(bool(lines))
