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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rocm_wheels.compile.cache import put_library, read_library, write
from rocm_wheels.errors import CompileFailed, MissingTool
from rocm_wheels.matrix.platforms import PLATFORMS
from rocm_wheels.packages import version_of
from rocm_wheels.paths import FLASH_ATTN_SRC
from rocm_wheels.wheel import dll, pe, version_resource

SOURCE = FLASH_ATTN_SRC / "csrc" / "launcher"
FILE_NAME = PLATFORMS["linux"].launcher
WINDOWS_FILE_NAME = PLATFORMS["windows"].launcher

# The oldest glibc that the manylinux tags of our wheels allow.
TARGETS = {"x86_64": "x86_64-linux-gnu.2.17", "aarch64": "aarch64-linux-gnu.2.17"}

# Without debug information the file contains no path of the build machine.
FLAGS = ("-std=c11", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
LINUX_FLAGS = ("-shared", "-s", "-fPIC")
# What the file says of itself on Windows.
RESOURCE = {
    "CompanyName": "The ROCm flash-attention wheels authors",
    "FileDescription": "flash_attn: launches GPU kernels",
    "InternalName": "_launcher",
    "LegalCopyright": "BSD 3-Clause License",
    "OriginalFilename": WINDOWS_FILE_NAME,
    "ProductName": "flash_attn",
}


def build(output_dir: Path, *, cache: Path | None = None, machine: str | None = None) -> Path:
    """Compile csrc/launcher to `output_dir/_launcher.abi3.so` and return that path.

    The bytes depend on the source, the compiler and the minor version of the running Python alone. `cache`
    keeps them, and the compiler's own intermediate files, from run to run; `machine` is this machine's unless
    given. Raises MissingTool without ziglang or Python.h, CompileFailed with the compiler's text.
    """
    target = _target(platform.machine() if machine is None else machine)

    def compile_linux(compiled: Path, scratch: Path, variables: Mapping[str, str]) -> None:
        headers = _header_directories()
        headers += _split_configuration(headers, target, scratch / "include")
        _compile(compiled, target, headers, variables)

    return _build(output_dir / FILE_NAME, compile_linux, cache, (target, *LINUX_FLAGS))


def build_for_windows(output_dir: Path, *, version: str, cache: Path | None = None) -> Path:
    """Compile csrc/launcher to `output_dir/_launcher.pyd`, for Windows on x86_64, and return that path. As `build`.

    version: of flash_attn, for the version resource.
    """
    resource = version_resource.resource(version, RESOURCE)

    def compile_windows(compiled: Path, scratch: Path, variables: Mapping[str, str]) -> None:
        headers = [_windows_headers(scratch / "include")]
        dll.build(
            compiled, folder=SOURCE, headers=headers, flags=FLAGS, resource=resource, scratch=scratch,
            variables=variables,
        )  # fmt: skip
        compiled.write_bytes(pe.with_checksum(compiled.read_bytes()))

    return _build(output_dir / WINDOWS_FILE_NAME, compile_windows, cache, _windows_inputs(version))


def keep_for_windows(content: bytes, *, version: str, cache: Path) -> None:
    """Puts a signed launcher into the cache, in the place of the one that `build_for_windows` compiled."""
    put_library(_kept(cache, _windows_inputs(version), WINDOWS_FILE_NAME), content)


def _windows_inputs(version: str) -> tuple[str, ...]:
    resource = version_resource.resource(version, RESOURCE)
    return (dll.TARGET, *dll.COMPILE_FLAGS, *dll.LINK_FLAGS, resource.hex())


def _build(
    output: Path,
    compile_library: Callable[[Path, Path, Mapping[str, str]], None],
    cache: Path | None,
    inputs: Sequence[str],
) -> Path:
    """Compiles the launcher, or takes the file out of the cache.

    compile_library: writes a file, with a directory for what it makes on the way and ziglang's variables. inputs: what
    the file depends on besides the sources, ziglang, FLAGS and Python.
    """
    version_of("ziglang")
    _header_directories()
    kept = None if cache is None else _kept(cache, inputs, output.name)
    content = None if kept is None else read_library(kept)
    if content is None:
        with tempfile.TemporaryDirectory(prefix="launcher-") as scratch:
            compiled = Path(scratch) / output.name
            zig_cache = (Path(scratch) if cache is None else cache) / "zig"
            zig_cache.mkdir(parents=True, exist_ok=True)
            caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(zig_cache.resolve()))
            compile_library(compiled, Path(scratch), caches)
            content = compiled.read_bytes()
        if kept is not None:
            put_library(kept, content)
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


def _kept(cache: Path, inputs: Sequence[str], name: str) -> Path:
    digest = hashlib.sha256()
    for source in sorted(path for path in SOURCE.rglob("*") if path.is_file()):
        digest.update(str(source.relative_to(SOURCE)).encode() + b"\0" + source.read_bytes())
    for part in (version_of("ziglang"), sysconfig.get_python_version(), *FLAGS, *inputs):
        digest.update(b"\0" + part.encode())
    return cache / "launcher" / digest.hexdigest() / name


def _compile(output: Path, target: str, headers: list[Path], variables: Mapping[str, str]) -> None:
    """Compiles for Linux, in the directory of the sources."""
    sources = sorted(
        str(path.relative_to(SOURCE)) for folder in (".", "linux") for path in (SOURCE / folder).glob("*.c")
    )
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *FLAGS, *LINUX_FLAGS, "-I.", "-Ilinux"]
    command += [*sources, *(f"-isystem{directory}" for directory in headers), "-o", str(output)]
    done = subprocess.run(
        command, cwd=SOURCE, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0 or not output.is_file():
        raise CompileFailed(f"the launcher did not compile for {target}:\n{done.stderr.strip()}")
