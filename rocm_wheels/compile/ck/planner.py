"""The planner: compiles csrc/ck/planner.cpp once, for every Python, torch and ROCm."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rocm_wheels.compile import sources
from rocm_wheels.compile.cache import put_library, read_library
from rocm_wheels.compile.ck import instances as ck_instances
from rocm_wheels.compile.ck import sources as ck_sources
from rocm_wheels.compile.ck import toolchain as ck_toolchain
from rocm_wheels.compile.ck.compiler import DEFINES
from rocm_wheels.errors import CompileFailed
from rocm_wheels.paths import FLASH_ATTN_SRC

FILE_NAME = "_ck_planner.so"
SOURCES = (
    "csrc/ck/planner.cpp",
    *(f"csrc/ck/planner/{part}.hpp" for part in ("checks", "launch", "forward", "backward", "decode")),
    "csrc/ck/kernels.hpp",
    "csrc/ck/include/flash_attn_ck.h",
)

# The oldest glibc that the manylinux tags of our wheels allow, as for the launcher.
_GLIBC = "x86_64-linux-gnu.2.17"
# HIP code whose device half is never requested; the library itself does not call HIP.
_COMPILE = ("-x", "hip", "--cuda-host-only", "--target=x86_64-unknown-linux-gnu", "-std=c++17", "-O2", "-fPIC", "-w")
_OPTIONS = ("-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fuse-cuid=none")


def tables() -> dict[str, str]:
    """Operation -> the text of its file, one line for each kernel."""
    texts: dict[str, str] = {}
    for instance in ck_instances.table():
        line = f'ROW("{instance.name}", {", ".join(instance.arguments)})\n'
        texts[instance.op] = texts.get(instance.op, "") + line
    return texts


def build(output_dir: Path, *, cache: Path, flags: tuple[str, ...] = ()) -> Path:
    """Compile the planner to `output_dir/_ck_planner.so` and return that path.

    The bytes depend on the sources, the instances, the compiler and the `flags` for it alone; the cache keeps them.
    Raises MissingTool without the packages of the build group, CompileFailed with the compiler's text.
    """
    clang = ck_toolchain.find("pypi")  # host code: the result is the same on a machine with and without ROCm
    recipe = (sources.digest(*SOURCES), *tables().values(), Path(__file__).read_text(encoding="utf-8"))
    ingredients = (clang.version, ck_sources.load().key, *recipe, *flags)
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()
    kept = cache / "planner" / key / FILE_NAME
    content = read_library(kept)
    if content is None:
        include = ck_sources.headers(cache)
        with tempfile.TemporaryDirectory(prefix="planner-") as scratch:
            content = _compile(Path(scratch), include, clang, flags, zig_cache=cache / "zig").read_bytes()
        put_library(kept, content)
    output = output_dir / FILE_NAME
    output.write_bytes(content)
    output.chmod(0o755)
    return output


def digest(cache: Path) -> str:
    """The sha256 of the planner, in hexadecimal. Compiles the planner if it is not in the cache. Raises as `build`."""
    with tempfile.TemporaryDirectory(prefix="planner-") as scratch:
        return hashlib.sha256(build(Path(scratch), cache=cache).read_bytes()).hexdigest()


def _compile(
    scratch: Path, include: Path, clang: ck_toolchain.Clang, flags: tuple[str, ...], *, zig_cache: Path
) -> Path:
    for operation, text in tables().items():
        (scratch / f"{operation}.inc").write_text(text, encoding="utf-8")
    csrc = FLASH_ATTN_SRC / "csrc" / "ck"
    includes = [f"-I{path}" for path in (scratch, csrc / "include", csrc, include)]
    compile_ = [
        *clang.command,
        *_COMPILE,
        *_OPTIONS,
        *flags,
        *clang.flags,
        *DEFINES,
        *includes,
        "-c",
        str(csrc / "planner.cpp"),
    ]
    link = [sys.executable, "-m", "ziglang", "cc", "-target", _GLIBC, "-shared", "-s", "planner.o", "-o", FILE_NAME]
    environment = {**os.environ, **dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(zig_cache))}
    for command in ([*compile_, "-o", "planner.o"], link):
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CompileFailed(f"planner.cpp did not compile:\n{done.stderr.strip()[-8000:]}")
    return scratch / FILE_NAME
