"""Installs the wheel of flash_attn into ComfyUI's Python, and runs the doctor; --undo removes it.

    python install.py [FOLDER] [--wheel FILE] [--undo]

pip installs nothing but the wheel: a dependency could replace ComfyUI's torch.

FOLDER: ComfyUI, its portable package, Stability Matrix, or any folder with one of them. Any Python 3.10 or newer runs
this file. On Windows install.bat looks for one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Where programs keep ComfyUI's Python: the portable package beside ComfyUI, the others in it.
ENVIRONMENTS = ("python_embeded", ".venv", "venv", "env")
PYTHONS = ("python.exe", "Scripts/python.exe", "bin/python")
# Folders below FOLDER that may be ComfyUI: of the portable package, and of Stability Matrix, portable or not.
PLACES = ("ComfyUI", "Data/Packages/*", "Packages/*")
RECORD = "flash_attn_before.json"  # in the environment: what --undo needs
WHEEL = "flash_attn-*+rocm*-win_amd64.whl" if os.name == "nt" else "flash_attn-*+rocm*manylinux*x86_64.whl"


class StopError(Exception):
    """A reason to stop, with what to do."""


def environments(folder: Path) -> list[Path]:
    """The Pythons of ComfyUI in a folder, or beside it where it is ComfyUI itself."""
    places = [folder, *(each for pattern in PLACES for each in sorted(folder.glob(pattern)))]
    if (folder / "main.py").is_file():
        places.append(folder.parent)
    pythons = [place / name / python for place in places for name in ENVIRONMENTS for python in PYTHONS]
    return list(dict.fromkeys(python for python in pythons if python.is_file()))


def one(found: Sequence[Path], what: str, where: str, remedy: str) -> Path:
    """The only path. Raises StopError for none and for several."""
    if len(found) == 1:
        return found[0]
    listed = "".join(f"\n  {path}" for path in found)
    raise StopError(f"{len(found) or 'no'} {what} in {where}{listed}\n{remedy}")


def environment(folder: Path) -> Path:
    """The Python of ComfyUI. Raises StopError if there is none, or more than one."""
    remedy = "Name the folder of ComfyUI or of its portable package: install.py FOLDER"
    return one(environments(folder), "Python of ComfyUI", str(folder), remedy)


def wheel(folders: Sequence[Path]) -> Path:
    """The newest wheel of the folders, the first folder first. Raises StopError if no folder has one."""
    for folder in folders:
        if wheels := sorted(folder.glob(WHEEL), key=lambda path: path.stat().st_mtime):
            return wheels[-1]
    places = ", ".join(map(str, folders))
    raise StopError(f"no {WHEEL} in {places}\nBuild one (docs/windows.md), or name it: install.py --wheel FILE")


def call(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs ComfyUI's Python without the user's own packages, as ComfyUI does. Only pip's questions are captured."""
    command = [str(python), "-s", *words]
    if words[:2] == ("-m", "pip") and words[2] in ("--version", "show"):
        return subprocess.run(command, capture_output=True, text=True, check=False)
    # Under Wine a program inherits pipes only if they are named.
    return subprocess.run(command, stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr, text=True, check=False)


def installed(python: Path) -> str:
    """The version of flash_attn there; "" for none. Raises StopError without pip."""
    if call(python, "-m", "pip", "--version").returncode != 0:
        raise StopError(f"{python} has no pip\nRun: {python} -m ensurepip")
    lines = call(python, "-m", "pip", "show", "flash_attn").stdout.splitlines()
    return next((line.removeprefix("Version: ") for line in lines if line.startswith("Version: ")), "")


def install(python: Path, file: Path) -> int:
    """Installs the wheel and returns the doctor's exit code. Raises StopError if pip fails."""
    record, before = python.parent / RECORD, installed(python)
    print(f"installing {file.name} into {python}", flush=True)
    if call(python, "-m", "pip", "install", "--no-deps", "--force-reinstall", str(file)).returncode != 0:
        raise StopError("pip failed: close ComfyUI, which keeps its files open, and run this again")
    if not record.is_file():  # an update keeps what was there before the first installation
        record.write_text(json.dumps({"before": before}), encoding="utf-8")
    return call(python, "-m", "flash_attn.doctor").returncode


def undo(python: Path) -> int:
    """Removes the wheel. Raises StopError if it was not installed by this program, or if pip fails."""
    record = python.parent / RECORD
    if not record.is_file():
        raise StopError(
            f"this program installed nothing into {python}\nTo remove flash_attn: {python} -m pip uninstall flash_attn"
        )
    # pip may remove nothing and return 0.
    if call(python, "-m", "pip", "uninstall", "-y", "flash_attn").returncode != 0 or installed(python):
        raise StopError("pip did not remove it: close ComfyUI, which keeps its files open, and run this again")
    before = json.loads(record.read_text(encoding="utf-8"))["before"]
    record.unlink()
    print(f"removed{f'; flash_attn {before} was there before, install it again from where it came' if before else ''}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="install.py", description=__doc__.splitlines()[0] if __doc__ else None)
    # Copied into custom_nodes, this file lies two folders below ComfyUI.
    default = HERE.parents[1] if (HERE.parents[1] / "main.py").is_file() else Path.cwd()
    parser.add_argument("folder", nargs="?", type=Path, default=default, help=f"where ComfyUI is (default: {default})")
    parser.add_argument(
        "--wheel", type=Path, help="the wheel (default: the newest in this folder, FOLDER or Downloads)"
    )
    parser.add_argument("--undo", action="store_true", help="remove what this program installed")
    options = parser.parse_args(argv)
    try:
        python = environment(options.folder.resolve())
        if options.undo:
            return undo(python)
        if options.wheel is not None and not options.wheel.is_file():
            raise StopError(f"there is no file {options.wheel}\nName the wheel: install.py --wheel FILE")
        return install(python, options.wheel or wheel([HERE, options.folder, Path.home() / "Downloads"]))
    except StopError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
