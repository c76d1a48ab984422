"""Installs wheels for Windows on Windows, beside PyPI's torch for CPUs, and runs the doctor and the selftest of each.

    python wheel_tests/on_windows.py --installer pip --report REPORT.json DIRECTORY

DIRECTORY holds the wheels, at any depth. Only the standard library is needed. Exit code 0: every wheel passed; 1: one
did not, or there is none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parent.parent / "locks" / "build.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installer", choices=("pip", "uv"), default="pip", help="who installs torch and the wheels")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="where to write what passed, for `publish --windows`"
    )
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where the wheels are")
    arguments = parser.parse_args(argv)
    wheels = sorted(arguments.directory.rglob("flash_attn-*-win_amd64.whl"))
    if not wheels:
        print(f"error: {arguments.directory} holds no wheel for Windows", file=sys.stderr)
        return 1
    passed = []
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
            selftest = check(python, Path(scratch))
            passed.append({"wheel": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(), **selftest})
            print(f"{wheel.name}: passed with {arguments.installer}", flush=True)
    if arguments.report:
        report = {"installer": arguments.installer, "system": platform.platform(), "wheels": passed}
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def check(python: Path, scratch: Path) -> dict[str, Any]:
    """Runs the doctor, which has to find torch for CPUs and nothing else, and the selftest on the CPU.

    Returns the versions of Python and torch, and how many checks of the selftest passed.
    """
    done = subprocess.run(
        [python, "-m", "flash_attn.doctor", "--json"], cwd=scratch, stdout=subprocess.PIPE, encoding="utf-8",
        check=False,
    )  # fmt: skip
    found = [finding["key"] for finding in json.loads(done.stdout)["findings"]]
    if (found, done.returncode) != (["torch-cpu"], 1):
        raise SystemExit(f"the doctor found {found}, exit code {done.returncode}:\n{done.stdout}")
    written = scratch / "selftest.json"
    run([python, "-m", "flash_attn.selftest", "--cpu", "--json", written], cwd=scratch)
    report = json.loads(written.read_text(encoding="utf-8"))
    machine = report["machine"]
    checks = sum(line["ok"] is True for line in report["checks"])
    return {"python": machine["python"], "torch": machine["torch"], "checks": checks}


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
