"""The launcher: compiles flash_attn._launcher once, for every Python and every torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from rocm_wheels.compile.cache import put_library, read_library, write
from rocm_wheels.errors import CompileFailed, MissingTool
from rocm_wheels.matrix.platforms import PLATFORMS
from rocm_wheels.packages import version_of
from rocm_wheels.paths import FLASH_ATTN_SRC
from rocm_wheels.wheel import pe

SOURCE = FLASH_ATTN_SRC / "csrc" / "launcher"
FILE_NAME = PLATFORMS["linux"].launcher
WINDOWS_FILE_NAME = PLATFORMS["windows"].launcher

# The oldest glibc that the manylinux tags of our wheels allow.
TARGETS = {"x86_64": "x86_64-linux-gnu.2.17", "aarch64": "aarch64-linux-gnu.2.17"}
WINDOWS_TARGET = "x86_64-windows-gnu"

# Without debug information the file contains no path of the build machine.
FLAGS = ("-std=c11", "-shared", "-O2", "-g0", "-s", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
LINUX_FLAGS = ("-fPIC",)
# The libraries of windows/*.def are all that is linked. ziglang would compile its own C runtime otherwise, which takes
# minutes.
WINDOWS_FLAGS = ("-nostdlib", "-D_UCRT", "-lkernel32")


def build(output_dir: Path, *, cache: Path | None = None, machine: str | None = None) -> Path:
    """Compile csrc/launcher to `output_dir/_launcher.abi3.so` and return that path.

    The bytes depend on the source, the compiler and the minor version of the running Python alone. `cache`
    keeps them, and the compiler's own intermediate files, from run to run; `machine` is this machine's unless
    given. Raises MissingTool without ziglang or Python.h, CompileFailed with the compiler's text.
    """
    target = _target(platform.machine() if machine is None else machine)

    def prepare(scratch: Path) -> list[str]:
        headers = _header_directories()
        headers += _split_configuration(headers, target, scratch / "include")
        return [*LINUX_FLAGS, *(f"-isystem{directory}" for directory in headers)]

    return _build(output_dir / FILE_NAME, "linux", target, prepare, cache)


def build_for_windows(output_dir: Path, *, cache: Path | None = None) -> Path:
    """Compile csrc/launcher to `output_dir/_launcher.pyd`, for Windows on x86_64, and return that path. As `build`."""

    def prepare(scratch: Path) -> list[str]:
        headers = _windows_headers(scratch / "include")
        return [f"-isystem{headers}", *windows_options(sorted((SOURCE / "windows").glob("*.def")), scratch)]

    return _build(output_dir / WINDOWS_FILE_NAME, "windows", WINDOWS_TARGET, prepare, cache)


def _build(output: Path, system: str, target: str, prepare: Callable[[Path], list[str]], cache: Path | None) -> Path:
    """Compiles for a target, or takes the file out of the cache.

    system: the directory of the system's own sources. prepare: makes headers and libraries in a scratch directory and
    returns options of the compiler.
    """
    version = version_of("ziglang")
    _header_directories()
    kept = None if cache is None else cache / "launcher" / _key(target, version) / output.name
    content = None if kept is None else read_library(kept)
    if content is None:
        with tempfile.TemporaryDirectory(prefix="launcher-") as scratch:
            compiled = Path(scratch) / output.name
            zig_cache = (Path(scratch) if cache is None else cache) / "zig"
            _compile(compiled, system, target, prepare(Path(scratch)), zig_cache=zig_cache)
            content = compiled.read_bytes()
        if kept is not None:
            put_library(kept, content)
    if system == "windows":
        content = pe.with_checksum(content)
    output.parent.mkdir(parents=True, exist_ok=True)
    write(output, content)
    output.chmod(0o755)
    return output


def _target(machine: str) -> str:
    try:
        return TARGETS[machine]
    except KeyError:
        raise MissingTool(
            f"the launcher cannot be built for {machine!r}",
            remedy=f"build on or for one of {', '.join(TARGETS)} (Linux)",
        ) from None


def _header_directories() -> list[Path]:
    directories = list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("include", "platinclude")))
    if not any((directory / "Python.h").is_file() for directory in directories):
        python = sysconfig.get_python_version()
        raise MissingTool(
            f"the launcher needs Python.h, which is not in {directories[0]}",
            remedy=f"install python{python}-dev, or use a Python that brings its headers (uv python install)",
        )
    return directories


def _split_configuration(headers: list[Path], target: str, scratch: Path) -> list[Path]:
    """Another directory of headers, for Linux distributions that keep one pyconfig.h per machine type.

    Debian's pyconfig.h includes <x86_64-linux-gnu/python3.11/pyconfig.h>. That file is in the same directory as the
    headers of this machine's C library, which the compiler must not find, because it brings its own. So the file is
    copied to a directory below `scratch`.
    """
    machine = sysconfig.get_config_var("MULTIARCH")
    apart = [directory.parent / str(machine) / directory.name / "pyconfig.h" for directory in headers]
    path = next(filter(Path.is_file, apart), None)
    if path is None:
        return []
    copy = scratch / target.partition(".")[0] / path.parent.name / path.name
    copy.parent.mkdir(parents=True)
    shutil.copyfile(path, copy)
    return [scratch]


def _windows_headers(scratch: Path) -> Path:
    """A copy of Python's headers with Windows' pyconfig.h. Python.h includes the pyconfig.h in its own directory."""
    for directory in reversed(_header_directories()):
        shutil.copytree(directory, scratch, dirs_exist_ok=True)
    shutil.copyfile(SOURCE / "windows" / "pyconfig.h", scratch / "pyconfig.h")
    return scratch


def windows_options(definitions: Iterable[Path], scratch: Path) -> list[str]:
    """Options of the compiler for a Windows library that takes only the functions of these lists, one for each DLL.

    Makes their import libraries in `scratch`. Raises CompileFailed.
    """
    zig = find_spec("ziglang")
    headers = Path(str(zig and zig.origin)).parent / "lib" / "libc" / "include" / "any-windows-any"
    return [*WINDOWS_FLAGS, f"-isystem{headers}", *(str(_import_library(path, scratch)) for path in definitions)]


def _import_library(definition: Path, scratch: Path) -> Path:
    """The import library of a DLL, made from the list of its functions. Raises CompileFailed."""
    library = scratch / f"{definition.stem}.lib"
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "dlltool",
        "-m",
        "i386:x86-64",
        "-d",
        str(definition),
        "-l",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not library.is_file():
        raise CompileFailed(f"{definition.name} gives no import library:\n{done.stderr.strip()}")
    return library


def _key(target: str, version: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(path for path in SOURCE.rglob("*") if path.is_file()):
        digest.update(str(source.relative_to(SOURCE)).encode() + b"\0" + source.read_bytes())
    for part in (target, version, sysconfig.get_python_version(), *FLAGS, *LINUX_FLAGS, *WINDOWS_FLAGS):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()


def _compile(output: Path, system: str, target: str, options: list[str], *, zig_cache: Path) -> None:
    """Runs the compiler in the directory of the sources, with its caches outside of the home directory."""
    zig_cache.mkdir(parents=True, exist_ok=True)
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(zig_cache.resolve()))
    sources = sorted(
        str(path.relative_to(SOURCE)) for folder in (".", system) for path in (SOURCE / folder).glob("*.c")
    )
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *FLAGS, "-I.", f"-I{system}"]
    command += [*sources, *options, "-o", str(output)]
    done = subprocess.run(
        command, cwd=SOURCE, env={**os.environ, **caches}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0 or not output.is_file():
        raise CompileFailed(f"the launcher did not compile for {target}:\n{done.stderr.strip()}")
