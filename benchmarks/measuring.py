"""What the benchmarks share: times on a GPU or a CPU, the machine they ran on, their results as JSON.

Results are one JSON object: benchmark (its name), environment, config (every option, resolved), metrics (raw and per
case), summary, and samples: {name with unit: [values]} of flash_attn's own figures, of which smaller is better.
trend.py reads samples.
"""

from __future__ import annotations

import argparse
import datetime
import io
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

if isinstance(sys.stdout, io.TextIOWrapper):  # a table has characters that the encoding of a console may lack
    sys.stdout.reconfigure(errors="backslashreplace")


class Shape(NamedTuple):
    """Sizes of q, k and v, and whether the mask is causal."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Of the forward."""
        full = 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return full / 2 if self.causal else full


def chosen_device(name: str | None) -> torch.device:
    """The device of an option: the GPU unless a CPU is asked for. SystemExit where there is no such device."""
    device = torch.device(name or "cuda")
    if device.type not in ("cuda", "cpu"):
        raise SystemExit(f"error: --device {name}: it is cuda or cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"error: torch {torch.__version__} sees no GPU; --device cpu exercises this on the CPU")
        if device.index is not None:
            torch.cuda.set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], object], repeats: int = 10, device: torch.device | None = None) -> float:
    """Time of one call on the device (None: the GPU), averaged over a burst."""
    if device is not None and device.type == "cpu":
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - started) * 1e3 / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def replayed(call: Callable[[], object], repeats: int) -> Callable[[], float]:
    """What measures the milliseconds of one call on the GPU each time it is called: a graph of several is replayed, so
    that the host takes no part in it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes the tensors
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    return lambda: milliseconds(graph.replay, 1) / repeats


def each_milliseconds(call: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Times of calls that follow each other; the GPU is waited for once, at the end."""
    if device.type == "cpu":
        return [milliseconds(call, 1, device) for _ in range(count)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def host_microseconds(call: Callable[[], object], device: torch.device | None = None) -> list[float]:
    """CPU time of one call, while the device (None: the GPU) keeps up: the average of each of 20 bursts of 10."""
    where = device or torch.device("cuda")
    for _ in range(20):
        call()
    synchronize(where)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(10):
            call()
        times.append((time.perf_counter() - started) * 1e5)
        synchronize(where)
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions, JSON-ready."""
    machine: dict[str, Any] = {"device": platform.processor() or platform.machine(), "target": "cpu"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hip = torch.version.hip is not None
        target = properties.gcnArchName.split(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
        machine = {"device": properties.name, "target": target}
    return machine | {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "flash_attn": installed(),
    }


def installed() -> str:
    """Version and label of flash_attn, as that of its wheel. SystemExit where there is none to measure."""
    try:
        import flash_attn
    except ImportError as error:
        raise SystemExit(
            f"error: {error}: install a wheel, or set PYTHONPATH=flash_attn_src for these sources"
        ) from None
    label = flash_attn.backend_info()["label"] if hasattr(flash_attn, "backend_info") else ""
    return f"{flash_attn.__version__}+{label}" if label else str(flash_attn.__version__)


def need_gpu() -> None:
    """SystemExit without a flash_attn to measure or a GPU to measure it on."""
    installed()
    if not torch.cuda.is_available():
        raise SystemExit("error: no GPU that this torch can use")


def results(
    benchmark: str,
    device: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    metrics: object,
    summary: object,
    samples: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """The object that a benchmark writes; `device` is what `environment` gave."""
    return {
        "benchmark": benchmark,
        "environment": dict(device),
        "config": dict(config),
        "metrics": metrics,
        "summary": summary,
        "samples": {name: list(values) for name, values in samples.items()},
    }


def writable(text: str) -> Path:
    """The type of an option that names a file to write: refused before anything is measured if that cannot be."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise SystemExit(
            f"error: {path} cannot be written: {path.absolute().parent} is no directory, or it is one itself"
        )
    return path


def count(text: str) -> int:
    """The type of an option of which there is at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
