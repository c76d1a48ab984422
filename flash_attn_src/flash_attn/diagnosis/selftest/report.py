"""The report of a selftest: the results, as JSON for programs and as a table for people."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from flash_attn.diagnosis.selftest import cases

FORM = "issues/new?template=ran_on_my_gpu.yml"
_COLUMNS = "{:<30}{:>24}{:>12}{:>26}{:>12}"
Line = Mapping[str, Any]


def build(machine: Line, wheel: Line, checks: Sequence[Line], speed: Sequence[Line], trouble: str) -> dict[str, Any]:
    """The report. `trouble` is the reason why the run ended early, or ""."""
    wrong = bool(trouble or wheel["damaged"] or not checks) or any(map(failed, (*checks, *speed)))
    return {
        "format": cases.FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "ok": not wrong,
        "trouble": trouble,
        "wheel": dict(wheel),
        "machine": dict(machine),
        "checks": list(checks),
        "speed": list(speed),
    }


def failed(line: Line) -> bool:
    """Whether a line of the report is a failure. A check that this GPU does not support is not a failure."""
    return line["ok"] is False if "check" in line else bool(line.get("failure"))


def table(report: Mapping[str, Any]) -> str:
    """The report as lines."""
    machine, wheel = report["machine"], report["wheel"]
    label = f"+{wheel['label']}" if wheel["label"] else ""
    emulated = f", emulated by {machine['emulator']}" if "emulator" in machine else ""
    kind = f"HIP {machine['hip']}" if machine["hip"] else f"CUDA {machine['cuda']}" if machine["cuda"] else "CPU build"
    lines = [
        f"{'flash_attn':<14}{wheel['version']}{label}, backend {wheel['gpu_backend']}",
        f"{'torch':<14}{machine['torch']}, {kind}",
        f"{'device':<14}{machine['device']}, {machine['architecture']}{emulated}",
        "",
        f"{'checks':<14}{'passed':>16}{'worst error':>16}  (of what is allowed)",
        *(_group(group, report["checks"]) for group in cases.GROUPS),
        "",
        _COLUMNS.format("speed, bf16", "forward", "SDPA", "backward", "SDPA"),
        *map(_speed, report["speed"]),
    ]
    wrong = [line for line in (*report["checks"], *report["speed"]) if failed(line)]
    faults = [f"FAILED  {line.get('check') or line['shape']}: {line['failure']}" for line in wrong]
    faults += [f"FAILED  {report['trouble']}"] if report["trouble"] else []
    faults += [f"FAILED  {path} is not the file of the wheel: reinstall it" for path in wheel["damaged"]]
    return "\n".join([*lines, *([""] if faults else []), *faults])


def _group(group: str, checks: Sequence[Line]) -> str:
    lines = [line for line in checks if line["group"] == group]
    there = [line for line in lines if line["ok"] is not None]
    if not there:
        return f"{group:<14}{'not for this GPU' if lines else 'not run':>16}"
    ratios = [
        error / limit
        for line in there
        for error, limit in zip((line["forward"], line["backward"]), line["limits"], strict=True)
        if error is not None
    ]
    worst = f"{100 * max(ratios):.0f} %" if ratios else ""
    passed = f"{sum(line['ok'] for line in there)} of {len(there)}"
    return f"{group:<14}{passed:>16}{worst:>16}".rstrip()


def _rate(flops: float) -> str:
    """Operations per second as text; of a CPU, whose TFLOP/s would be 0.0, in GFLOP/s."""
    tera, giga = flops / 1e12, flops / 1e9
    return (
        f"{tera:6.1f} TFLOP/s" if tera >= 1 else f"{giga:6.1f} GFLOP/s" if giga >= 1 else f"{flops / 1e6:6.1f} MFLOP/s"
    )


def _speed(line: Line) -> str:
    if line.get("failure"):
        return _COLUMNS.format(line["shape"], "failed", "", "", "").rstrip()
    shape = next(each for each in (*cases.SPEEDS, *cases.CPU_SPEEDS) if each.name == line["shape"])

    def ours(milliseconds: float | None, flops: float) -> str:
        return "" if milliseconds is None else f"{milliseconds:.2f} ms {_rate(flops / milliseconds * 1e3)}"

    def peer(milliseconds: float | None) -> str:
        return "" if milliseconds is None else f"{milliseconds:.2f} ms"

    return _COLUMNS.format(
        line["shape"],
        ours(line["forward_ms"], shape.flops),
        "cannot run" if line["sdpa"] else peer(line["sdpa_forward_ms"]),
        ours(line["backward_ms"], 2.5 * shape.flops),
        peer(line["sdpa_backward_ms"]),
    ).rstrip()
