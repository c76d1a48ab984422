"""The test report of a wheel (`verdict`): written next to the wheel, and read back with every field checked."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rocm_wheels import schema
from rocm_wheels.errors import DataError, writing_to
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.matrix.platforms import platform_of
from rocm_wheels.wheel import gpus
from rocm_wheels.wheel.contents import WheelFile

PASSED = "passed"
FAILED = "failed"
_NOT_RUN = "not run: "

REPAIRED = "repaired"
PIP = "installed with pip"
UV = "installed with uv"
IMPORT = "import"
GPU = "gpu"
# Stage -> the test files that belong to it.
TESTED = {
    "code objects": ("test_contents.py", "test_ck.py"),
    IMPORT: (
        "test_install.py",
        "test_import.py",
        "test_block_sparse_attn.py",
        "test_flash_attn_3.py",
        "test_flash_attn_4.py",
        "test_sageattention.py",
        "test_spas_sage_attn.py",
    ),
    "cpu numerics": ("test_numerics_cpu.py",),
    GPU: ("test_gpu.py", "test_fa3.py"),
}
STAGES = (REPAIRED, PIP, UV, *TESTED)
# System of a wheel -> the stages that may be missing. Linux, where the wheel for Windows is built, cannot run it: a job
# on Windows does that before a release (.github/workflows/windows.yml).
_OPTIONAL = {"linux": (GPU,), "windows": tuple(TESTED)}
# `python -m flash_attn.selftest`, which runs if a GPU is required.
SELFTEST = "selftest"
WINDOWS = "on Windows"  # what wheel_tests/on_windows.py saw; only in the report of a wheel for Windows
# The universal wheel is tested with more combinations, one stage each (wheel/combinations.py).
_COMBINATION = re.compile(r"Python \d+\.\d+, torch \d+(\.\d+)+")
_MAX_BYTES = 1 << 20
_MAX_WRONG = 10  # limit of the fields that a message names
_TEXT = schema.prose(10_000)
_NUMBER = schema.number()
_DEVICE = schema.text(100)
_TARGET = schema.text(40, r"gfx[0-9a-f-]+(generic)?|sm_[0-9]+[af]?")
_TITLE = schema.text(200)
_ENVIRONMENT = schema.table(_TITLE, schema.none_or(schema.prose(500)), 40)


def _is_environment(value: Any) -> bool:
    return _ENVIRONMENT(value) and all(_TITLE(value.get(name)) for name in ("device", "torch", "flash_attn", "python"))


# The format that benchmarks/trend.py writes.
_COMPARISON = schema.ObjectSchema(
    {
        **dict.fromkeys(("device", "benchmark", "figure", "baseline_date", "status"), _TITLE),
        **dict.fromkeys(("baseline", "median", "ratio", "low", "high"), _NUMBER),
    }
)
BENCHMARKS = schema.ObjectSchema(
    {
        "environment": _is_environment,
        "bound": _NUMBER,
        "regressions": schema.number(whole=True),
        "comparisons": schema.ListSchema(_COMPARISON, 10_000),
        "missing": schema.ListSchema(_TITLE, 10_000),
        "without_baseline": schema.ListSchema(_TITLE, 10_000),
    }
)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}(-dirty)?|")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """status: "passed", "failed" or "not run: <why>". details: what was measured."""

    status: str
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def not_run(cls, why: str) -> Stage:
        return cls(status=f"{_NOT_RUN}{why}")

    @property
    def worst_errors(self) -> Mapping[str, float]:
        """Kind of test -> the largest measured error against the reference."""
        found: Mapping[str, float] = self.details.get("worst error", {})
        return found


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """What one GPU said about the wheel. stages: the GPU stage and the selftest. failures: names of failed tests."""

    stages: Mapping[str, Stage]
    failures: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failures and all(stage.status != FAILED for stage in self.stages.values())

    @property
    def when(self) -> tuple[str, str]:
        """The time of the report and its run, to compare with other reports; empty texts in a report without them."""
        details = self.stages[GPU].details if GPU in self.stages else {}
        return str(details.get("time", "")), str(details.get("run", ""))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The test report of one wheel.

    size: bytes. contents: the digest of `wheel.contents`, which builds of other commits share. commit: the commit of
    the build, "" outside of a git checkout. beside: wheels that were installed and tested with it -> their sha256.
    tests: number of tests by outcome. failures: names of failed tests. benchmarks: results of benchmarks/trend.py, None
    if nothing was measured. gpus: the reports of other GPUs than the one in `stages`, by `gpu_names`.
    """

    wheel: str
    sha256: str
    size: int
    contents: str
    commit: str
    cell: Mapping[str, str]
    targets: tuple[str, ...]
    torch_source: str
    python: str
    platform: str
    stages: Mapping[str, Stage]
    tests: Mapping[str, int]
    failures: tuple[str, ...]
    beside: Mapping[str, str] = field(default_factory=dict)
    benchmarks: Mapping[str, Any] | None = None
    gpus: Mapping[str, GpuReport] = field(default_factory=dict)

    @classmethod
    def of(cls, file: WheelFile, plan: Plan, **tested: Any) -> Verdict:
        """The test report of a wheel that `plan` made and this machine tested. tested: the other fields."""
        return cls(
            wheel=file.name,
            sha256=file.sha256,
            size=file.size,
            contents=file.contents,
            commit=file.commit,
            cell={name: str(value) for name, value in asdict(plan.cell).items()},
            targets=plan.targets,
            platform=platform.platform(),
            **tested,
        )

    @property
    def ok(self) -> bool:
        """Whether everything passed, on every GPU that it met. The GPU stage may be missing, and for Windows every
        stage that runs the wheel.
        """
        return not self.unmet() and not self.failures

    @property
    def gpu(self) -> Stage:
        return self.stages.get(GPU, Stage.not_run("not recorded"))

    @property
    def met_gpu(self) -> bool:
        """Whether its tests ran on a GPU, passed or failed."""
        return self.gpu.status in (PASSED, FAILED)

    @property
    def gpu_reports(self) -> dict[str, GpuReport]:
        """The report of each GPU that it met, by the name of the GPU: "AMD Instinct MI300X (gfx942)"."""
        return {**self.gpus, **dict.fromkeys(self._own_gpus(), self._own_report())}

    @property
    def passed_on(self) -> tuple[str, ...]:
        """The GPUs on which it passed."""
        return tuple(name for name, report in self.gpu_reports.items() if report.ok)

    def with_reports_of(self, other: Verdict) -> Verdict:
        """This report, with the GPU reports of another report of the same file.

        A report is replaced by a newer report of the same GPU alone: neither "not run" nor another GPU answers a
        failure. Of two reports with the same time this one counts. Benchmarks and the run on Windows of `other` stay if
        this report has none.
        """
        if other.sha256 != self.sha256:
            return self
        reports = other.gpu_reports
        for name, report in self.gpu_reports.items():
            if name not in reports or report.when >= reports[name].when:
                reports[name] = report
        kept = {
            name: report
            for name, report in reports.items()
            if not any(gpus.answers(newer, name) and reports[newer].when > report.when for newer in reports)
        }
        own = [name for name in (*self._own_gpus(), *other._own_gpus(), *kept) if name in kept]
        merged = self._with_report(kept[own[0]]) if own else self
        if WINDOWS in other.stages and WINDOWS not in self.stages:
            merged = replace(merged, stages={**merged.stages, WINDOWS: other.stages[WINDOWS]})
        own_gpus = merged._own_gpus()
        others = {name: report for name, report in kept.items() if name not in own_gpus}
        benchmarks = other.benchmarks if self.benchmarks is None else self.benchmarks
        return replace(merged, gpus=others, benchmarks=benchmarks)

    def _with_report(self, report: GpuReport) -> Verdict:
        """This report with the stages and failures of one GPU in place of its own GPU."""
        failures = [name for name in self.failures if name not in self._own_report().failures]
        stages = {name: stage for name, stage in self.stages.items() if name not in (GPU, SELFTEST)}
        added = [name for name in report.failures if name not in failures]
        return replace(self, stages={**stages, **report.stages}, failures=(*failures, *added))

    def _own_gpus(self) -> tuple[str, ...]:
        """The names of the GPUs of the machine that ran the GPU stage in `stages`."""
        if not self.met_gpu:
            return ()
        devices = self.gpu.details.get("devices", [])
        return tuple(dict.fromkeys(gpus.named(each["name"], each["target"]) for each in devices)) or (gpus.NAMELESS,)

    def _own_report(self) -> GpuReport:
        stages = {name: stage for name, stage in self.stages.items() if name in (GPU, SELFTEST)}
        return GpuReport(stages=stages, failures=self.failures if self.gpu.status == FAILED else ())

    def unmet(self) -> list[tuple[str, Stage]]:
        """The test stages that failed, on any GPU, and those that were not run and must not be missing."""
        optional = _OPTIONAL[platform_of(self.wheel).name]
        missing = [(name, Stage.not_run("not recorded")) for name in STAGES if name not in self.stages]
        own = [
            (name, stage)
            for name, stage in self.stages.items()
            if stage.status == FAILED or (stage.status != PASSED and name not in optional)
        ]
        others = [(f"{GPU} on {name}", Stage(status=FAILED)) for name, report in self.gpus.items() if not report.ok]
        return missing + own + others

    def summary(self) -> str:
        """A few lines for a terminal."""
        width = max(map(len, self.stages))
        lines = [f"{self.wheel}: {PASSED if self.ok else FAILED}", f"  torch from {self.torch_source}"]
        for name, stage in self.stages.items():
            line = f"  {name:<{width}}  {stage.status}"
            if stage.status == PASSED:
                line += f" in {stage.seconds:.1f} s"
            if worst := stage.worst_errors:
                line += f", worst error {max(worst.values()):.1e}"
            lines.append(line)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.tests.items())
        lines.append(f"  tests: {counts}")
        lines += [f"  failed: {name}" for name in self.failures]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; benchmarks and other GPUs only if there are some."""
        written = {"ok": self.ok, **asdict(self)}
        return {name: value for name, value in written.items() if value or name not in ("benchmarks", "gpus")}

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def write(self, wheel: Path) -> Path:
        """Writes <wheel>.verdict.json next to the wheel."""
        path = wheel.with_name(wheel.name + VERDICT)
        with writing_to(path):
            path.write_text(self.as_json(), encoding="utf-8")
        return path


def tested_stages(report: Mapping[str, Any] | None, why: str) -> dict[str, Stage]:
    """The stages that the tests of the installed wheel cover. Without a report, they were not run because of `why`."""
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
        details |= {"devices": report["devices"], **_when()}
    if FAILED in outcomes:
        return Stage(status=FAILED, seconds=seconds, details=details)
    if PASSED in outcomes:
        return Stage(status=PASSED, seconds=seconds, details=details)
    return Stage.not_run(next((test["reason"] for test in tests if test["reason"]), "no test was collected"))


def _when() -> dict[str, str]:
    """The time in UTC, and the run of the workflow with its attempt, padded so that texts compare as numbers do."""
    number = [os.environ.get(name, "") for name in ("GITHUB_RUN_ID", "GITHUB_RUN_ATTEMPT")]
    time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"time": time, "run": f"{number[0]:0>20}.{number[1]:0>4}" if all(number) else ""}


def read(path: Path) -> Verdict:
    """The test report in a file. Raises DataError if the file holds none."""
    return parse(path.name, path.read_bytes())


def beside(wheel: Path) -> Verdict | None:
    """The test report next to a wheel; None if there is none that can be read."""
    try:
        return read(wheel.with_name(wheel.name + VERDICT))
    except (OSError, DataError):
        return None


def parse(name: str, content: bytes) -> Verdict:
    """The test report in a file of that name.

    Raises DataError if it does not have the format of `Verdict.write`, or if its result contradicts its stages.
    """
    if len(content) > _MAX_BYTES:
        raise DataError(f"{name} is not a verdict: it has {len(content)} bytes")
    found = schema.load(name, content, _MAX_BYTES)
    known = {"ok"} | {each.name for each in fields(Verdict)}
    if not isinstance(found, dict) or (missing := sorted(known - found.keys() - {"beside", "benchmarks", "gpus"})):
        what = ", ".join(missing) if isinstance(found, dict) else "fields"
        raise DataError(f"{name} is not a verdict: it has no {what}")
    if wrong := [*_wrong(found), *map(_named, sorted(found.keys() - known))]:
        raise DataError(
            f"{name} is not a verdict: {', '.join(wrong[:_MAX_WRONG])} has not the form that `build` writes"
        )
    ok = found.pop("ok")
    stages = {stage: Stage(**entry) for stage, entry in found["stages"].items()}
    lists = {key: tuple(found[key]) for key in ("targets", "failures")}
    gpus = {gpu: _gpu_report(entry) for gpu, entry in found.get("gpus", {}).items()}
    verdict = Verdict(**{**found, **lists, "stages": stages, "gpus": gpus})
    if ok != verdict.ok:
        unmet = ", ".join(f"{stage}: {entry.status}" for stage, entry in verdict.unmet()) or "nothing is unmet"
        raise DataError(f"{name} says ok: {str(ok).lower()}, but {unmet}", remedy="Build the wheel again.")
    return verdict


def _gpu_report(entry: Mapping[str, Any]) -> GpuReport:
    stages = {stage: Stage(**each) for stage, each in entry["stages"].items()}
    return GpuReport(stages=stages, failures=tuple(entry["failures"]))


def _wrong(found: Mapping[str, Any]) -> list[str]:
    """The fields that do not have the format of `Verdict.write`."""
    texts = ("wheel", "torch_source", "python", "platform")
    checks = {
        "ok": isinstance(found["ok"], bool),
        **{name: _TEXT(found[name]) for name in texts},
        **{name: _matches(_DIGEST, found[name]) for name in ("sha256", "contents")},
        "commit": _matches(_COMMIT, found["commit"]),
        "size": _is_count(found["size"]),
        "cell": _is_table(found["cell"], _TEXT),
        "tests": _is_table(found["tests"], _is_count),
        "beside": _is_table(found.get("beside", {}), lambda value: _matches(_DIGEST, value)),
        "benchmarks": "benchmarks" not in found or not list(schema.problems(found["benchmarks"], BENCHMARKS)),
        "gpus": _is_table(found.get("gpus", {}), _is_gpu_report),
        "targets": isinstance(found["targets"], list),
        "failures": isinstance(found["failures"], list),
        "stages": isinstance(found["stages"], dict),
    }
    wrong = [name for name, good in checks.items() if not good]
    for name, good in (("targets", _TARGET), ("failures", _TEXT)):
        if checks[name]:
            wrong += [f"{name}/{schema.shown(each)}" for each in found[name] if not good(each)]
    if checks["stages"]:
        known = {
            stage for stage in found["stages"] if stage in (*STAGES, SELFTEST, WINDOWS) or _COMBINATION.fullmatch(stage)
        }
        wrong += [f"stages/{stage}" for stage in known if not _is_stage(found["stages"][stage])]
        wrong += [f"stages/{schema.shown(stage)}" for stage in found["stages"] if stage not in known]
    return wrong


def _named(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else schema.shown(name)


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= schema.MAX_NUMBER


def _is_table(value: object, good: Any) -> bool:
    return isinstance(value, dict) and all(_TEXT(name) and good(each) for name, each in value.items())


def _is_gpu_report(entry: object) -> bool:
    """Whether it has the format of a GpuReport."""
    if not isinstance(entry, dict) or entry.keys() != {"stages", "failures"}:
        return False
    stages, failures = entry["stages"], entry["failures"]
    return (
        isinstance(stages, dict)
        and GPU in stages
        and all(name in (GPU, SELFTEST) and _is_stage(stage) for name, stage in stages.items())
        and isinstance(failures, list)
        and all(map(_TEXT, failures))
    )


def _is_stage(entry: object) -> bool:
    """Whether it has the format of a Stage, with the details that are read."""
    details = entry.get("details", {}) if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(details, dict) or entry.keys() - {"status", "seconds", "details"}:
        return False
    status, devices = entry.get("status"), details.get("devices", [])
    return (
        isinstance(status, str)
        and _TEXT(status)
        and (status in (PASSED, FAILED) or status.startswith(_NOT_RUN))
        and _NUMBER(entry.get("seconds", 0))
        and _is_table(details.get("worst error", {}), _NUMBER)
        and all(_TEXT(name) for name in details)
        and all(_TEXT(details.get(name, "")) for name in ("time", "run"))
        and isinstance(devices, list)
        and all(isinstance(device, dict) for device in devices)
        and all(_DEVICE(device.get("name")) and _TARGET(device.get("target")) for device in devices)
    )
