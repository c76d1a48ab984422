"""Stand-ins for what takes hours: the compiler, tests of wheels, the crate's check. They write tiny files."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import fake_parts
import wheelhouse

import create_matrix
from rocm_wheels import cli
from rocm_wheels.matrix import names, plan, versions
from rocm_wheels.publish import github
from rocm_wheels.wheel import build, numbering


def assemble(words: list[str]) -> None:
    """The verb `assemble`. BUILD_CHANGE is what has changed since the last release."""
    parser = argparse.ArgumentParser()
    for option in ("--rows", "--dist", "--cache", "--published"):
        parser.add_argument(option)
    options = parser.parse_args(words)
    data = versions.load()
    public = numbering.load(Path(options.published)) if options.published else []
    for name, gpus in json.loads(options.rows):
        planned, *_ = plan.of_row(data, name, gpus)  # without the wheel for Windows
        targets, payload = gpus.split(";"), os.environ.get("BUILD_CHANGE", "")
        wheel = wheelhouse.write(Path(options.dist), planned.cell, targets=targets, payload=payload)
        wheel.with_name(f"{wheel.name}{names.VERDICT}").unlink()
        numbering.assign(wheel, public)


def verify(wheels: list[str]) -> None:
    """The verb `verify`. BUILD_FAILS is part of the name of a wheel that does not pass."""
    for wheel in map(Path, wheels):
        ok = os.environ.get("BUILD_FAILS", "nothing") not in wheel.name
        wheelhouse.write_verdict(wheel, targets=build.plan_of(wheel).targets, ok=ok)
        if not ok:
            sys.exit(f"{wheel.name} did not pass")


def main(program: str, words: list[str]) -> None:
    """A command of a workflow."""
    if program == "create_matrix.py":
        sys.exit(create_matrix.main(words))
    if program == "check.sh":
        packed = Path("candle-flash-rocm/target/package")
        packed.mkdir(parents=True)
        fake_parts.crate(packed, wheelhouse.COMMIT)
    elif program == "python" and words[2] == "assemble":
        assemble(words[3:])
    elif program == "python" and words[2] == "verify":
        verify([word for word in words if word.endswith(".whl")])
    elif program == "python" and words[2] == "compile":
        Path("build/cache/kernels").mkdir(parents=True, exist_ok=True)
        Path("build/cache/kernels/kernel").write_text("code")
    elif program == "python":
        github.BACKOFF_SECONDS = 0.01
        sys.exit(cli.main(words[2:]))


def serve(address: str) -> None:
    """Runs the commands that arrive at a socket, each in a fork: imports take longer than the commands."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                request, files, *_ = socket.recv_fds(connection, 1 << 20, 2)
                if (child := os.fork()) == 0:
                    _run(json.loads(request), files)
                for file in files:
                    os.close(file)
                connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def _run(request: dict[str, Any], files: list[int]) -> NoReturn:
    for standard, file in enumerate(files, 1):
        os.dup2(file, standard)
    sys.stdout, sys.stderr = (os.fdopen(standard, "w") for standard in (1, 2))
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    code: object = 0
    try:
        main(request["program"], request["words"])
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(sys.argv[1])
