"""The names, other than public functions, that FlashAttention-4's tests import: see upstream.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# Private functions that the tests import and call in cases that they draw on other GPUs.
PRIVATE = ("_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd_sparse_mla", "_flash_attn_fwd_combine")


def _private(*_: Any, **__: Any) -> None:
    import pytest

    pytest.skip("calls a private function of upstream's")


class _NoPlan:
    """Stands in for upstream's launch plan, which is not needed here. A test that reads the plan is skipped."""

    def __getattr__(self, name: str) -> Any:
        import pytest

        pytest.skip(f"looks at {name} of upstream's plan of a launch")


def provide(testing: Path) -> None:
    """Puts upstream's module of references, and stand-ins for its private names, where the tests look for them."""
    from flash_attn.cute import interface

    cache = ModuleType("flash_attn.cute.cache_utils")
    cache.JITCache = type("JITCache", (), {})  # type: ignore[attr-defined]
    sys.modules[cache.__name__] = cache
    if not hasattr(interface, "get_scheduler_metadata"):
        interface.get_scheduler_metadata = lambda **_: _NoPlan()
    for name in PRIVATE:
        if not hasattr(interface, name):
            setattr(interface, name, _private)
    spec = importlib.util.spec_from_file_location("flash_attn.cute.testing", testing)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
