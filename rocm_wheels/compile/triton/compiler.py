"""Compiles one variant of a Triton kernel for one GPU target, ahead of time, on a machine without a GPU.

It runs in worker processes, because importing Triton takes a second and its compiler may end the process.
"""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from typing import Any

from rocm_wheels.compile import codeobject, sources
from rocm_wheels.compile.check import stage
from rocm_wheels.compile.isa import instruction_mix
from rocm_wheels.compile.triton import barriers, priorities, retarget
from rocm_wheels.errors import CompileFailed

_SWITCHES = ("TRITON_", "AMDGCN_", "MLIR_", "LLVM_", "DISABLE_")


def prepare(scratch: str) -> None:
    """Sets up a worker process so that code objects do not depend on the build machine.

    The user's compiler switches are dropped. Line tables are disabled, because they hold paths. Triton's own cache is a
    new directory in `scratch`.
    """
    for name in [name for name in os.environ if name.startswith(_SWITCHES)]:
        del os.environ[name]
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ["TRITON_CACHE_DIR"] = scratch
    warnings.simplefilter("ignore")


def compile_variant(
    target: str, fields: tuple[Any, ...], config: tuple[Any, ...] | None = None
) -> tuple[bytes, dict[str, Any]]:
    """The code object and the manifest entry of a variant. Raises CompileFailed.

    fields: the fields of the variant. config: the fields of a launch configuration; None selects the row of the tuning
    table.
    """
    image, entry, _ = translate(target, fields, config)
    return image, entry


def translate(
    target: str,
    fields: tuple[Any, ...],
    config: tuple[Any, ...] | None = None,
    reports: list[stage.Report] | None = None,
) -> tuple[bytes, dict[str, Any], str]:
    """Like `compile_variant`, with the assembly text (PTX on NVIDIA) as a third result. reports: receives the report of
    the instruction check.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = sources.module("kernels.variants").Variant(*fields)
    operation, launch_letter = variant.operation, sources.module("kernels.operation").launch_letter
    chosen = None if config is None else sources.module("kernels.tuning").Config(*config)
    spec = sources.module("kernels.launches").specification(variant, target, chosen)
    function = getattr(sources.module(f"kernels.{spec.module}"), spec.symbol)
    signature, constants, attributes, letters = {}, {}, {}, ""
    for position, name in enumerate(function.arg_names):
        if name in spec.constants or name in spec.absent:
            signature[name] = "constexpr"
            constants[(position,)] = spec.constants.get(name)
            continue
        signature[name] = operation.argument_type(name, variant.dtype)
        letters += launch_letter(signature[name])
        if name in operation.aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    row = sources.module("kernels.targets").get(target)
    gpu = (
        GPUTarget("cuda", int(target.removeprefix("sm_")), row.wavefront)
        if row.vendor == "nvidia"
        else GPUTarget("hip", row.made_for or target, row.wavefront)
    )
    where = f"{variant.name} for {target}"
    switches = sources.module("kernels.switches")
    try:
        source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
        # The two compute units of a work group processor have a cache of global memory each.
        exchanges_in_lds = operation.has_separate_outputs and row.vendor == "amd" and row.multiprocessor_units == 2
        fences = barriers.relaxed(where) if exchanges_in_lds else nullcontext()
        with switches.switched(spec.options) as options, fences:
            compiled = triton.compile(source, target=gpu, options=options)
    except Exception as error:
        raise CompileFailed(f"Triton {triton.__version__} cannot compile {where}: {error}") from error

    metadata = compiled.metadata
    for scratch in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, scratch, 0):
            raise CompileFailed(f"{where} wants {scratch}, which the launcher does not provide")
    image: bytes = compiled.asm["cubin" if gpu.backend == "cuda" else "hsaco"]
    written: str = compiled.asm["ptx" if gpu.backend == "cuda" else "amdgcn"]
    assembly = written
    if "global_load_lds_" in assembly:
        # LLVM counts this instruction in lgkmcnt too, but the hardware does not, so its wait is too short
        # (llvm-project, 179305).
        raise CompileFailed(f"{where} has a direct copy that is no buffer instruction: LLVM waits wrongly for it")
    prioritised = spec.options.get(switches.WAVE_PRIORITIES, 0)
    if prioritised:
        assembly = priorities.insert(assembly, where)
    if gpu.backend == "hip":
        assembly, report = stage.checked(assembly, target, where)
        if reports is not None:
            reports.append(report)
    if row.made_for:
        assembly = retarget.rename(assembly, row.made_for, target, is_generic=row.is_generic)
    if assembly != written:
        image = retarget.assemble(assembly, target)
    if metadata.shared > row.shared_memory:
        raise CompileFailed(f"{where} takes {metadata.shared} bytes of shared memory, the GPU has {row.shared_memory}")
    code = codeobject.read(image)
    if code.target != target or code.symbol != metadata.name:
        raise CompileFailed(f"{where} came out as {code.symbol} for {code.target}")
    if code.arguments < len(letters):
        raise CompileFailed(f"{where} takes {code.arguments} arguments, the kernel has {len(letters)}")
    entry = {
        "symbol": metadata.name,
        "threads": metadata.num_warps * gpu.warp_size,
        "shared": metadata.shared,
        # After the kernel's own arguments Triton passes pointers to scratch memory. They are null if the kernel uses no
        # scratch.
        "params": letters + "0" * (code.arguments - len(letters)),
        "constants": spec.constants,
        "options": spec.options,
        "resources": code.resources(),
        "isa": instruction_mix(assembly),
    }
    return image, entry, assembly
