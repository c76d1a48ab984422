"""CPU time of one call on small tensors: kernels compiled ahead of time, Triton's JIT, upstream, and PyTorch's SDPA.

    python benchmarks/launch_overhead.py [--json results.json] [--upstream DIR]

The GPU has next to nothing to do, so that a call costs what Python and the launch cost; figures are medians, in µs.
"store" and "JIT" launch the same kernels by the two ways that this package has; they take turns in one process.
--upstream names a directory with another flash_attn (pip install --target DIR --no-deps flash-attn), which gets a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import chosen_device, count, environment, host_microseconds, results, writable, write
from torch.nn.functional import scaled_dot_product_attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
WAYS = ("forward", "forward with gradients", "backward")


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    import flash_attn

    return flash_attn.flash_attn_func(q, k, v, causal=True)


def measure(attention: Attention, device: torch.device) -> dict[str, list[float]]:
    """µs of each way to call it."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 128, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    with torch.no_grad():
        times = {"forward": host_microseconds(lambda: attention(q, k, v), device)}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    times["forward with gradients"] = host_microseconds(lambda: attention(*leaves), device)
    out = attention(*leaves)
    times["backward"] = host_microseconds(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device)
    return times


class Launching:
    """This package's kernels by one way alone: those that it finds are kept apart from the other way's."""

    def __init__(self, way: str, device: torch.device) -> None:
        from flash_attn.core import device as seam
        from flash_attn.core import jit, store

        self.seam, self.store = seam, store
        self.open_store = store.open_store if way == "store" else lambda *_: None
        self.kernels: dict[Any, Any] = {}
        target = seam.of(device.index or 0).target
        if way == "store" and store.open_store(target) is None:
            raise RuntimeError(f"this flash_attn has no kernels for {target}, only for {store.targets() or 'none'}")
        if way == "JIT":
            if problem := jit.triton_problem():
                raise RuntimeError(problem)
            warnings.filterwarnings("ignore", "this flash_attn has no kernels")  # none is wanted

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash(q, k, v)

    def select(self) -> None:
        self.store.open_store = self.open_store
        self.seam.kernels = self.kernels


def launching(way: str, device: torch.device) -> Attention | str:
    """This package's attention by one way, or why that cannot be had."""
    try:
        return Launching(way, device)
    except (RuntimeError, ImportError) as error:
        return str(error)


def implementations(device: torch.device) -> dict[str, Attention | str]:
    """Name to attention, or to why it cannot run."""
    if device.type == "cpu":
        return {"pure PyTorch": flash, "SDPA": sdpa}
    return {"store": launching("store", device), "JIT": launching("JIT", device), "SDPA": sdpa}


def upstream(directory: Path, device: torch.device) -> dict[str, list[float]] | str:
    """What `measure` finds for the flash_attn of another directory, or why not."""
    variables = {**os.environ, "PYTHONPATH": str(directory.resolve()), "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
    command = [sys.executable, __file__, "--device", str(device), "--alone"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    times: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="turns of each (5)")
    parser.add_argument("--upstream", type=Path, metavar="DIR", help="a directory with another flash_attn in it")
    parser.add_argument("--device", metavar="NAME", help="cuda or cpu (cuda)")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write every figure here too")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    device = chosen_device(options.device)
    if options.alone:
        print(json.dumps(measure(flash, device)))
        return
    if options.upstream is not None and not (options.upstream / "flash_attn").is_dir():
        raise SystemExit(f"error: --upstream {options.upstream}: there is no flash_attn in it")

    machine = environment(device)
    print(f"{machine['device']}, torch {machine['torch']}, flash_attn {machine['flash_attn']}, µs of CPU time a call")
    calls = implementations(device)
    why = {name: reason for name, reason in calls.items() if isinstance(reason, str)}
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for name, attention in calls.items():
            if isinstance(attention, str):
                continue
            if isinstance(attention, Launching):
                attention.select()
            for way, values in measure(attention, device).items():
                times.setdefault(name, {}).setdefault(way, []).extend(values)
    if options.upstream is not None:
        there = upstream(options.upstream, device)
        if isinstance(there, str):
            why["upstream"] = there
        else:
            times["upstream"] = there

    summary = {name: {way: statistics.median(values) for way, values in ways.items()} for name, ways in times.items()}
    print(f"{'':<14}" + "".join(f"{way:>24}" for way in WAYS))
    for name, medians in summary.items():
        print(f"{name:<14}" + "".join(f"{medians[way]:>24.1f}" for way in WAYS))
    for name, reason in why.items():
        print(f"{name} cannot run: {reason}")
    if options.json is not None:
        ours = {name: ways for name, ways in times.items() if name not in ("SDPA", "upstream")}
        samples = {f"{name} {way} us": values for name, ways in ours.items() for way, values in ways.items()}
        config = {"rounds": options.rounds, "device": str(device)}
        write(
            options.json,
            results(
                "launch_overhead",
                machine,
                config,
                metrics=times,
                summary=summary | {"cannot_run": why},
                samples=samples,
            ),
        )


if __name__ == "__main__":
    main()
