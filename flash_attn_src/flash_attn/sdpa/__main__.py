"""`python -m flash_attn.sdpa PROGRAM ...`: runs a Python program and serves its scaled_dot_product_attention.

PROGRAM is a file, or -m and a module, as Python itself takes them. A line on stderr says that it is active, and at the
end the report says which calls were served. An environment variable would need code that every start of Python runs:
so there is none.
"""

from __future__ import annotations

import atexit
import pkgutil
import runpy
import sys
from pathlib import Path

from flash_attn.sdpa import sdpa_report, use_for_sdpa

USAGE = (
    "usage: python -m flash_attn.sdpa FILE [argument ...]\n       python -m flash_attn.sdpa -m MODULE [argument ...]"
)


def main(words: list[str]) -> None:
    """Runs the program that the words name. Exits with status 2 for words that name none."""
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    is_module = words[:1] == ["-m"]
    program = words[1:] if is_module else words
    if not program or (not is_module and not Path(program[0]).exists()):
        print(f"error: no program {program[0] if program else ''}\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    use_for_sdpa()
    print("flash_attn: scaled_dot_product_attention is served where it can be", file=sys.stderr)
    atexit.register(lambda: print(sdpa_report(), file=sys.stderr))
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


if __name__ == "__main__":
    main(sys.argv[1:])
