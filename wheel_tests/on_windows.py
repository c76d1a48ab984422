"""Installs wheels for Windows on Windows, beside PyPI's torch for CPUs, and runs the doctor and the selftest of each.

    python wheel_tests/on_windows.py --installer pip DIRECTORY

DIRECTORY holds the wheels, at any depth. Only the standard library is needed. Exit code 0: every wheel passed; 1: one
did not, or there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "locks" / "build.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installer", choices=("pip", "uv"), default="pip", help="who installs torch and the wheels")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where the wheels are")
    arguments = parser.parse_args(argv)
    wheels = sorted(arguments.directory.rglob("flash_attn-*-win_amd64.whl"))
    if not wheels:
        print(f"error: {arguments.directory} holds no wheel for Windows", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        env = Path(scratch) / "an environment"  # with a space
        run([sys.executable, "-m", "venv", env])
        python = env / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        install: list[str | Path] = [python, "-m", "pip", "install", "--no-input"]
        if arguments.installer == "uv":
            run([*install, "--require-hashes", "-r", locked("uv", Path(scratch))])
            install = [python, "-m", "uv", "pip", "install", "--python", python]
        run([*install, "torch", "--index-url", TORCH_INDEX])
        for wheel in wheels:
            run([*install, "--reinstall" if arguments.installer == "uv" else "--force-reinstall", "--no-deps", wheel])
            run([*install, wheel])  # what it requires
            check(python, Path(scratch))
            print(f"{wheel.name}: passed with {arguments.installer}", flush=True)
    return 0


def check(python: Path, scratch: Path) -> None:
    """Runs the doctor, which has to find torch for CPUs and nothing else, and the selftest on the CPU."""
    done = subprocess.run(
        [python, "-m", "flash_attn.doctor", "--json"], cwd=scratch, stdout=subprocess.PIPE, encoding="utf-8",
        check=False,
    )  # fmt: skip
    found = [finding["key"] for finding in json.loads(done.stdout)["findings"]]
    if (found, done.returncode) != (["torch-cpu"], 1):
        raise SystemExit(f"the doctor found {found}, exit code {done.returncode}:\n{done.stdout}")
    run([python, "-m", "flash_attn.selftest", "--cpu", "--json", scratch / "selftest.json"], cwd=scratch)


def locked(name: str, scratch: Path) -> Path:
    """A requirements file with one package of the lock, and its hashes."""
    entry = re.search(rf"^{name}==.*\n(?: .*\n)*", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if entry is None:
        raise SystemExit(f"{LOCK} does not have {name}")
    path = scratch / f"{name}.txt"
    path.write_text(entry[0], encoding="utf-8")
    return path


def run(command: Sequence[str | Path], *, cwd: Path | None = None) -> None:
    print("$", *command, flush=True)
    if (code := subprocess.run(list(map(str, command)), cwd=cwd, check=False).returncode) != 0:
        raise SystemExit(f"error: exit code {code}")


if __name__ == "__main__":
    sys.exit(main())
