"""The clang that compiles Composable Kernel: from this machine's ROCm or from pinned PyPI packages."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rocm_wheels.errors import MissingTool
from rocm_wheels.packages import version_of
from rocm_wheels.paths import FLASH_ATTN_SRC

# The switches of the device library. ROCm has them in small files next to the library; the triton package lacks these
# files.
_CONTROL = """\
target triple = "amdgcn-amd-amdhsa"
@__oclc_ISA_version = linkonce_odr hidden addrspace(4) constant i32 {isa}
@__oclc_ABI_version = linkonce_odr hidden addrspace(4) constant i32 500
@__oclc_wavefrontsize64 = linkonce_odr hidden addrspace(4) constant i8 1
@__oclc_wavefrontsize_log2 = linkonce_odr hidden addrspace(4) constant i8 6
@__oclc_daz_opt = linkonce_odr hidden addrspace(4) constant i8 1
@__oclc_finite_only_opt = linkonce_odr hidden addrspace(4) constant i8 0
@__oclc_unsafe_math_opt = linkonce_odr hidden addrspace(4) constant i8 0
@__oclc_correctly_rounded_sqrt32 = linkonce_odr hidden addrspace(4) constant i8 1
"""

# zig configures its libc++ on the command line. Only its headers are used: no libc++ code reaches a code object.
_LIBCXX = (
    "-D_LIBCPP_ABI_VERSION=1",
    "-D_LIBCPP_ABI_NAMESPACE=__1",
    "-D_LIBCPP_HARDENING_MODE=_LIBCPP_HARDENING_MODE_NONE",
    "-D_LIBCPP_DISABLE_VISIBILITY_ANNOTATIONS",
    "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=0",
    "-D_LIBCPP_HAS_MUSL_LIBC=0",
    *(
        f"-D_LIBCPP_HAS_{feature}=1"
        for feature in (
            "THREADS", "MONOTONIC_CLOCK", "TERMINAL", "FILESYSTEM", "RANDOM_DEVICE", "LOCALIZATION", "UNICODE",
            "WIDE_CHARACTERS",
        )
    ),
    "-D_LIBCPP_PSTL_BACKEND_SERIAL",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Clang:
    """A HIP compiler. flags: options that find its headers. bitcode: the device library, if `flags` do not find it."""

    name: str
    version: str
    command: tuple[str, ...]
    linker: tuple[str, ...]
    flags: tuple[str, ...]
    bitcode: tuple[str, ...] = ()

    def library(self, target: str, scratch: Path) -> list[str]:
        """The options that link the device library. The switches of the target are written into `scratch`."""
        if not self.bitcode:
            return []
        source, control = scratch / "control.ll", scratch / "control.bc"
        source.write_text(_CONTROL.format(isa=_isa(target)), encoding="utf-8")
        assemble = ("-x", "ir", "--target=amdgcn-amd-amdhsa", f"-mcpu={target}", "-nogpulib", "-emit-llvm")
        run([*self.command, *assemble, "-c", source.name, "-o", control.name], scratch)
        files = (str(control), *self.bitcode)
        return [flag for file in files for flag in ("-Xclang", "-mlink-builtin-bitcode", "-Xclang", file)]


def _isa(target: str) -> int:
    """LLVM's number of the instruction set of a target, which the device library asks for: 9010 for gfx90a."""
    major, minor, stepping = target[3:-2], target[-2], target[-1]
    return int(major) * 1000 + int(minor) * 100 + int(stepping, 16)


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs one step of a compilation without any setting of the user. The caller checks the exit code."""
    environment = {"PATH": os.environ.get("PATH", ""), "ZIG_GLOBAL_CACHE_DIR": str(directory / "zig"), "LC_ALL": "C"}
    environment["ZIG_LOCAL_CACHE_DIR"] = environment["ZIG_GLOBAL_CACHE_DIR"]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@cache
def find(name: str) -> Clang:
    """The toolchain "rocm" or "pypi". Raises MissingTool if this machine lacks a part of it."""
    return _rocm() if name == "rocm" else _pypi()


def _pypi() -> Clang:
    versions = [f"{package} {version_of(package)}" for package in ("ziglang", "clang-tidy", "triton")]
    zig, tidy = _package("ziglang") / "lib", _package("clang_tidy") / "data" / "lib" / "clang"
    amd = _package("triton") / "backends" / "amd"
    # ziglang lacks clang's headers for HIP. The clang-tidy package of the same release has them.
    (resources,) = tidy.iterdir()
    system = [resources / "include" / "cuda_wrappers", zig / "libcxx" / "include", resources / "include"]
    system += [zig / "libc" / "include" / part for part in ("x86-linux-gnu", "generic-glibc")]
    system += [zig / "libc" / "include" / part for part in ("x86-linux-any", "any-linux-any")]
    system.append(amd / "include")
    flags = ["-nogpulib", f"--rocm-path={amd}", "-resource-dir", str(resources), "-nostdinc"]
    flags += [flag for directory in system for flag in ("-isystem", str(directory))]
    flags += ["-include", "__clang_hip_runtime_wrapper.h", *_LIBCXX]
    flags += ["-idirafter", str(FLASH_ATTN_SRC / "csrc" / "ck" / "compat")]
    ziglang = (sys.executable, "-m", "ziglang")
    return Clang(
        name="pypi",
        version=", ".join(versions),
        command=(*ziglang, "clang"),
        linker=(*ziglang, "ld.lld"),
        flags=tuple(flags),
        bitcode=tuple(str(amd / "lib" / f"{library}.bc") for library in ("ocml", "ockl")),
    )


def _rocm() -> Clang:
    root = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
    tools = root / "llvm" / "bin"
    for tool in ("clang", "ld.lld"):
        if not (tools / tool).is_file():
            raise MissingTool(
                f"ROCm's {tool} is missing: no {tools / tool}",
                remedy="install ROCm's LLVM (rocm-llvm, rocm-device-libs, hip-dev), or set ROCM_PATH",
            )
    banner = subprocess.run([tools / "clang", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"version (\S+)", banner)
    return Clang(
        name="rocm",
        version=f"ROCm clang {match[1] if match else banner.splitlines()[0]}",
        command=(str(tools / "clang"),),
        linker=(str(tools / "ld.lld"),),
        flags=(f"--rocm-path={root}",),
    )


def _package(name: str) -> Path:
    """The directory of an installed package. The package is not imported."""
    specification = importlib.util.find_spec(name)
    assert specification is not None  # its version has been checked before
    assert specification.origin is not None
    return Path(specification.origin).parent
