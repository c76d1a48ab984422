"""The first hour on a GPU, in about ten minutes: `python -m flash_attn.firstlight`.

It runs the selftest, measures the GPU's latencies and rates, times published shapes beside PyTorch's
scaled_dot_product_attention, and compares the kernels of this wheel that can serve the same calls. It prints what it
found and writes a report in JSON. The report has versions, the GPU and its driver, errors and times. It names no person
and no host. Nothing is sent, nothing is compiled. With --keep, later calls on this machine take the kernels that were
faster here. Exit code 0: everything is right; 1: not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flash_attn.diagnosis.console import accept_every_character
from flash_attn.diagnosis.firstlight import text
from flash_attn.diagnosis.firstlight.worker import PARTS
from flash_attn.diagnosis.selftest import command as selftest
from flash_attn.runtime.platform import PLATFORM

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
    parser.add_argument("--keep", action="store_true", help="let later calls take the kernels that were faster here")
    arguments = parser.parse_args(argv)
    # Imported here: the help is printed without torch.
    import torch

    import flash_attn
    from flash_attn.backends import choice
    from flash_attn.diagnosis.selftest import machine, wheel

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        parser.error("torch sees no GPU: `python -m flash_attn.doctor` says why")
    if arguments.gpu is not None and not 0 <= arguments.gpu < count:
        parser.error(f"--gpu {arguments.gpu}: torch sees {count} GPUs; the first one is 0")
    info = flash_attn.backend_info()
    gpu = arguments.gpu if arguments.gpu is not None else machine.chosen(tuple(info["targets"])) or 0
    path = arguments.json or Path(f"flash-attn-firstlight-{machine.target(gpu)}.json")
    if problem := selftest.unwritable(path):
        parser.error(f"--json {path}: {problem}, give a file that can be written")

    report = gathered(gpu, machine.facts(gpu), wheel.facts() | {"gpu_backend": info["gpu_backend"]})
    faster = _faster(report)
    print("\n".join(text.lines(report, faster)))
    if arguments.keep and faster:
        print(f"kept for this machine: {choice.write(machine.target(gpu), faster)}")
    elif faster:
        print(f"`{PLATFORM.python} -m flash_attn.firstlight --keep` lets calls take them")
    path.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"\n{'everything is right' if report['ok'] else 'something is wrong'}; the report is in {path}")
    return 0 if report["ok"] else 1


def gathered(gpu: int, machine: Mapping[str, Any], wheel: Mapping[str, Any]) -> Line:
    """The report of all parts."""
    from flash_attn.diagnosis.selftest import report as reports

    lines, trouble = selftest.run(str(gpu), _REPEATS)
    checks, speeds = ([line for line in lines if key in line] for key in ("check", "shape"))
    report = reports.build(machine, wheel, checks, speeds, trouble)
    report |= {"firstlight": FORMAT, "troubles": {}}
    for part in PARTS:
        print(f"{part} ...", file=sys.stderr, flush=True)
        found: list[Line] = []
        for line in selftest.lines_of("flash_attn.diagnosis.firstlight.worker", str(gpu), part):
            if "end" in line:
                report["troubles"][part] = line["end"]
            else:
                found.append(line)
        report[part] = found
    report["ok"] = report["ok"] and not report["troubles"]
    return report


def _faster(report: Mapping[str, Any]) -> list[Any]:
    """The rows of providers that are faster than the ones that calls take now."""
    from flash_attn.diagnosis.firstlight import providers
    from flash_attn.kernels.providers import Row

    tuples = ("dtypes", "dims", "masks", "sources")
    rows = [Row(**row | {name: tuple(row[name]) for name in tuples}) for row in report["providers"]]
    return providers.better(rows)
