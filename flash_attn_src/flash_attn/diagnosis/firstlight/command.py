"""The first hour on a GPU, in about ten minutes: `python -m flash_attn.firstlight`.

It runs the selftest, measures the GPU's latencies and rates, times published shapes beside PyTorch's
scaled_dot_product_attention, and compares the kernels of this wheel that can serve the same calls. It prints what it
found and writes a report in JSON. The report has versions, the GPU and its driver, errors and times. It names no person
and no host. Nothing is sent, nothing is compiled. Ctrl-C keeps what was measured. With --keep, later calls on this
machine take the kernels that were faster here. Exit code 0: everything is right; 1: not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flash_attn.core import build_info
from flash_attn.core.platform import PLATFORM
from flash_attn.diagnosis.console import accept_every_character
from flash_attn.diagnosis.firstlight import text
from flash_attn.diagnosis.firstlight.worker import PARTS
from flash_attn.diagnosis.selftest import command as selftest
from flash_attn.kernels.targets import serving_targets

FORMAT = 1  # of the report
_REPEATS = 100  # of the forward whose bits must not change
Line = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn.firstlight", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    accept_every_character()
    parser.add_argument("--json", type=Path, metavar="FILE", help="the report (flash-attn-firstlight-TARGET.json)")
    parser.add_argument("--gpu", type=int, metavar="N", help="the number of the GPU, as torch counts them")
    parser.add_argument(
        "--minutes", type=float, default=20, metavar="N", help="begin nothing after so many minutes (20)"
    )
    parser.add_argument("--keep", action="store_true", help="let later calls take the kernels that were faster here")
    arguments = parser.parse_args(argv)
    if not arguments.minutes > 0:
        parser.error(f"--minutes {arguments.minutes:g}: give a number above 0")
    # Imported here: the help is printed without torch.
    import torch

    import flash_attn
    from flash_attn.attention.backends import choice
    from flash_attn.diagnosis.selftest import machine, wheel

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        parser.error(f"torch sees no GPU: `{PLATFORM.python} -m flash_attn.doctor` says why")
    if arguments.gpu is not None and not 0 <= arguments.gpu < count:
        parser.error(f"--gpu {arguments.gpu}: torch sees {count} GPUs; the first one is 0")
    info = flash_attn.backend_info()
    gpu = arguments.gpu if arguments.gpu is not None else machine.chosen(tuple(info["targets"])) or 0
    if build_info.load().some_kernels and not {*serving_targets(machine.target(gpu), torch.version.hip)} & {
        *info["targets"]
    }:
        has, target = ", ".join(info["targets"]), machine.target(gpu)
        parser.error(
            f"this file is for {has}, and GPU {gpu} is a {target}: name another one by --gpu, or make a file by "
            f"`python -m rocm_wheels firstlight --target {target}` in a checkout of the repository"
        )
    path = arguments.json or Path(f"flash-attn-firstlight-{machine.target(gpu)}.json")
    if problem := selftest.unwritable(path):
        parser.error(f"--json {path}: {problem}, give a file that can be written")

    facts = wheel.facts() | {"gpu_backend": info["gpu_backend"]}
    report = gathered(gpu, machine.facts(gpu), facts, arguments.minutes)
    faster = _faster(report)
    print("\n".join(text.lines(report, faster)))
    if arguments.keep and faster:
        print(f"kept for this machine: {choice.write(machine.target(gpu), faster)}")
    elif faster:
        print(f"`{PLATFORM.python} -m flash_attn.firstlight --keep` lets calls take them")
    path.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"\n{'everything is right' if report['ok'] else 'something is wrong'}; the report is in {path}")
    return 0 if report["ok"] else 1


def gathered(gpu: int, machine: Mapping[str, Any], wheel: Mapping[str, Any], minutes: float) -> Line:
    """The report of all parts. minutes: nothing begins after them."""
    from flash_attn.diagnosis.selftest import report as reports

    end = time.monotonic() + 60 * minutes
    lines, trouble = selftest.run(str(gpu), _REPEATS, minutes)
    checks, speeds = ([line for line in lines if key in line] for key in ("check", "shape"))
    report = reports.build(machine, wheel, checks, speeds, trouble)
    report |= {"firstlight": FORMAT, "troubles": {}, **{part: [] for part in PARTS}}
    stopped = trouble if trouble.startswith(selftest.INTERRUPTED) else ""
    for part in PARTS:
        if not stopped:
            print(f"{part} ...", file=sys.stderr, flush=True)
            stopped = _measure(gpu, part, report, end)
        if stopped:
            report["troubles"].setdefault(part, stopped)
    failed = [line for line in report["shapes"] if reports.failed(line) and not text.lacks_memory(line)]
    report["ok"] = report["ok"] and not report["troubles"] and not failed
    return report


def _measure(gpu: int, part: str, report: Line, end: float) -> str:
    """Puts the lines of a part into the report. Returns why no part may follow, or "". end: by time.monotonic."""
    try:
        for line in selftest.lines_of("flash_attn.diagnosis.firstlight.worker", str(gpu), part):
            if "end" in line:
                report["troubles"][part] = line["end"]
            else:
                report[part].append(line)
            if time.monotonic() > end:
                return "the minutes of --minutes are over"
    except KeyboardInterrupt:
        return selftest.INTERRUPTED
    return ""


def _faster(report: Mapping[str, Any]) -> list[Any]:
    """The rows of providers that are faster than the ones that calls take now."""
    from flash_attn.diagnosis.firstlight import providers
    from flash_attn.kernels.providers import Row

    tuples = ("dtypes", "dims", "masks", "sources")
    rows = [Row(**row | {name: tuple(row[name]) for name in tuples}) for row in report["providers"]]
    return providers.better(rows)
