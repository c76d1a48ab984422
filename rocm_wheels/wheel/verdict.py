"""The test report of a wheel (`verdict`): written next to the wheel, and read back with every field checked."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
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
_MAX_WRONG = 10  # limit of the problems that a message names
_TEXT = schema.prose(10_000)
_NUMBER = schema.number()
_TARGET = schema.text(40, r"gfx[0-9a-f-]+(generic)?|sm_[0-9]+[af]?")
_TITLE = schema.text(200)
_DIGEST = schema.text(64, r"[0-9a-f]{64}")


def _is_status(value: Any) -> bool:
    return _TEXT(value) and (value in (PASSED, FAILED) or value.startswith(_NOT_RUN))


def _is_stage(name: Any) -> bool:
    return name in (*STAGES, SELFTEST, WINDOWS) or bool(_COMBINATION.fullmatch(name))


# The format that benchmarks/trend.py writes.
_FACT = schema.none_or(schema.prose(500))
_COMPARISON = schema.ObjectSchema(
    {
        **dict.fromkeys(("device", "benchmark", "figure", "baseline_date", "status"), _TITLE),
        **dict.fromkeys(("baseline", "median", "ratio", "low", "high"), _NUMBER),
    }
)
BENCHMARKS = schema.ObjectSchema(
    {
        "environment": schema.MapSchema(
            _FACT, 40, _TITLE, dict.fromkeys(("device", "torch", "flash_attn", "python"), _TITLE)
        ),
        "bound": _NUMBER,
        "regressions": schema.number(whole=True),
        "comparisons": schema.ListSchema(_COMPARISON, 10_000),
        "missing": schema.ListSchema(_TITLE, 10_000),
        "without_baseline": schema.ListSchema(_TITLE, 10_000),
    }
)
_DETAILS = schema.ObjectSchema(
    {},
    {
        **dict.fromkeys(("time", "run"), _TEXT),
        "worst error": schema.MapSchema(_NUMBER, 1000, _TEXT),
        "devices": schema.ListSchema(
            schema.ObjectSchema({"name": schema.text(100), "target": _TARGET}, others=True), 1000
        ),
    },
    others=True,
)
_STAGE = schema.ObjectSchema({"status": _is_status}, {"seconds": _NUMBER, "details": _DETAILS})
_FAILURES = schema.ListSchema(_TEXT, 100_000)
_GPU_REPORT = schema.ObjectSchema(
    {"stages": schema.ObjectSchema({GPU: _STAGE}, {SELFTEST: _STAGE}), "failures": _FAILURES}
)
_VERDICT = schema.ObjectSchema(
    {
        "ok": schema.one_of(True, False),
        **dict.fromkeys(("wheel", "torch_source", "python", "platform"), _TEXT),
        **dict.fromkeys(("sha256", "contents"), _DIGEST),
        "commit": schema.text(50, r"[0-9a-f]{40}(-dirty)?", empty=True),
        "size": schema.number(whole=True),
        "cell": schema.MapSchema(_TEXT, 1000, _TEXT),
        "tests": schema.MapSchema(schema.number(whole=True), 1000, _TEXT),
        "targets": schema.ListSchema(_TARGET, 1000),
        "failures": _FAILURES,
        "stages": schema.MapSchema(_STAGE, 1000, _is_stage),
    },
    {
        "beside": schema.MapSchema(_DIGEST, 1000, _TEXT),
        "benchmarks": BENCHMARKS,
        "gpus": schema.MapSchema(_GPU_REPORT, 1000, _TEXT),
    },
)


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
        errors: Mapping[str, float] = self.details.get("worst error", {})
        return errors


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
    report = schema.load(name, content, _MAX_BYTES)
    if wrong := list(schema.problems(report, _VERDICT)):
        raise DataError(f"{name} is not a verdict as `build` writes it: {'; '.join(wrong[:_MAX_WRONG])}")
    ok = report.pop("ok")
    stages = {stage: Stage(**entry) for stage, entry in report["stages"].items()}
    lists = {key: tuple(report[key]) for key in ("targets", "failures")}
    gpus = {gpu: _gpu_report(entry) for gpu, entry in report.get("gpus", {}).items()}
    verdict = Verdict(**{**report, **lists, "stages": stages, "gpus": gpus})
    if ok != verdict.ok:
        unmet = ", ".join(f"{stage}: {entry.status}" for stage, entry in verdict.unmet()) or "nothing is unmet"
        raise DataError(f"{name} says ok: {str(ok).lower()}, but {unmet}", remedy="Build the wheel again.")
    return verdict


def _gpu_report(entry: Mapping[str, Any]) -> GpuReport:
    stages = {stage: Stage(**each) for stage, each in entry["stages"].items()}
    return GpuReport(stages=stages, failures=tuple(entry["failures"]))
