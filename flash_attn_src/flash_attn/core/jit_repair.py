"""Makes the installed Triton compile for GFX11 without the VOPD hazard (`kernels.vopd`).

Neither Triton nor LLVM's feature string has an option that keeps LLVM from pairing operations as it does. So the
assembly that Triton gets from LLVM is rewritten before Triton assembles it, as the compile stage does ahead of time.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from flash_attn.kernels import pairing, targets, vopd

_lock = threading.Lock()
_open = 0
_originals: dict[str, Any] = {}


@contextmanager
def repaired() -> Iterator[None]:
    """Within this context, Triton compiles code without the hazard for GPUs with the erratum.

    Triton's cache on disk keeps that code apart from code compiled without it.
    """
    from triton.backends.amd.compiler import HIPBackend

    global _open
    with _lock:
        _open += 1
        if _open == 1:
            _replace(HIPBackend)
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                for name, original in _originals.items():
                    setattr(HIPBackend, name, original)


def _replace(backend: Any) -> None:
    """Replaces the step of Triton's backend that makes assembly, and its part of the key in Triton's cache."""
    _originals.update({name: inspect.getattr_static(backend, name) for name in ("make_amdgcn", "hash")})
    make, key = backend.make_amdgcn, backend.hash

    def make_amdgcn(source: str, metadata: dict[str, Any], options: Any) -> str:
        assembly: str = make(source, metadata, options)
        row = targets.TARGETS.get(options.arch)
        return pairing.repair(assembly) if row is not None and row.vopd_hazard else assembly

    backend.make_amdgcn = staticmethod(make_amdgcn)
    backend.hash = lambda self: f"{key(self)}-{_version()}"


@cache
def _version() -> str:
    """A digest of the code that rewrites."""
    return hashlib.sha256((inspect.getsource(vopd) + inspect.getsource(pairing)).encode()).hexdigest()
