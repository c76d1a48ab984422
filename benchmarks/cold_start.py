"""From the start of a process to its first result: kernels compiled ahead of time, Triton's JIT, PyTorch's SDPA.

    python benchmarks/cold_start.py [--json results.json] [--rounds 3]

Every figure is seconds since the process was started, the median over rounds in which all take turns. "JIT" compiles
into an empty cache, "JIT, cached" finds what it compiled before; "store" runs with Triton out of reach. The first
result is a forward, then a backward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PHASES = ("interpreter", "torch", "device", "flash_attn", "forward", "backward")
_PROGRAM = """
import json, sys, time
started, way, device = float(sys.argv[1]), sys.argv[2], sys.argv[3]
marks = {"interpreter": time.time() - started}
def mark(name):
    if device != "cpu":
        torch.cuda.synchronize()
    marks[name] = time.time() - started
if way == "store":
    sys.modules["triton"] = None
import torch
marks["torch"] = time.time() - started
torch.ones(1, device=device).item()
mark("device")
if way == "SDPA":
    def attention(q, k, v):
        flipped = [x.transpose(1, 2) for x in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*flipped, is_causal=True).transpose(1, 2)
else:
    import flash_attn
    if way.startswith("JIT"):
        from flash_attn.core import store
        store.open_store = lambda *_: None
    def attention(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, causal=True)
mark("flash_attn")
q, k, v = torch.ones(3, 1, 128, 4, 64, device=device, dtype=torch.bfloat16).requires_grad_().unbind(0)
out = attention(q, k, v)
mark("forward")
out.sum().backward()
mark("backward")
print(json.dumps(marks))
"""


def start(way: str, device: str, cache: Path) -> dict[str, float] | str:
    """Seconds to each phase of one process, or why it ended before the last."""
    variables = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", _PROGRAM, repr(time.time()), way, device]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="processes of each (3)")
    parser.add_argument("--device", metavar="NAME", help="cuda or cpu (cuda)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here too")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"argument --rounds: {options.rounds} is not a whole number above 0")
    from measuring import chosen_device, environment, results, writable, write

    if options.json is not None:
        writable(str(options.json))
    device = chosen_device(options.device)
    machine = environment(device)
    print(f"{machine['device']}, torch {machine['torch']}, flash_attn {machine['flash_attn']}, seconds since the start")
    ways = ("store", "JIT", "JIT, cached", "SDPA") if device.type == "cuda" else ("pure PyTorch", "SDPA")
    times: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    why: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="cold-start-") as directory:
        for number in range(options.rounds):
            for way in ways:
                # What "JIT" leaves behind is what "JIT, cached" of the same round finds.
                outcome = start(way, str(device), Path(directory) / str(number))
                if isinstance(outcome, str):
                    why[way] = outcome
                else:
                    times[way].append(outcome)
                print(f"round {number + 1} of {options.rounds}, {way}", file=sys.stderr, flush=True)

    summary: dict[str, Any] = {
        way: {phase: statistics.median(each[phase] for each in rows) for phase in PHASES}
        for way, rows in times.items()
        if rows
    }
    print(f"{'':<14}" + "".join(f"{phase:>13}" for phase in PHASES) + f"{'after device':>15}")
    for way, medians in summary.items():
        after = medians["forward"] - medians["device"]
        print(f"{way:<14}" + "".join(f"{medians[phase]:>13.3f}" for phase in PHASES) + f"{after:>15.3f}")
    print('"after device": from a torch that has its device to the first result')
    for way, reason in why.items():
        print(f"{way} cannot run: {reason}")
    if options.json is not None:
        samples = {
            f"{way} first forward s": [each["forward"] - each["device"] for each in rows]
            for way, rows in times.items()
            if rows and way != "SDPA"
        }
        config = {"rounds": options.rounds, "device": str(device)}
        write(
            options.json,
            results(
                "cold_start", machine, config, metrics=times, summary=summary | {"cannot_run": why}, samples=samples
            ),
        )


if __name__ == "__main__":
    main()
