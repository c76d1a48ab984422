"""A library for Windows on x86_64, compiled and linked by ziglang.

It has Control Flow Guard and a version resource. It takes only the functions that the lists (.def) beside its sources
name, because ziglang would otherwise compile a C runtime of its own, which takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rocm_wheels.errors import CompileFailed

TARGET = "x86_64-windows-gnu"
COMPILE_FLAGS = ("-c", "-D_UCRT", "-mguard=cf")
# -Brepro: the header has a hash where the date of linking would be.
LINK_FLAGS = (
    "-nologo", "-dll", "-machine:x64", "-nodefaultlib", "-noimplib", "-entry:_DllMainCRTStartup", "-guard:cf",
    "-opt:ref", "-Brepro",
)  # fmt: skip


def build(
    output: Path, *, folder: Path, headers: Sequence[Path], flags: Sequence[str], resource: bytes, scratch: Path,
    variables: Mapping[str, str],
) -> None:  # fmt: skip
    """Compiles the C files of `folder` and the files of `folder/windows`, and links them to `output`.

    headers: further directories of headers. flags: options of the C compiler. resource: a .res file. variables:
    ziglang's, in the environment. Raises CompileFailed with ziglang's text.
    """
    windows = folder / "windows"
    # Paths are relative, so that no path of this machine gets into the library.
    sources = [path for place in (folder, windows) for suffix in ("*.c", "*.S") for path in sorted(place.glob(suffix))]
    includes = ["-I.", "-Iwindows", *(f"-isystem{path}" for path in (*headers, system_headers()))]
    parts = []
    for source in sources:
        part = scratch / f"{source.relative_to(folder)}.obj".replace(os.sep, "-")
        compiler = ["cc", "-target", TARGET, *flags, *COMPILE_FLAGS, *includes]
        _ziglang([*compiler, str(source.relative_to(folder)), "-o", str(part)], part, folder, variables)
        parts.append(part)
    version = scratch / "version.res"
    version.write_bytes(resource)
    parts += [version, *(import_library(path, scratch) for path in sorted(windows.glob("*.def")))]
    _ziglang(["lld-link", *LINK_FLAGS, *map(str, parts), f"-out:{output}"], output, folder, variables)


def system_headers() -> Path:
    """The directory of the headers of Windows in the package ziglang."""
    zig = find_spec("ziglang")
    return Path(str(zig and zig.origin)).parent / "lib" / "libc" / "include" / "any-windows-any"


def import_library(definition: Path, scratch: Path) -> Path:
    """The import library of a DLL, made from the list of its functions. Raises CompileFailed."""
    library = scratch / f"{definition.stem}.lib"
    command = ["dlltool", "-m", "i386:x86-64", "-d", str(definition.absolute()), "-l", str(library)]
    _ziglang(command, library, scratch, {})
    return library


def _ziglang(arguments: Iterable[str], output: Path, folder: Path, variables: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ziglang", *arguments], cwd=folder, env={**os.environ, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0 or not output.is_file():
        raise CompileFailed(f"ziglang does not make {output.name} for Windows:\n{(done.stderr or done.stdout).strip()}")
