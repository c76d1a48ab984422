"""The plug-ins in releases of vLLM or SGLang, by their own plug-in loaders and on their own classes.

    python flash_attn_src/tests/clients/releases.py vllm 0.33.0 0.32.0
    python flash_attn_src/tests/clients/releases.py sglang latest

Downloads the wheel of each release from PyPI into build/releases and unpacks it without its compiled kernels.
Then it starts the release's loader of plug-ins with this clone's plug-in installed, and where the backend is registered
it runs the plug-in's tests on the release's classes. Prints a row for each release. Exits with 1 if a release does not
start, or if a test fails.

The environment has torch, pytest and what the program imports. A module that is missing is named.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

CLIENTS = Path(__file__).resolve().parent
SOURCES = CLIENTS.parents[1]


class Program(NamedTuple):
    """A program with a plug-in of this project. load: prints the backends that its loader has registered."""

    plug_in: str
    load: str


PROGRAMS = {
    "vllm": Program(
        "vllm_flash_rocm",
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as backends\n"
        "print(*[x for x in backends.__members__ if x.startswith('FLASH_ROCM')])",
    ),
    "sglang": Program(
        "sglang_flash_rocm",
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as backends\n"
        "print(*[x for x in backends if x == 'flash_rocm'])",
    ),
}


def unpacked(program: str, release: str, root: Path) -> Path:
    """The folder with a release's files but compiled ones. Raises CalledProcessError where PyPI does not have it."""
    folder = root / f"{program}-{release}"
    if not (folder / program).is_dir() or release == "latest":
        folder.mkdir(parents=True, exist_ok=True)
        name = program if release == "latest" else f"{program}=={release}"
        # Wheels are for Linux of several ages, whatever Python this is. pip takes the tags that are named, no others.
        platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in range(17, 43)] + ["--platform=any"]
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12", *platforms, "--dest", folder]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, name], check=True)
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [x for x in archive.namelist() if not x.endswith((".so", ".cubin"))])
            wheel.unlink()
    return folder


def row(program: str, folder: Path, plug_ins: Path) -> tuple[list[str], bool]:
    """(release, how it starts, what the tests say), and whether it starts and no test fails."""
    plug_in, load = PROGRAMS[program]
    info = next(folder.glob(f"{program}-*.dist-info")).name
    cells = [info.removeprefix(f"{program}-").removesuffix(".dist-info")]
    places = [str(x) for x in (plug_ins, folder, SOURCES)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    started = subprocess.run([sys.executable, "-c", load], env=env, capture_output=True, text=True)
    if started.returncode:
        return [*cells, "does not start: " + started.stderr.strip().rpartition("\n")[2], ""], False
    backends = started.stdout.strip().rpartition("\n")[2]
    if not backends:
        warning = [line for line in started.stderr.splitlines() if "starts without it" in line]
        return [*cells, "starts without the plug-in", ""], bool(warning)
    env["PYTHONPATH"] = os.pathsep.join(places[1:])
    tests = [sys.executable, "-m", "pytest", "-q", "-n0", "-W", "default", "-p", "no:cacheprovider"]
    ran = subprocess.run([*tests, CLIENTS.parent / f"test_{plug_in}.py"], env=env, capture_output=True, text=True)
    if ran.returncode:
        print(ran.stdout, file=sys.stderr)
    summary = re.sub(r",? \d+ warnings?| in [\d.]+s.*", "", ran.stdout.strip().rpartition("\n")[2]).strip("= ")
    return [*cells, f"registers {backends}", summary], ran.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("releases", nargs="+", help="versions on PyPI, or latest")
    args = parser.parse_args()
    root = SOURCES.parent / "build/releases"
    plug_ins = root / "plug-ins"
    install = ["install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--upgrade", f"--target={plug_ins}"]
    subprocess.run([sys.executable, "-m", "pip", *install, SOURCES / PROGRAMS[args.program].plug_in], check=True)
    print(f"| {args.program} | start with the plug-in installed | tests on its classes |\n|-|-|-|")
    is_right = True
    for release in args.releases:
        cells, passed = row(args.program, unpacked(args.program, release, root), plug_ins)
        print(f"| {' | '.join(cells)} |", flush=True)
        is_right &= passed
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
