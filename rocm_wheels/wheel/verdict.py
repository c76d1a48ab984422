"""What a wheel has passed, as a value that is written beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rocm_wheels.errors import DataError
from rocm_wheels.matrix.names import VERDICT

_FIELDS = {"ok": bool, "sha256": str, "stages": dict, "targets": list, "torch_source": str}  # that are read

PASSED = "passed"
FAILED = "failed"

REPAIRED = "repaired"
PIP = "installed with pip"
UV = "installed with uv"
GPU = "gpu"
# Which test files speak for which stage.
TESTED = {
    "code objects": ("test_contents.py", "test_ck.py"),
    "import": ("test_install.py", "test_import.py", "test_flash_attn_3.py"),
    "cpu numerics": ("test_numerics_cpu.py",),
    GPU: ("test_gpu.py", "test_fa3.py"),
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Status is "passed", "failed" or "not run: <why>"; details are what was measured."""

    status: str
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def not_run(cls, why: str) -> Stage:
        return cls(status=f"not run: {why}")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Size in bytes; `tests` counts outcomes, `failures` names the tests that failed."""

    wheel: str
    sha256: str
    size: int
    cell: Mapping[str, str]
    targets: tuple[str, ...]
    torch_source: str
    python: str
    platform: str
    stages: Mapping[str, Stage]
    tests: Mapping[str, int]
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Everything passed; the GPU alone may be absent."""
        return not self.unmet()

    def unmet(self) -> list[tuple[str, Stage]]:
        """The stages that stand against the wheel."""
        return [
            (name, stage)
            for name, stage in self.stages.items()
            if stage.status == FAILED or (stage.status != PASSED and name != GPU)
        ]

    def summary(self) -> str:
        """A few lines for a terminal."""
        width = max(map(len, self.stages))
        lines = [f"{self.wheel}: {PASSED if self.ok else FAILED}", f"  torch from {self.torch_source}"]
        for name, stage in self.stages.items():
            line = f"  {name:<{width}}  {stage.status}"
            if stage.status == PASSED:
                line += f" in {stage.seconds:.1f} s"
            if worst := stage.details.get("worst error"):
                line += f", worst error {max(worst.values()):.1e}"
            lines.append(line)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.tests.items())
        lines.append(f"  tests: {counts}")
        lines += [f"  failed: {name}" for name in self.failures]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"ok": self.ok, **asdict(self)}

    def write(self, wheel: Path) -> Path:
        """Writes <wheel>.verdict.json beside the wheel."""
        path = wheel.with_name(wheel.name + VERDICT)
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        return path


def tested_stages(report: Mapping[str, Any] | None, why: str) -> dict[str, Stage]:
    """The stages that the tests of the installed wheel speak for; without a report, not run and why."""
    if report is None:
        return {name: Stage.not_run(why) for name in TESTED}
    return {name: _stage(name, files, report) for name, files in TESTED.items()}


def _stage(name: str, files: tuple[str, ...], report: Mapping[str, Any]) -> Stage:
    tests = [test for test in report["tests"] if test["file"] in files]
    outcomes = {test["outcome"] for test in tests}
    seconds = round(sum(test["seconds"] for test in tests), 2)
    details: dict[str, Any] = {"tests": len(tests)}
    errors: dict[str, float] = {}
    for test in tests:
        for key, value in test["properties"].items():
            if key.startswith("error "):
                kind = key.removeprefix("error ")
                errors[kind] = max(errors.get(kind, 0.0), value)
            else:
                details[key] = value
    if errors:
        details["worst error"] = errors
    if name == GPU:
        details["devices"] = report["devices"]
    if FAILED in outcomes:
        return Stage(status=FAILED, seconds=seconds, details=details)
    if PASSED in outcomes:
        return Stage(status=PASSED, seconds=seconds, details=details)
    return Stage.not_run(next((test["reason"] for test in tests if test["reason"]), "no test was collected"))


def parse(name: str, content: bytes) -> dict[str, Any]:
    """The verdict in a file of that name. DataError if it has not the form that `Verdict.write` gives it."""
    try:
        verdict = json.loads(content)
    except ValueError as error:
        raise DataError(f"{name} is not JSON: {error}") from error
    missing = [field for field in _FIELDS if not isinstance(verdict, dict) or field not in verdict]
    if missing:
        raise DataError(f"{name} is not a verdict: it has no {', '.join(missing)}")
    wrong = [field for field, kind in _FIELDS.items() if not isinstance(verdict[field], kind)]
    if not wrong:
        wrong += [f"targets/{target!r}" for target in verdict["targets"] if not isinstance(target, str)]
        wrong += [f"stages/{stage}" for stage, entry in verdict["stages"].items() if not _is_stage(entry)]
    if not isinstance(verdict.get("benchmarks", {}), dict):
        wrong.append("benchmarks")
    if wrong:
        raise DataError(f"{name} is not a verdict: {', '.join(wrong)} has not the form that `build` writes")
    return dict(verdict)


def _is_stage(entry: object) -> bool:
    """Whether it has the form of a Stage, with the details that are read."""
    details = entry.get("details", {}) if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(details, dict):
        return False
    errors, devices = details.get("worst error", {}), details.get("devices", [])
    return (
        isinstance(entry.get("status"), str)
        and isinstance(errors, dict)
        and all(isinstance(number, (int, float)) for number in (entry.get("seconds", 0), *errors.values()))
        and isinstance(devices, list)
        and all(isinstance(device, dict) for device in devices)
        and all(isinstance(device.get(key), str) for device in devices for key in ("name", "target"))
    )


def attach(verdict: Path, benchmarks: Mapping[str, Any]) -> None:
    """Adds what benchmarks/trend.py found for this wheel to a verdict that is written."""
    content = json.loads(verdict.read_text(encoding="utf-8"))
    content["benchmarks"] = benchmarks
    verdict.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
