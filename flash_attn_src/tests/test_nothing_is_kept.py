"""Nothing that is read from a tensor outlives a call: each place that keeps anything is listed with what it keeps.

Identity and `_version` of a tensor say nothing about its content, so a table keyed by them is stale after a fused
optimizer, `.data`, a collective or a graph's replay. What depends on code, shapes and numbers of Python may be kept.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent
# The compile stage's kernels and the diagnosis serve no call.
LEFT_OUT = ("tests", "csrc", "flash_attn/kernels", "flash_attn/diagnosis")
CONTAINERS = {
    "dict", "list", "set", "WeakKeyDictionary", "WeakValueDictionary", "defaultdict", "OrderedDict", "Counter", "deque",
}  # fmt: skip

_SHAPES = "plans of addresses' alignment, shapes and strides, all in the key"
_WHEEL = "facts of the wheel, the machine or torch"
_SWITCH = "who turned a switch on, and what PyTorch had before"
_DEVICES = "devices and their kernels, by numbers and names"
_CLASSES = "what a class or a signature has, by its name"
_ONCE = "whether something was registered or said once"

ALLOWED = {
    "flash_attn/attention/backends/__init__.py": {"_chosen": _WHEEL, "_cpu": _WHEEL, "_forced": _SWITCH},
    "flash_attn/attention/backends/asm/arguments.py": {"self.offsets": _CLASSES},
    "flash_attn/attention/backends/asm/planning.py": dict.fromkeys(
        ("_plan_backward", "_plan_forward", "_unsupported_reason"), _SHAPES
    ),
    "flash_attn/attention/backends/choice.py": {"_measured": _WHEEL, "find": "rows of a table, by numbers and names"},
    "flash_attn/attention/backends/ck/fallback.py": {"self._announced": _ONCE},
    "flash_attn/attention/backends/recording.py": {"_recording": _SWITCH},
    "flash_attn/attention/backends/split_kv.py": {"are_faster": "a decision by shapes"},
    "flash_attn/attention/backends/triton/autotune.py": {"_store": "tiles that were searched, by shapes"},
    "flash_attn/attention/operators/sharding.py": {"_register": _ONCE},
    "flash_attn/interfaces/fa3/operators.py": {"_libraries": _ONCE},
    "flash_attn/flex/switch.py": {"_disabled": _CLASSES, "_graph": _ONCE, "_users": _SWITCH},
    "flash_attn/call/options.py": {"FIELDS": _CLASSES, "_doors": _CLASSES, "self._others": _CLASSES},
    "flash_attn/core/build_info.py": {"load": _WHEEL},
    "flash_attn/core/ck_planner.py": {"library": _WHEEL},
    "flash_attn/core/device.py": {"_devices": _DEVICES},
    "flash_attn/core/driver.py": {"_warned": _ONCE},
    "flash_attn/core/jit.py": {"triton_version": _WHEEL},
    "flash_attn/core/jit_repair.py": {"_open": _SWITCH, "_originals": _SWITCH, "_version": _WHEEL},
    "flash_attn/core/protocol.py": {"kernels": _DEVICES},
    "flash_attn/core/store.py": {"open_store": _WHEEL},
    "flash_attn/core/stored.py": {"_capture": _WHEEL},
    "flash_attn/core/submissions.py": {"self._accounts": "seconds of work of a stream or a graph, by its number"},
    "flash_attn/core/watchdog.py": {"self._estimates": "how many programs a launch may have, by its numbers"},
    "flash_attn/sdpa/override.py": {
        "_library": _ONCE, "_recorded": "open `with` blocks of a graph that is recorded", "_users": _SWITCH,
        "active": _SWITCH,
    },
    "flash_attn/sdpa/report.py": {"self._passed_on": "counts of calls, by reason"},
    "hatch_build.py": {"_checkout": _WHEEL},
}  # fmt: skip


def _name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_empty_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return _name(value) in CONTAINERS and not value.args
    return isinstance(value, ast.Dict) and not value.keys


def _targets(node: ast.AST) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Results that are kept, variables of the module, and attributes that are set on tensors."""
    if any(_name(x) in ("cache", "lru_cache") for x in node.decorator_list):
        yield node.name
    arguments = [x for x in (*node.args.args, *node.args.kwonlyargs) if x.annotation is not None]
    tensors = {x.arg for x in arguments if "Tensor" in ast.unparse(x.annotation)}  # type: ignore[arg-type]
    for inner in ast.walk(node):
        if isinstance(inner, ast.Global):
            yield from inner.names
        for target in _targets(inner):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in tensors:
                yield f"{node.name}: {ast.unparse(target)}"


def kept(tree: ast.Module) -> set[str]:
    """The places of a module that keep something beyond a call: caches of functions, containers of modules, classes and
    objects that begin empty, variables that functions set, attributes of tensors."""
    places: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            places.update(_of_function(node))
        bodies = node.body if isinstance(node, (ast.Module, ast.ClassDef)) else []
        for statement in bodies:
            if _is_empty_container(getattr(statement, "value", None)) or (
                isinstance(getattr(statement, "value", None), ast.List) and not statement.value.elts  # type: ignore[attr-defined]
            ):
                places.update(ast.unparse(x) for x in _targets(statement))
        if _is_empty_container(getattr(node, "value", None)):
            places.update(ast.unparse(x) for x in _targets(node) if isinstance(x, ast.Attribute))
    return places


def test_each_place_that_keeps_something_has_a_reason() -> None:
    result = {}
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        if not name.startswith(LEFT_OUT) and (places := kept(ast.parse(path.read_text(encoding="utf-8")))):
            result[name] = places
    assert result == {name: set(places) for name, places in ALLOWED.items()}


def test_what_keeps_something_is_found() -> None:
    source = """
import functools, torch
_rows = {}
class Module:
    tables = dict()
    def __init__(self): self._made = {}
    @functools.lru_cache(8)
    def look(self, x: torch.Tensor): x._mine = 1
def put():
    global _last
    _last = 3
"""
    expected = {"_rows", "tables", "self._made", "look", "look: x._mine", "_last"}
    assert kept(ast.parse(source)) == expected
