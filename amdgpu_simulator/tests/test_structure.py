"""The core of the simulator (instructions, cycles, AMD's runtime) installs alone and imports nothing above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from amdgpu_simulator.tests.test_isa import KERNEL

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent
CORE = ("isa", "clock", "hip")
SHIPPED = ("__init__", "__main__", "coverage", "debian", "thread_trace", "traces")


def _names(paths: list[Path]) -> dict[str, Path]:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


MODULES = _names([path for path in PACKAGE.rglob("*.py") if "tests" not in path.parts])
CORE_MODULES = _names([path for folder in CORE for path in (PACKAGE / folder).glob("*.py")])
SHIPPED_MODULES = {**CORE_MODULES, **_names([PACKAGE / f"{name}.py" for name in SHIPPED])}


def _imports(path: Path, *, functions: bool = True) -> set[str]:
    """The modules that a file imports, also for types alone. functions: whether imports in functions count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if functions else (node for part in tree.body for node in _outside_functions(part))
    result = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            result |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return result


def _outside_functions(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    return [node, *(inner for child in ast.iter_child_nodes(node) for inner in _outside_functions(child))]


def test_the_core_imports_only_the_core() -> None:
    allowed = {*CORE_MODULES, "amdgpu_simulator", "amdgpu_simulator.debian"}
    for name, path in CORE_MODULES.items():
        imports = _imports(path)
        assert not {module for module in imports if module.split(".")[0] in ("flash_attn", "rocm_wheels")}, name
        assert imports & set(MODULES) <= allowed, name


def test_the_installed_modules_import_only_each_other() -> None:
    """An import in a function is allowed: it belongs to a command that needs a checkout."""
    for name, path in SHIPPED_MODULES.items():
        imports = _imports(path, functions=False)
        assert not {module for module in imports if module.split(".")[0] in ("flash_attn", "rocm_wheels")}, name
        assert imports & set(MODULES) <= set(SHIPPED_MODULES), name


def test_no_import_circles() -> None:
    """Imports in functions and for types count."""
    packages = {name for name, path in MODULES.items() if path.stem == "__init__"}
    graph = {name: _imports(path) & (set(MODULES) - packages) - {name} for name, path in MODULES.items()}
    while free := {name for name, imports in graph.items() if not imports & set(graph)}:
        graph = {name: imports for name, imports in graph.items() if name not in free}
    assert not graph, f"these modules import each other: {sorted(graph)}"


def test_no_module_of_the_core_guesses_from_the_name_of_a_target() -> None:
    for name, path in CORE_MODULES.items():
        if name != "amdgpu_simulator.isa.targets":
            assert 'startswith("gfx' not in path.read_text(encoding="utf-8"), name


def test_the_simulator_installs_alone(tmp_path: Path) -> None:
    """The package has its core and its command; a command that needs a checkout prints a remedy."""
    site, text = tmp_path / "site", tmp_path / "kernel.s"
    text.write_text(KERNEL.format(target="gfx942", code="\tv_mov_b32_e32 v9, 1"), encoding="utf-8")
    install = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--no-build-isolation", "--offline"]
    subprocess.run([*install, "--target", str(site), str(PACKAGE)], check=True)
    assert {path.stem for path in (site / "amdgpu_simulator").iterdir()} - {"__pycache__"} == {*CORE, *SHIPPED}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        start = f"import sys; sys.path.insert(0, {str(site)!r}); from amdgpu_simulator.__main__ import main; main()"
        command = [sys.executable, "-I", "-c", start, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    coverage, cycles = run("coverage", "kernel.s"), run("cycles", "gfx942", "fwd-bf16-d64")
    assert coverage.returncode == 0, coverage.stderr
    assert "v_mov_b32 " in coverage.stdout
    assert cycles.returncode == 1
    assert "there is no module amdgpu_simulator.commands: run the command in a checkout" in cycles.stderr


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    """Runs the README's Triton kernel as a script of its own."""
    readme = (PACKAGE / "README.md").read_text(encoding="utf-8")
    script = tmp_path / "example.py"
    script.write_text(readme.split("```python\n")[1].split("```")[0], encoding="utf-8")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cycles of one work group: ")
