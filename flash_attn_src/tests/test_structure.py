"""The structure of the package: which module imports which, and how many parameters a private function has."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import flash_attn
import pytest
from flash_attn.moved import MOVED

PACKAGE = Path(__file__).resolve().parent.parent / "flash_attn"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module imports modules of its own layer and of those above it. A folder's name alone stands for its other modules.
# The last layer is the rest: the public functions, the interfaces, the layers, the diagnosis.
LAYERS = (
    ("kernels", "_launcher"),
    ("core",),
    ("call.block_mask", "call.mask", "call.options", "call.calls", "call.memory"),
    ("call.arguments",),
    ("call",),
    ("attention.backends",),
    ("attention.second_derivative", "attention.dmask"),
    ("attention.operators",),
    ("attention",),
)

MOST_PARAMETERS = 12
# The functions that may have more, by file: their signatures are upstream's, or the schemas of custom ops.
LONG_SIGNATURES = {
    "cute/interface.py": {"flash_attn_func", "flash_attn_varlen_func"},
    "interfaces/fa3/backward.py": {"_flash_attn_backward"},
    "interfaces/fa3/split_kv.py": {"get_scheduler_metadata"},
    "interfaces/fa4/private.py": {"_flash_attn_bwd", "_flash_attn_fwd"},
    "flash_attn_interface.py": {
        "flash_attn_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache",
    },
    "fp8.py": {"flash_attn_fp8_func", "flash_attn_varlen_fp8_func"},
    "modules/block.py": {"__init__"},
    "modules/mha.py": {"__init__"},
    "ranges.py": {"flash_attn_ranges_func"},
    "sdpa/aten.py": {"_backward", "_sdpa_backward"},
    "ops/fused_dense.py": {"__init__"},
    "ops/triton/layer_norm.py": {"layer_norm_fn", "rms_norm_fn"},
}  # fmt: skip


def _imports(path: Path) -> Iterator[str]:
    """What a file imports of flash_attn, below the package: "attention.backends.select"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("flash_attn.") for name in names if name.startswith("flash_attn."))


def _layer(module: str) -> int:
    words = module.split(".")
    names = {".".join(words[:count]) for count in (1, 2)}
    return next((place for place, layer in enumerate(LAYERS) if names & set(layer)), len(LAYERS))


def test_every_layer_is_there() -> None:
    for name in (name.replace(".", "/") for layer in LAYERS for name in layer):
        assert (PACKAGE / name).is_dir() or any((PACKAGE / f"{name}{kind}").is_file() for kind in (".py", ".pyi")), name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_its_layer_and_those_above(path: Path) -> None:
    own = _layer(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    assert [name for name in _imports(path) if _layer(name) > own] == []


@pytest.mark.parametrize(("name", "module"), MOVED.items())
def test_a_name_of_before_is_the_module_itself(name: str, module: str) -> None:
    own = importlib.import_module(f"flash_attn.{module}")
    assert importlib.import_module(f"flash_attn.{name}") is getattr(flash_attn, name) is own
    assert own.__spec__ is not None
    assert own.__spec__.name == own.__name__ == f"flash_attn.{module}"


def test_a_module_below_a_name_of_before_is_loaded_once() -> None:
    for name in ("backends.split_kv", "runtime.platform.windows", "custom_ops.dispatch"):
        first, _, rest = name.partition(".")
        own = importlib.import_module(f"flash_attn.{MOVED[first]}.{rest}")
        assert importlib.import_module(f"flash_attn.{name}") is own
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.backends.absent")


def test_no_modules_import_each_other() -> None:
    """Imports in functions and for types count. `from flash_attn import api` imports the module `api`."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in MODULES}
    modules = {name.removesuffix(".__init__"): path for name, path in names.items()} | {"flash_attn._launcher": None}
    graph = {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8") if path else "")
        imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                imports |= members & set(modules) if members <= set(modules) else {node.module, *members & set(modules)}
        graph[name] = imports & set(modules) - {name}
    assert len(graph["flash_attn.core.device"]) >= 2
    while free := {name for name, imports in graph.items() if not imports & set(graph)}:
        graph = {name: imports for name, imports in graph.items() if name not in free}
    assert not graph, f"these modules import each other: {sorted(graph)}"


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            yield node.name, len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)


def test_private_functions_have_few_parameters() -> None:
    """The exceptions are LONG_SIGNATURES and Triton's kernels, which cannot take structures."""
    result: dict[str, set[str]] = {}
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("kernels/"):
            for function, count in _functions(path):
                if count > MOST_PARAMETERS:
                    result.setdefault(name, set()).add(function)
    assert result == LONG_SIGNATURES


# Modules that Windows lacks: only functions may import them, which run where the system has them.
POSIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def test_no_module_imports_posix_only_modules() -> None:
    result = {}
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {id(each) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for each in ast.walk(node)}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if id(node) not in inside and (lacking := POSIX.intersection(names)):
                result[str(path.relative_to(PACKAGE))] = lacking
    assert not result


def test_one_module_asks_which_system_it_runs_on() -> None:
    asks = ("sys.platform", "os.name", "platform.system(", '.so"')
    result = {
        str(path.relative_to(PACKAGE)): question
        for path in MODULES
        for question in asks
        if question in path.read_text(encoding="utf-8") and path.parent.name != "platform"
    }
    assert not result


def test_the_package_is_imported_where_no_posix_module_is() -> None:
    code = f"""
import builtins, sys
original = builtins.__import__
def block(name, where=None, *rest):
    if name in {sorted(POSIX)} and (where or {{}}).get("__name__", "").startswith("flash_attn"):
        raise ModuleNotFoundError(name)
    return original(name, where, *rest)
builtins.__import__ = block
import flash_attn, flash_attn.diagnosis.survey, flash_attn.diagnosis.selftest.command
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
