"""Prints what a user of Windows can be told, under a line with the place that each message comes from.

The first argument is a directory with a stand-in of torch, the others are HIP runtimes for the launcher.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

_PYTHON = r"C:\ComfyUI\python_embeded\python.exe"


_printed: set[str] = set()


def say(place: str, *messages: str) -> None:
    """Prints the messages that were not printed yet."""
    new = [message.replace(sys.executable, _PYTHON) for message in messages if message not in _printed]
    _printed.update(messages)
    if new:
        print(f"== {place}", *new, sep="\n", flush=True)


def raised(act: Callable[[], object]) -> str:
    """The error of a call, or what it warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "\n".join(f"{each.category.__name__}: {each.message}" for each in said)


def doctor() -> None:
    """Its findings on every made-up machine, as if each ran Windows."""
    from flash_attn.diagnosis import findings
    from made_up_machines import CASES  # type: ignore[import-not-found]

    for _, machine, _ in CASES:
        facts = replace(machine, windows=True, has_kfd=False, kfd=None, dxg=None, render=(), executable=_PYTHON)
        for finding in findings.examine(facts):
            say(f"doctor, {finding.key}", finding.what, finding.remedy)


def launcher(*runtimes: str) -> None:
    """Its errors without a runtime, and with two."""
    from flash_attn import _launcher

    say("launcher, no runtime", raised(lambda: _launcher.bind("hip")))
    say("launcher, no driver of NVIDIA", raised(lambda: _launcher.bind("cuda")))
    for path in runtimes:
        ctypes.CDLL(path)
    text = raised(lambda: _launcher.bind("hip"))
    for number, path in enumerate(runtimes, 1):
        text = text.replace(path, f"RUNTIME {number}")
    say("launcher, two runtimes", text)


def calls() -> None:
    """Errors and warnings on GPUs without kernels, without Triton and with Tritons of several ages."""
    from flash_attn.core import build_info, driver, jit, stored, watchdog
    from flash_attn.core.environment import MAX_LAUNCH_SECONDS
    from flash_attn.diagnosis import info
    from flash_attn.kernels import variants

    jit.JitKernel = lambda *_, **__: None  # type: ignore[misc,assignment]
    (variant, *_) = variants.table("gfx1030")
    wheel = replace(build_info.load(), label="rocm", torch="", rocm="", targets=("gfx1030",))
    for target in ("gfx1201", "gfx906", "gfx942"):  # the last two have no wheel for Windows
        device = driver.Driver.__new__(driver.Driver)
        device.index, device.target, device.compute_units = 0, target, 60
        for version in ("", "3.0.0", "3.9.0"):
            jit.triton_version.cache_clear()
            sys.modules.pop("triton", None)
            if version:
                sys.modules["triton"] = types.SimpleNamespace(__version__=version)  # type: ignore[assignment]
            with_triton = f"{target}, Triton {version or 'none'}"
            say(f"call, {with_triton}", raised(partial(device.kernel, variant)))
            say(f"backend_info, {with_triton}", *info._target_problems(wheel, [target]))
    for version, hip in (("2.12.0", None), ("2.12.0+cpu", None)):
        say(f"import, torch {version}", *info.torch_problems(wheel, version, hip))
    kernel = types.SimpleNamespace()
    lost = RuntimeError("hipErrorLaunchFailure: unspecified launch failure")
    lost.code = 719  # type: ignore[attr-defined]
    say("call, a lost GPU", raised(lambda: stored.explain(lost)))
    os.environ[MAX_LAUNCH_SECONDS] = "soon"
    say("call, a wrong limit", raised(lambda: watchdog.watched(kernel, variant, device)))


def selftest() -> None:
    """How a worker can end, and a message with a directory in it."""
    from flash_attn.diagnosis.endings import ending
    from flash_attn.diagnosis.selftest import worker

    say("selftest, endings", *map(ending, (1, 0xC0000005, 0xC000001D, 0xC00000FD, 0xC0000135, 0xC0000409, 0xC0000001)))
    say(
        "selftest, no directory",
        worker.private(r"C:\Users\Jane Doe\torch\c10.dll, see D:/a b/c.txt"),
    )


if __name__ == "__main__":
    torch_directory, *runtimes = sys.argv[1:]
    sys.orig_argv.append("flash_attn.doctor")  # flash_attn then imports no torch
    sys.path.insert(0, torch_directory)
    doctor()
    launcher(*runtimes)
    calls()
    selftest()
