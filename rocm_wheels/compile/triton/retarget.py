"""Assembles Triton's assembly for a GPU as a code object of another target of its family: an LLVM generic target, which
every GPU of the family loads, or another GPU.

Triton does not compile for generic targets. The assembly only needs another target name and, for a generic target,
version 6 of the code object. The assembler reports an instruction that the other target lacks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rocm_wheels.compile import sources
from rocm_wheels.errors import CompileFailed

_TRIPLE = "amdgcn-amd-amdhsa--"
_VERSIONED = ".amdhsa_code_object_version "
_GENERIC_SINCE = 6


def assemble(assembly: str, target: str) -> bytes:
    """Assembles a code object with the options that Triton uses. Raises CompileFailed."""
    from triton._C.libtriton import amd

    features = (
        "-real-true16" if sources.module("kernels.targets").get(target).family == "rdna3" else ""
    )  # the option that Triton passes for gfx11
    try:
        linkable = amd.assemble_amdgcn(assembly, target, features)
    except Exception as error:
        raise CompileFailed(f"the assembly does not assemble for {target}: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "kernel.o"), Path(folder, "kernel.hsaco")
        source.write_bytes(linkable)
        amd.link_hsaco(str(source), str(made))
        return made.read_bytes()


def rename(assembly: str, made_for: str, target: str, *, is_generic: bool) -> str:
    """The assembly with the target's name in place of `made_for`. A generic target gets code object version 6."""
    lines = assembly.split("\n")
    for index, line in enumerate(lines):
        if line.endswith((f'{_TRIPLE}{made_for}"', f"{_TRIPLE}{made_for}")):
            lines[index] = line.replace(_TRIPLE + made_for, _TRIPLE + target)
        elif is_generic and line.strip().startswith(_VERSIONED):
            lines[index] = f"\t{_VERSIONED}{_GENERIC_SINCE}"
    return "\n".join(lines)
