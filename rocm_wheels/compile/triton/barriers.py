"""Barriers that order LDS alone, for kernels whose waves exchange nothing through global memory.

lds_only(llir, "fwd-bf16-d128 for gfx1100")

Triton 3.7.1 puts a release fence before each barrier and an acquire fence after it, for every memory. On RDNA a compute
unit has a cache of global memory, so LLVM waits for all loads and stores before the barrier and invalidates the cache
after it. With fences that name LDS it does neither: LLVM, "Memory Model Relaxation Annotations".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rocm_wheels.errors import CompileFailed

_KERNEL = re.compile(r"^define amdgpu_kernel void @\w+\((.*)\)", re.MULTILINE)
_GLOBAL = "ptr addrspace(1)"
# What LLVM proves of a pointer argument: the kernel reads what it points to, or writes it, or does neither.
_ONE_WAY = re.compile(r"\b(readonly|writeonly|readnone)\b")
_FENCE = re.compile(r'^(\s+fence syncscope\("workgroup"\) (?:acquire|release|acq_rel|seq_cst))$', re.MULTILINE)
_METADATA = re.compile(r"^!(\d+) = ", re.MULTILINE)
# Makes a pointer that LLVM does not count as an argument.
_MADE = re.compile(rf"inttoptr .* to {re.escape(_GLOBAL)}")


def lds_only(llir: str, where: str) -> str:
    """The LLVM IR of a kernel with fences that order LDS alone.

    Raises CompileFailed unless LLVM has proved of each pointer argument that the kernel does not both read and write
    through it. Whether two arguments overlap is the caller's promise: `Operation.has_separate_outputs`.

    where: name of the kernel in the error.
    """
    kernel = _KERNEL.search(llir)
    if kernel is None:
        raise CompileFailed(f"{where}: the LLVM IR has no kernel whose arguments the barriers depend on")
    arguments = [argument for argument in re.split(r",(?![^(]*\))", kernel[1]) if _GLOBAL in argument]
    shared = [argument.split()[-1] for argument in arguments if not _ONE_WAY.search(argument)]
    if shared or _MADE.search(llir):
        reason = f"reads and writes {', '.join(shared)}" if shared else "makes pointers from integers"
        raise CompileFailed(f"{where} {reason}, so its barriers must order global memory: see has_separate_outputs")
    number = max(map(int, _METADATA.findall(llir)), default=-1) + 1
    relaxed, fences = _FENCE.subn(rf"\1, !mmra !{number}", llir)
    return f'{relaxed}\n!{number} = !{{!"amdgpu-synchronize-as", !"local"}}\n' if fences else llir


@contextmanager
def relaxed(where: str) -> Iterator[None]:
    """A context in which Triton compiles barriers that order LDS alone: see `lds_only`."""
    from triton import knobs

    def hook(*compilation: Any) -> tuple[str, str] | None:
        """Triton calls without arguments for the name in its cache key, then with its stages, which are changed."""
        if not compilation:
            return "lds_only", "lds_only"
        stages: dict[str, Callable[[str, dict[str, Any]], str]] = compilation[1]
        generate = stages["amdgcn"]
        stages["amdgcn"] = lambda llir, metadata: generate(lds_only(llir, where), metadata)
        return None

    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = hook
        yield
