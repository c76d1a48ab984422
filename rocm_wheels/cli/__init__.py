"""`python -m rocm_wheels <verb>`: parses the command line and calls the stage; no logic of its own."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rocm_wheels.cli import build, kernels, pins, release, wheels
from rocm_wheels.errors import exit_code, writing_to

DESCRIPTION = "Builds, repairs and verifies ROCm wheels of flash_attn. No GPU and no ROCm needed."
EXAMPLES = """\
examples:
  python -m rocm_wheels plan 2.8.3 3.11 2.5.1 6.2
      what a build would do, as JSON; refused at once if the versions do not exist together
  python -m rocm_wheels build 2.8.3 3.11 2.5.1 6.2
      one wheel in dist/, for the GPU of this machine, else for targets that it names
  PYTORCH_ROCM_ARCH='gfx90a;gfx942' MAX_JOBS=4 python -m rocm_wheels build 2.8.3 3.11 2.5 6.2
      the same for two targets, four compile jobs at once
  python -m rocm_wheels compile --target gfx942 --shard 2/4
      the second quarter of the kernels of one target, into the cache
  python -m rocm_wheels compile --backend ck --target gfx942 --only 'fwd-bf16-d128-batch*'
      some kernels of Composable Kernel
  python -m rocm_wheels compile --target gfx942 --only 'fwd-bf16-d128' --tiles
      every tile that benchmarks/tune.py compares on the GPU
  python -m rocm_wheels tiles gfx1100 fwd d128
      which tile each score modifier takes
  python -m rocm_wheels inspect dist/flash_attn-*.whl
      targets, kernels and resources in a wheel
  python -m rocm_wheels which
      the line that installs flash_attn on this machine, or why there is none
  python -m rocm_wheels publish --tag v1.2.3 --dist dist --dry-run
      what a release of these wheels would hold
  python -m rocm_wheels index --dir dist --out site --repo owner/name --url http://127.0.0.1:8000/
      a package index of one's own wheels: python -m http.server --bind 127.0.0.1 --directory site
"""
# Verb that continues where an interrupted run stopped -> the remedy in the message of an interruption.
_COMPILED = "Run it again: it goes on from the kernels that are compiled."
AGAIN = {
    "build": _COMPILED,
    "compile": _COMPILED,
    "store": _COMPILED,
    "publish": "Run it again: it sends what the release lacks.",
}
OUTPUTS = ("output", "out", "target", "dist", "cache")  # options that name where a verb writes, its output first
SCRIPT_VERBS = ("plan", "check", "build")  # verbs that build_rocm.sh calls


def main(argv: Sequence[str] | None = None, *, usage: str = "") -> int:
    """Runs one verb and returns the exit code. A failure prints one message on stderr, never a traceback.

    usage: usage text of the calling script; shown on a command-line error in place of the usage of the verb.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may have a character that the console's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = _parser(usage).parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cancelled job ends like Ctrl-C
    return exit_code(lambda: _run(arguments), again=arguments.again)


def _run(arguments: argparse.Namespace) -> int:
    """Runs the verb. A write that fails because a disk is full names the directory of the verb's output."""
    places = (getattr(arguments, name, None) for name in OUTPUTS)
    with writing_to(next((place for place in places if isinstance(place, Path)), None)):
        code: int = arguments.run(arguments)
    return code


def _parser(usage: str = "") -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m rocm_wheels", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw
    )
    verbs = parser.add_subparsers(title="verbs", metavar="<verb>", required=True)
    for module in (build, kernels, wheels, pins, release):
        module.add_verbs(verbs)
    for script in (parser, *(verbs.choices[verb] for verb in SCRIPT_VERBS)) if usage else ():
        script.usage, script.prog = usage, usage.split()[0]
    for name, verb in verbs.choices.items():
        verb.allow_abbrev = False  # build_rocm.sh looks for exactly --plan and --docker
        verb.set_defaults(again=AGAIN.get(name, "Run it again."))
    return parser
