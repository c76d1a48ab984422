"""A stage of rocm_wheels imports only the stages before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "rocm_wheels"
ORDER = ("common", "matrix", "compile", "wheel", "publish", "cli")
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def stage(module: tuple[str, ...]) -> int:
    """Position of a module's stage; modules at the top of the package are common to all stages."""
    if module[:1] == ("__main__",):
        return ORDER.index("cli")
    return ORDER.index(module[0]) if module and module[0] in ORDER else 0


def imported(source: str) -> Iterator[tuple[str, ...]]:
    """The modules of rocm_wheels that a source imports, also inside functions, without "rocm_wheels"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            result = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            result = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (tuple(name.split(".")[1:]) for name in result if name.partition(".")[0] == "rocm_wheels")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_stage_imports_only_earlier_stages(path: Path) -> None:
    own = stage(path.with_suffix("").parts)
    source = (PACKAGE / path).read_text(encoding="utf-8")
    below = {".".join(module) for module in imported(source) if stage(module) > own}
    assert not below, f"{path} imports what stands below it: {', '.join(sorted(below))}"


def test_the_rule_sees_an_import_inside_a_function() -> None:
    source = "def f():\n    from rocm_wheels.wheel import verify\n    import rocm_wheels.cli\n"
    assert list(imported(source)) == [("wheel", "verify"), ("cli",)]
    assert stage(("wheel", "verify")) > stage(("matrix", "plan")) > stage(("errors", "DataError")) == 0
