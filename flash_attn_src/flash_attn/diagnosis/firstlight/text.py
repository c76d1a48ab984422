"""What firstlight prints: right or wrong, how fast, and which switch helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flash_attn.diagnosis.firstlight import shapes
from flash_attn.diagnosis.selftest import report as reports
from flash_attn.kernels.providers import Row
from flash_attn.kernels.targets import TARGETS

_NOISE = 1.05  # a ratio of two times that says nothing
_NAMES = {
    "vector": "vector instruction that needs the previous one",
    "trans": "exponential and product that need the previous ones",
    "shared": "exchange through LDS",
    "cached": "load from the first-level cache",
    "level 2": "load from the next cache",
    "memory": "load from memory",
    "barrier": "barrier of four waves",
    "launch, host": "launch, time of the host",
    "launch, GPU": "launch, time of the GPU among others",
}


def lines(report: Mapping[str, Any], faster: Sequence[Row]) -> Iterator[str]:
    """The lines for a user. faster: rows of providers that are faster than what calls take now."""
    target = report["machine"]["target"]
    yield reports.table(report)
    yield ""
    measured = {line["probe"]: line for line in report["probes"]}
    ghz = frequency(measured.get("vector", {}).get("ns"), target)
    for name, line in measured.items():
        yield f"{_NAMES.get(name, name):<52}{_figure(line, ghz)}"
    yield ""
    for line in report["shapes"]:
        yield _shape(line, target)
    for line in (*report["speed"], *report["shapes"]):
        yield from _against_sdpa(line)
    for row in faster:
        yield f"faster here: {row.op} {row.dtypes[0]} d{row.dims[1]} {row.masks[0]}: {row.why.partition(': ')[2]}"
    for part, trouble in report["troubles"].items():
        yield f"FAILED  {part}: {trouble}"


def frequency(nanoseconds: float | None, target: str) -> float | None:
    """GHz, by the time of a vector instruction that needs the previous one: 5 cycles on RDNA (thread traces), 4 on CDNA
    (AMD's guides)."""
    row = TARGETS.get(target)
    return None if row is None or not nanoseconds else (5 if row.wavefront == 32 else 4) / nanoseconds


def _figure(line: Mapping[str, Any], ghz: float | None) -> str:
    if "ns" in line:
        value = line["ns"]
        if value is None:
            return "not measured"
        has_cycles = ghz is not None and not line["probe"].startswith("launch")
        return f"{value:10.1f} ns" + (f"  {value * ghz:7.0f} cycles of {ghz:.2f} GHz" if has_cycles else "")
    value, unit = (line["tflops"], "TFLOP/s") if "tflops" in line else (line["gbps"], "GB/s")
    return "not measured" if value is None else f"{value:10.1f} {unit}"


def _shape(line: Mapping[str, Any], target: str) -> str:
    if lacks_memory(line):
        return f"{line['shape']:<30}not measured: it needs more memory than the GPU has free"
    if line.get("failure"):
        return f"{line['shape']:<30}failed: {line['failure']}"
    shape, published = shapes.published(line["shape"], target)
    beside = f"; published: {published[0]:.0f} ({published[1]})" if published else ""
    return f"{line['shape']:<30}{shape.flops / line['forward_ms'] / 1e9:.1f} TFLOP/s forward{beside}"


def lacks_memory(line: Mapping[str, Any]) -> bool:
    """Whether a shape was not timed because it does not fit in the GPU's memory."""
    return str(line.get("failure")).startswith("OutOfMemoryError")


def _against_sdpa(line: Mapping[str, Any]) -> Iterator[str]:
    for op in ("forward", "backward"):
        ours, theirs = line.get(f"{op}_ms"), line.get(f"sdpa_{op}_ms")
        if ours and theirs and ours > _NOISE * theirs:
            yield f"slower than SDPA by {ours / theirs:.2f}: {op} of {line['shape']}. Keep SDPA for such calls"
