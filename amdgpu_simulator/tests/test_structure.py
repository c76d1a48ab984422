"""The core, which knows instructions, time and AMD's runtime, stands below what knows flash_attn."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
CORE = ("isa", "clock", "hip")
MODULES = {
    f"amdgpu_simulator.{folder}.{path.stem}": path
    for folder in CORE
    for path in sorted((PACKAGE / folder).glob("*.py"))
    if path.stem != "__init__"
}
# The rule of GFX11's dual instructions is one table, which the compile stage and the simulator share.
SHARED = {"amdgpu_simulator.isa.decoding": {"flash_attn.kernels.vopd"}}


def _imports(path: Path) -> set[str]:
    """The modules that a file imports, also inside functions and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_core_imports_nothing_above_it() -> None:
    above = {f"amdgpu_simulator.{path.stem}" for path in PACKAGE.glob("*.py")} - {"amdgpu_simulator.debian"}
    for name, path in MODULES.items():
        imports = _imports(path)
        foreign = {one for one in imports if one.split(".")[0] in ("flash_attn", "rocm_wheels")}
        assert {one for one in foreign if not one.endswith(".kernels")} == SHARED.get(name, set()), name
        assert not imports & (above | {"amdgpu_simulator.workloads"}), name


def test_no_module_of_the_core_guesses_from_the_name_of_a_target() -> None:
    for name, path in MODULES.items():
        if name != "amdgpu_simulator.isa.targets":
            assert 'startswith("gfx' not in path.read_text(encoding="utf-8"), name
