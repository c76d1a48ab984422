"""A torch without tensors, for tests of the doctor: what it says of itself and of its GPUs is in its version.py.

It stands as torch/__init__.py beside a version.py with the names of the real file, and GPUS, a list of (name, target,
MiB), and LIBRARIES, the files that it loads, as torch for ROCm loads its HIP runtime. Attributes that flash_attn takes
when it is imported are made as it asks for them. The process ends where it would make the first tensor of a call.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn


class _Anything:
    """Every attribute, result and quotient of it is another one. It is empty. unittest.mock takes 0.4 s in Wine."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *_: object, **__: object) -> Any:
        return _Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __rfloordiv__(self, _: object) -> Any:
        return _Anything()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[0].isupper() else _Anything()
        setattr(self, name, made)
        return made


class _Finder:
    """Finds every submodule but the file version.py."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("torch.") or name == "torch.version":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _end(*_: object, **__: object) -> NoReturn:
    raise SystemExit


class _Apply:
    apply: Any = classmethod(_end)


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Module

import torch.autograd  # noqa: E402
import torch.cuda  # noqa: E402
import torch.version  # noqa: E402

_loaded = [ctypes.CDLL(path) for path in torch.version.LIBRARIES]  # type: ignore[attr-defined]
_gpus = [
    types.SimpleNamespace(name=name, gcnArchName=f"{target}:sramecc-:xnack-", total_memory=mib << 20, major=11, minor=0)
    for name, target, mib in torch.version.GPUS  # type: ignore[attr-defined]
]
__version__ = torch.version.__version__
torch.autograd.Function = type("Function", (_Apply,), {})  # type: ignore[assignment,misc]
torch.cuda.is_available = lambda: bool(_gpus)
torch.cuda.device_count = lambda: len(_gpus)
torch.cuda.get_device_properties = _gpus.__getitem__  # type: ignore[assignment]
_current = [0]
torch.cuda.set_device = _current.append  # type: ignore[assignment]


def ones(*_: object, **__: object) -> Any:
    """The kernel of torch that the doctor launches, which doubles eight ones. torch has it for the last GPU alone."""
    if _current[-1] != len(_gpus) - 1:
        raise RuntimeError("HIP error: invalid device function")
    return types.SimpleNamespace(mul=lambda _: types.SimpleNamespace(sum=lambda: 16.0))


empty = randn = _end
