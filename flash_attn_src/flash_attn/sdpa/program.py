"""Runs a Python program in this process, as `python FILE ...` and `python -m MODULE ...` would."""

from __future__ import annotations

import pkgutil
import runpy
import sys
from collections.abc import Callable
from pathlib import Path


def run(words: list[str], command: str, begin: Callable[[], object]) -> None:
    """Calls `begin`, then runs the program that the words name. Exits with status 2 for words that name none.

    command: the module that takes the words, for its usage text.
    """
    usage = f"usage: python -m {command} FILE [argument ...]\n       python -m {command} -m MODULE [argument ...]"
    if words[:1] in (["-h"], ["--help"]):
        print(usage)
        return
    is_module = words[:1] == ["-m"]
    program = words[1:] if is_module else words
    if not program or (not is_module and not Path(program[0]).exists()):
        print(f"error: no program {program[0] if program else ''}\n{usage}", file=sys.stderr)
        raise SystemExit(2)
    begin()
    sys.argv = program
    if is_module:  # sys.path begins with the working directory already, as Python's own -m has it
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(_placed(program[0]), run_name="__main__")


def _placed(program: str) -> str:
    """The program for runpy. sys.path becomes what Python makes of it for that file.

    Python puts the file's directory where -m has put the working directory. It puts neither there with -P, with -I, and
    where a ._pth file lists the path. A directory or a zip file is an entry of its own, which runpy adds.
    """
    is_script = pkgutil.get_importer(program) is None
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        del sys.path[0]
        if is_script:
            sys.path.insert(0, str(Path(program).resolve().parent))
    return program if is_script else str(Path(program).resolve())
