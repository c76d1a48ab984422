"""Compiles one translation unit of Composable Kernel instances for one GPU target; device code only."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rocm_wheels.compile import codeobject, sources
from rocm_wheels.compile.cache import write
from rocm_wheels.compile.check import stage
from rocm_wheels.compile.ck import sources as ck_sources
from rocm_wheels.compile.ck import toolchain as ck_toolchain
from rocm_wheels.compile.ck.instances import Instance
from rocm_wheels.compile.compiler import Compiled
from rocm_wheels.compile.isa import instruction_mix
from rocm_wheels.errors import CompileFailed
from rocm_wheels.paths import FLASH_ATTN_SRC

SOURCES = ("csrc/ck/device.hpp", "csrc/ck/kernels.hpp", "csrc/ck/compat/hip/hip_fp16.h")

# Options of ck_tile that change the result or the arguments of a kernel. The planner is built with them too.
DEFINES = (
    "-DNDEBUG",
    "-D__HIP_PLATFORM_AMD__=1",
    "-DCK_TILE_FMHA_FWD_FAST_EXP2=1",
    # Mode 4 rounds to nearest, by one addition (a fix of this project), and keeps NaN. docs/notes/clock.md compares the
    # modes.
    "-DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=4",
    # With the builtin that ck_tile selects for clang 20, the kernels stored only zeros.
    "-DCK_TILE_USE_BUFFER_ADDRESSING_BUILTIN=0",
)
FLAGS = (
    "-x", "hip", "--cuda-device-only", "-S", "-std=c++17", "-O3", "-w",
    "-fgpu-flush-denormals-to-zero", "--no-gpu-bundle-output", "-mcode-object-version=5",
    # Up to clang 20, an element of a vector is not a constant expression. ck_tile's FP4 conversions, unused here, need
    # one.
    "-Wno-invalid-constexpr",
    # Names in the code object must depend only on the content of the unit.
    "-fuse-cuid=none",
    # A call would need a stack, so everything is inlined.
    "-mllvm", "-amdgpu-function-calls=false",
    # ck_tile schedules its loops by hand. Like upstream, forbid the scheduler that runs after register allocation.
    "-mllvm", "-enable-post-misched=0",
)  # fmt: skip

# Limit of private memory in bytes per thread, without 4 bytes for each spilled register. Spilling itself takes up to 36
# more bytes. A larger value means an object on the stack; the smallest such object (fixed, see composable_kernel.toml)
# took 208 bytes.
_MAX_STACK = 64

_UNIT = "unit.hip"
_CALLS = re.compile(r"^\s+(s_swappc_b64|s_call_b64)\b", re.MULTILINE)


def source(instances: Sequence[Instance]) -> str:
    """The source text of a translation unit: one instance per line, from the second line on."""
    entries = (f"FLASH_ATTN_CK_ENTRY({instance.symbol}, {instance.type})" for instance in instances)
    return "\n".join(('#include "device.hpp"', *entries, ""))


def compile_unit(target: str, name: str, instances: Sequence[Instance], *, cache: Path, toolchain: str) -> Compiled:
    """The code object of a unit and the manifest entries of its kernels. Raises CompileFailed, which names the
    instance.
    """
    clang = ck_toolchain.find(toolchain)
    with tempfile.TemporaryDirectory(prefix="ck-") as directory:
        scratch = Path(directory)
        assembly = translate(target, name, instances, scratch, cache=cache, toolchain=toolchain)
        assembly, _ = stage.checked(assembly, target, f"{name} for {target}", own_barriers=True)
        (scratch / "unit.s").write_text(assembly, encoding="utf-8")
        assemble = ["-x", "assembler", "--target=amdgcn-amd-amdhsa", f"-mcpu={target}", "-c", "unit.s", "-o", "unit.o"]
        _step([*clang.command, *assemble], scratch, target, name, instances)
        # --discard-all keeps .symtab. Without .symtab ROCm's loader aborts the process.
        link = ["-shared", "--no-undefined", "--discard-all", "unit.o", "-o", "unit.co"]
        _step([*clang.linker, *link], scratch, target, name, instances)
        image = (scratch / "unit.co").read_bytes()
    kernels = codeobject.read_all(image)
    if sorted(kernels) != sorted(instance.symbol for instance in instances):
        expected = ", ".join(sorted(instance.symbol for instance in instances))
        raise CompileFailed(f"{name} for {target} holds kernels {', '.join(sorted(kernels))}, expected {expected}")
    entries = {}
    for instance in instances:
        kernel, body = kernels[instance.symbol], function(assembly, instance.symbol)
        _check(target, instance, kernel, body)
        entries[instance.name] = {
            "symbol": instance.symbol,
            "threads": kernel.threads,
            "shared": 0,
            "params": f"B{kernel.argument_bytes}",
            "constants": {},
            "options": {},
            "resources": kernel.resources(),
            "isa": instruction_mix(body),
        }
    return Compiled(image, entries)


def translate(
    target: str, name: str, instances: Sequence[Instance], scratch: Path, *, cache: Path, toolchain: str
) -> str:
    """The assembly text of a unit, which is also left in the directory `scratch`. Raises CompileFailed."""
    clang = ck_toolchain.find(toolchain)
    include = ck_sources.headers(cache)
    (scratch / _UNIT).write_text(source(instances), encoding="utf-8")
    command = [*clang.command, *FLAGS, f"--offload-arch={target}", *clang.flags, *DEFINES]
    command += [f"-I{include}", f"-I{FLASH_ATTN_SRC / 'csrc' / 'ck'}"]
    if toolchain == "pypi":  # not tried with ROCm's clang
        command += [
            "-Xclang",
            "-include-pch",
            "-Xclang",
            str(_headers(target, command, clang.version, include, scratch)),
        ]
    _step([*command, *clang.library(target, scratch), _UNIT, "-o", "unit.s"], scratch, target, name, instances)
    return (scratch / "unit.s").read_text(encoding="utf-8")


def _headers(target: str, command: Sequence[str], version: str, include: Path, scratch: Path) -> Path:
    """The headers that every unit includes, precompiled for a target and kept beside Composable Kernel's in the cache.

    It takes 12 s to parse them for a target, as long as the rest of a unit of small kernels.
    """
    made_of = repr((command, version, sources.digest(*SOURCES)))
    kept = include.parent / f"{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.pch"
    if not kept.exists():
        read = kept.with_suffix(".hip")  # clang looks for it later
        write(read, source([]).encode())
        # Without times: the key holds the content.
        parse = ["-Xclang", "-emit-pch", "-Xclang", "-fno-pch-timestamp", "-fsyntax-only", str(read)]
        options = [flag for flag in command if flag != "-S"]
        done = ck_toolchain.run([*options, *parse, "-Xclang", "-o", "-Xclang", "headers.pch"], scratch)
        if done.returncode:
            raise CompileFailed(f"the headers of Composable Kernel do not compile for {target}:\n{done.stderr}")
        write(kept, (scratch / "headers.pch").read_bytes())
    return kept


def function(assembly: str, symbol: str) -> str:
    """The instructions of one kernel in an assembly text."""
    start = assembly.index(f"\n{symbol}:")
    return assembly[start : assembly.index("\n.Lfunc_end", start)]


def _step(command: list[str], scratch: Path, target: str, name: str, instances: Sequence[Instance]) -> None:
    done = ck_toolchain.run(command, scratch)
    if done.returncode == 0:
        return
    # The compiler's notes name the line of the entry that failed.
    lines = {int(line) for line in re.findall(rf"{re.escape(_UNIT)}:(\d+):", done.stderr)}
    blamed = [instance.name for line, instance in enumerate(instances, 2) if line in lines]
    what = ", ".join(blamed or (instance.name for instance in instances))
    if done.returncode < 0:
        raise CompileFailed(
            f"{what} for {target}: the compiler was ended by signal {-done.returncode}",
            remedy="if memory was short, run it again with a smaller MAX_JOBS: what was compiled is kept",
        )
    errors = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines()[-20:]
    raise CompileFailed(f"{what} (unit {name}) for {target} did not compile:\n" + "\n".join(errors[:20]))


def _check(target: str, instance: Instance, kernel: codeobject.CodeObject, body: str) -> None:
    """Raises CompileFailed unless each kernel is for the target, has one argument, and has no calls and no stack
    objects.
    """
    wrong = []
    if kernel.target != target:
        wrong.append(f"it is for {kernel.target}")
    if calls := _CALLS.search(body):
        wrong.append(f"it calls functions ({calls[1]})")
    if kernel.private - 4 * kernel.vgpr_spills > _MAX_STACK:
        wrong.append(f"it uses {kernel.private} bytes of private memory a thread, {kernel.vgpr_spills} registers in it")
    if kernel.arguments != 1:
        wrong.append(f"it takes {kernel.arguments} arguments")
    if wrong:
        raise CompileFailed(f"{instance.name} for {target} came out wrong: {'; '.join(wrong)}")
