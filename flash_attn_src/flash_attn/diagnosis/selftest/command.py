"""Checks this flash_attn on your GPU: `python -m flash_attn.selftest`, some minutes.

It compares calls of every kind, forward and backward, with fp32 on the same inputs, times six shapes beside PyTorch's
scaled_dot_product_attention, prints a table, and writes a report in JSON. The report has versions, the GPU and its
driver, errors and times. It names no person and no host. Nothing is sent. Exit code 0: everything is right; 1: not.
Without a GPU it runs fewer checks on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from flash_attn.core.platform import PLATFORM
from flash_attn.diagnosis.console import accept_every_character
from flash_attn.diagnosis.endings import ending
from flash_attn.diagnosis.selftest import cases, report, wheel
from flash_attn.diagnosis.selftest.worker import private, steps

_SILENCE_SECONDS = 300  # of a step; Triton may compile a kernel in it
_EMULATED_SILENCE_SECONDS = 3600  # of a step on an emulated GPU
_POLL_SECONDS = 0.5
_DEATHS = 3  # of the worker, before the run ends
_SHOWN_EVERY = 10
_EXCEPTION = re.compile(r"[\w.]+(?:Error|Exception): ")
INTERRUPTED = "interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn.selftest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accept_every_character()
    parser.add_argument("--json", type=Path, metavar="FILE", help="the report (flash-attn-selftest-TARGET.json)")
    parser.add_argument("--gpu", type=int, metavar="N", help="the number of the GPU, as torch counts them")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU though there is a GPU")
    parser.add_argument(
        "--repeats", type=int, metavar="N",
        help=f"runs of the forward whose bits must not change ({cases.REPEATS} on a GPU, {cases.CPU_REPEATS} on a CPU)",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no step after so many minutes (no limit)")
    arguments = parser.parse_args(argv)
    if arguments.repeats is not None and arguments.repeats < 2:
        parser.error(f"--repeats {arguments.repeats}: two runs are the fewest that can be compared, give 2 or more")
    if arguments.minutes is not None and not arguments.minutes > 0:
        parser.error(f"--minutes {arguments.minutes:g}: give a number above 0, or leave it out for no limit")
    # Imported here: the help is printed without torch.
    import torch

    import flash_attn
    from flash_attn.diagnosis.selftest import machine

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if arguments.gpu is not None and not 0 <= arguments.gpu < count:
        parser.error(f"--gpu {arguments.gpu}: torch sees {count} GPUs; the first one is 0")
    info = flash_attn.backend_info()
    gpu = arguments.gpu if arguments.gpu is not None else machine.chosen(tuple(info["targets"]))
    gpu = None if arguments.cpu else gpu
    path = arguments.json or Path(f"flash-attn-selftest-{'cpu' if gpu is None else machine.target(gpu)}.json")
    if problem := unwritable(path):
        parser.error(f"--json {path}: {problem}, give a file that can be written")
    if gpu is None:
        print("torch sees no GPU" if not count else "on the CPU, as asked", end="")
        doctor = f"`{PLATFORM.python} -m flash_attn.doctor`"
        print(f": fewer checks, no speed of a GPU. {doctor} says what is wrong", file=sys.stdout)

    lines, trouble = run("cpu" if gpu is None else str(gpu), arguments.repeats, arguments.minutes)
    content = report.build(
        machine.facts(gpu),
        wheel.facts() | {"gpu_backend": info["gpu_backend"]},
        [line for line in lines if "check" in line],
        [line for line in lines if "shape" in line],
        trouble,
    )
    print(report.table(content), flush=True)
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"\n{'everything is right' if content['ok'] else 'something is wrong'}; the report is in {path}")
    if gpu is not None and not PLATFORM.emulator():
        address = wheel.repository()
        where = f"{address}/{report.FORM}" if address else "an issue of the repository, form 'It ran on my GPU'"
        print(f"Please send it: paste it into {where}")
    return 0 if content["ok"] else 1


def unwritable(path: Path) -> str:
    """The reason why the report cannot be written, or "". Checked first, because the checks take minutes."""
    there = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        return str(error.strerror)
    return ""


def run(gpu: str, repeats: int | None = None, minutes: float | None = None) -> tuple[list[dict[str, Any]], str]:
    """The lines of all steps, and the reason why the run ended early, or "". minutes: no step begins after them.

    A step that ends the process counts as failed, and a new process continues after it. Ctrl-C ends the run early.
    """
    lines: list[dict[str, Any]] = []
    try:
        return lines, _fill(lines, gpu, repeats, minutes)
    except KeyboardInterrupt:
        return lines, f"{INTERRUPTED} after {len(lines)} steps"


def _fill(lines: list[dict[str, Any]], gpu: str, repeats: int | None, minutes: float | None) -> str:
    """Appends the lines of all steps; returns the reason why not all of them."""
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    repeats = repeats or (cases.CPU_REPEATS if gpu == "cpu" or PLATFORM.emulator() else cases.REPEATS)
    planned = steps(gpu == "cpu", repeats)
    deaths = 0
    while len(lines) < len(planned):
        end = ""
        for line in lines_of("flash_attn.diagnosis.selftest.worker", gpu, str(len(lines)), str(repeats)):
            if "end" in line:
                end = line["end"]
            elif "begin" in line:
                if time.monotonic() > deadline:
                    left = len(planned) - len(lines)
                    return f"{minutes:g} minutes are over: {left} of {len(planned)} steps did not run"
            else:
                lines.append(line)
                _progress(len(lines), len(planned))
        if len(lines) < len(planned):
            step, deaths = planned[len(lines)], deaths + 1
            lines.append(_lost(step, end or "the process ended"))
            if deaths == _DEATHS:
                return f"the process of the selftest ended {deaths} times: the remaining steps did not run"
    return ""


def _lost(step: Any, why: str) -> dict[str, Any]:
    """The line of a step that did not end."""
    if hasattr(step.what, "group"):
        line = {"check": step.name, "group": step.what.group, "ok": False, "forward": None, "backward": None}
        return line | {"limits": list(step.what.limits), "kernels": [], "notes": [], "failure": why, "seconds": 0.0}
    return {"shape": step.name, "failure": why}


# A worker has this process's path: a portable Python with a file ._pth reads no PYTHONPATH.
_RUN = """import json, runpy, sys
sys.path[:] = json.loads(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)"""


def lines_of(module: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """Yields the lines of a worker when they arrive. If the worker was ended, the last line is {"end": how}.

    module: the worker, which prints lines of JSON.

    A child of the worker may keep its pipes open after its death, so they are read in threads that nothing waits for.
    """
    command = [sys.executable, "-c", _RUN, json.dumps(sys.path), module, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    words: list[str] = []
    readers = [_reader(process.stdout, lines.put), _reader(process.stderr, words.append)]
    patience = _EMULATED_SILENCE_SECONDS if PLATFORM.emulator() else _SILENCE_SECONDS
    silent = False
    deadline = time.monotonic() + patience
    try:
        while not silent and (process.poll() is None or readers[0].is_alive()):
            try:
                text = lines.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if process.poll() is not None:
                    break  # what it wrote has arrived
                silent = time.monotonic() > deadline
                continue
            deadline = time.monotonic() + patience
            yield from _parsed(text)
        while not lines.empty():
            yield from _parsed(lines.get())
    finally:
        process.kill()
        code = process.wait()
        readers[1].join(_POLL_SECONDS)
    if silent:
        yield {"end": f"it printed nothing for {patience} s"}
    elif code:
        said = [line for line in words if _EXCEPTION.match(line)] or words  # torch's message has several lines
        last = private(said[-1].strip()) if said else ""
        yield {"end": f"the process ended with {ending(code)}{': ' + last if last else ''}"}


def _reader(pipe: IO[str] | None, take: Callable[[str], None]) -> threading.Thread:
    """Starts a thread that hands over the lines of a pipe, and closes it at its end."""

    def read() -> None:
        with cast("IO[str]", pipe) as lines:
            for line in lines:
                take(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _parsed(text: str) -> Iterator[dict[str, Any]]:
    with suppress(ValueError):  # the last line may be incomplete if the process died
        yield json.loads(text)


def _progress(done: int, planned: int) -> None:
    if sys.stderr.isatty() or done % _SHOWN_EVERY == 0 or done == planned:
        end = "\r" if sys.stderr.isatty() and done < planned else "\n"
        print(f"{done} of {planned}", end=end, file=sys.stderr, flush=True)
