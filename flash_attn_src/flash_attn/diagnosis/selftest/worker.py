"""Runs the steps of the selftest in a process of its own, because a faulty kernel can end the process.

`python -m flash_attn.diagnosis.selftest.worker GPU SKIP REPEATS` takes the number of the GPU, or cpu, how many steps to
leave out, and how often to run the forward whose bits must not change. Each line on stdout is a JSON object;
{"begin": name} comes before each step.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flash_attn.core.platform import PLATFORM
from flash_attn.diagnosis.selftest import cases
from flash_attn.diagnosis.selftest.cases import Case, Shape

_SHOWN = 300  # characters of a message
_DIRECTORY = re.compile(r"(?:~|(?<![\w.])/)[^\s:'\"(),]*/")
# From a drive or a server to the last slash. A name of Windows may have spaces.
_DIRECTORY_OF_WINDOWS = re.compile(r"(?:(?<!\w)[A-Za-z]:|\\)[\\/](?:[^\\/:'\"(),\n]*[\\/]+)*")


class Step(NamedTuple):
    """One line of the report: a check or a shape to time."""

    name: str
    what: Case | Shape


def steps(on_cpu: bool, repeats: int) -> list[Step]:
    """All steps of a run, in order. repeats: as `cases.cases` takes it. Nothing is timed on an emulated GPU."""
    checks = [case for case in cases.cases(repeats) if case.on_cpu or not on_cpu]
    shapes = cases.CPU_SPEEDS if on_cpu else () if PLATFORM.emulator() else cases.SPEEDS
    return [*(Step(case.name, case) for case in checks), *(Step(shape.name, shape) for shape in shapes)]


def checked(case: Case, device: str) -> dict[str, Any]:
    """The line of a check: {"check", "group", "ok", "forward", "backward", "limits", "kernels", "seconds", "notes",
    "failure"}.

    ok is None where this GPU cannot do it. kernels are the ones that ran, none on a CPU. notes are the warnings of the
    call.
    """
    from flash_attn.core.device import clear_kernels, kernels
    from flash_attn.diagnosis.selftest import checks

    line: dict[str, Any] = {"check": case.name, "group": case.group, "ok": False, "forward": None, "backward": None}
    line |= {"limits": list(case.limits), "kernels": [], "notes": [], "failure": ""}
    clear_kernels()
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            forward, backward = checks.run(case, device)
        except NotImplementedError as error:
            line |= {"ok": None, "failure": private(str(error))}
        except Exception as error:
            line["failure"] = private(f"{type(error).__name__}: {error}")
        else:
            line |= _judged(case, forward, backward)
    line["kernels"] = sorted(
        {str(getattr(key[1], "name", key[1])) for key, kernel in kernels.items() if hasattr(kernel, "launch")}
    )
    line["notes"] = sorted({private(str(warning.message)) for warning in said})
    line["seconds"] = round(time.perf_counter() - started, 3)
    return line


def _judged(case: Case, forward: float, backward: float | None) -> dict[str, Any]:
    errors = (forward, backward)
    if not all(error is None or math.isfinite(error) for error in errors):
        return {"failure": "the result holds values that are not finite"}
    fits = all(error is None or error <= limit for error, limit in zip(errors, case.limits, strict=True))
    failure = "" if fits else "the error is larger than allowed"
    rounded = [None if error is None else float(f"{error:.2e}") for error in errors]
    return {"ok": fits, "forward": rounded[0], "backward": rounded[1], "failure": failure}


def private(text: str) -> str:
    """A message without the directories in it, which may name a person, and not too long."""
    return _DIRECTORY.sub(r".../", _DIRECTORY_OF_WINDOWS.sub(".../", text))[:_SHOWN]


def _run(step: Step, device: str) -> Mapping[str, Any]:
    return checked(step.what, device) if isinstance(step.what, Case) else timed(step.what, device)


def timed(shape: Shape, device: str) -> dict[str, Any]:
    """The line of a shape: what `speed.measure` returns, or {"shape", "failure"}."""
    from flash_attn.diagnosis.selftest import speed

    try:
        return speed.measure(shape, device)
    except Exception as error:
        return {"shape": shape.name, "failure": private(f"{type(error).__name__}: {error}")}


def main(argv: Sequence[str]) -> int:
    gpu, skip, repeats = argv
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=answers, flush=True)

    import torch

    device = "cpu" if gpu == "cpu" else "cuda"
    finish: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        torch.cuda.set_device(int(gpu))
    for step in steps(device == "cpu", int(repeats))[int(skip) :]:
        answer({"begin": step.name})
        line = _run(step, device)
        finish()
        answer(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
