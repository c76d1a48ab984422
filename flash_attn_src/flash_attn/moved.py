"""Names of modules from before the folders core, call, attention and interfaces: each stands for the module itself."""

from __future__ import annotations

import importlib
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_FOLDERS = {
    "core": "api",
    "call": "arguments autocast block_mask calls first_derivative mask memory options tracing",
    "attention": "api_2_6 autograd backends dmask fp8_cache masked second_derivative",
    "interfaces": "fa3 fa4 plug_in",
}
MOVED = {name: f"{folder}.{name}" for folder, names in _FOLDERS.items() for name in names.split()}
MOVED |= {"runtime": "core", "custom_ops": "attention.operators"}


class Aliases(MetaPathFinder, Loader):
    """Finds a module by its name of before. Has to be asked before the finder of files, which would load it twice."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == __package__ and name.split(".")[0] in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        first, *rest = spec.name.partition(".")[2].split(".")
        module = importlib.import_module(".".join((str(__package__), MOVED[first], *rest)))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state  # the alias's own was put there
