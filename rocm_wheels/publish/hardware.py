"""Runs of the selftest on users' GPUs: checks a report and stores it in docs/hardware.json.

`python -m flash_attn.selftest` writes the report. From these runs, README, chooser and release notes show what is
verified on hardware.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rocm_wheels.compile import cache as files
from rocm_wheels.compile import sources
from rocm_wheels.errors import DataError
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.publish import report as reports
from rocm_wheels.publish.report import REMEDY
from rocm_wheels.schema import ListSchema, ObjectSchema, number, problems, shown, text
from rocm_wheels.wheel import contents, gpus
from rocm_wheels.wheel.contents import WheelFile

RUNS = Path("docs/hardware.json")
_FEWEST_CHECKS = 60  # checks in a run on a GPU
_MOST_TFLOPS = 5000.0  # twice the peak of the fastest GPU in bf16
_KEPT = ("shape", "forward_ms", "backward_ms", "sdpa_forward_ms", "sdpa_backward_ms")  # fields of a line about speed
_FIRST_DAY = datetime.date(2026, 11, 1)
_OVERRIDE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_TEXT = text(300, empty=True)
_RUN = ObjectSchema(
    {
        **dict.fromkeys(("override", "sha256", "flash_attn", "python", "torch", "hip", "driver"), _TEXT),
        **dict.fromkeys(("date", "device", "target", "wheel"), text(200)),
        "passed": number(whole=True),
        "failed": ListSchema(_TEXT, 20_000),
        "speed": ListSchema(lambda value: isinstance(value, dict), 50),
    }
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run on one GPU. override: HSA_OVERRIDE_GFX_VERSION, "" if it was not set. failed: names of failed checks."""

    date: str
    device: str
    target: str
    override: str
    wheel: str
    sha256: str
    flash_attn: str
    python: str
    torch: str
    hip: str
    driver: str
    passed: int
    failed: tuple[str, ...]
    speed: tuple[Mapping[str, Any], ...]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def where(self) -> str:
        """The GPU, with the override that it ran with."""
        return f"{self.device} with HSA_OVERRIDE_GFX_VERSION={self.override}" if self.override else self.device

    @property
    def summary(self) -> str:
        """One line for users."""
        result = f"{self.passed} checks passed"
        result += f", {len(self.failed)} failed: {', '.join(self.failed)}" if self.failed else ""
        return f"{self.device} ({self.target}), {self.wheel}, torch {self.torch}, {self.date}: {result}"


def check(report: Path, wheel: Path, versions: Versions, today: datetime.date) -> Run:
    """The run that a report describes. Raises DataError if it cannot be a run of this wheel on an AMD GPU."""
    content, file = reports.read(report), _read_wheel(wheel)
    say = _Complaint(report.name)
    claim, machine, checks, speed = (content[name] for name in ("wheel", "machine", "checks", "speed"))
    _check_wheel(say, claim, file)
    _check_machine(say, machine, claim, versions)
    _check_date(say, content["date"], today)
    _check_checks(say, checks)
    _check_speed(say, speed)
    failed = [line["check"] for line in checks if line["ok"] is False]
    failed += [line["shape"] for line in speed if line.get("failure")]
    failed += [content["trouble"]] if content["trouble"] else []
    failed += [f"{part}: {why}" for part, why in content.get("troubles", {}).items()]
    lacks_memory = sources.module("diagnosis.firstlight.text").lacks_memory
    failed += [line["shape"] for line in content.get("shapes", ()) if line.get("failure") and not lacks_memory(line)]
    failed += [f"damaged: {path}" for path in claim["damaged"]]
    if content["ok"] is not (not failed):
        raise say("ok", content["ok"], f"does not fit what it says of its checks: {len(failed)} failed")
    return Run(
        date=content["date"],
        device=machine["device"],
        target=machine["target"],
        override=machine["variables"].get("HSA_OVERRIDE_GFX_VERSION", ""),
        wheel=file.name,
        sha256=file.sha256,
        flash_attn=claim["version"],
        python=machine["python"],
        torch=machine["torch"],
        hip=machine["hip"],
        driver=machine["driver"],
        passed=sum(line["ok"] is True for line in checks),
        failed=tuple(failed),
        speed=tuple({name: line[name] for name in _KEPT if name in line} for line in speed if not line.get("failure")),
    )


def add(path: Path, run: Run) -> list[Run]:
    """Adds a run to the file. Of runs of the same GPU, wheel and torch the latest stays; a run of another GPU replaces
    nothing.
    """

    def place(each: Run) -> tuple[str, ...]:
        return each.device, each.override, each.wheel, each.torch

    newer = [each for each in load(path) if place(each) != place(run) or each.date > run.date]
    kept = [] if any(place(each) == place(run) for each in newer) else [run]
    runs = sorted([*newer, *kept], key=lambda each: (each.target, each.device, each.date, each.wheel))
    files.write(path, (json.dumps([asdict(each) for each in runs], indent=1) + "\n").encode())
    return runs


def load(path: Path) -> list[Run]:
    """docs/hardware.json. Raises DataError if it is not what `add` writes."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is no list of runs of the selftest: {error}") from error
    wrong = list(problems(entries, ListSchema(_RUN, 100_000), path.name))
    if wrong:
        raise DataError(
            f"{path} is no list of runs of the selftest: {wrong[0]}", remedy="Restore it: git checkout -- FILE."
        )
    return [Run(**{**each, "failed": tuple(each["failed"]), "speed": tuple(each["speed"])}) for each in entries]


def verified(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """GPU target -> the runs on it in which everything passed, without an override; newest first."""
    passes: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda each: each.date, reverse=True):
        if run.ok and not run.override:
            passes.setdefault(run.target, []).append(run)
    return passes


def unanswered(runs: Iterable[Run]) -> list[Run]:
    """The failed runs that the same GPU has not answered: it did not pass on a later day, with that torch and
    the same override. Newest first.
    """
    runs = sorted(runs, key=lambda each: each.date, reverse=True)

    def answers(run: Run, failed: Run) -> bool:
        same = (run.override, run.torch) == (failed.override, failed.torch)
        newer, older = (gpus.named(each.device, each.target) for each in (run, failed))
        return run.ok and same and run.date > failed.date and gpus.answers(newer, older)

    return [failed for failed in runs if not failed.ok and not any(answers(run, failed) for run in runs)]


def failures_by_wheel(runs: Iterable[Run]) -> dict[str, str]:
    """sha256 of a wheel -> the GPUs on which its selftest failed, without an answer, as part of a sentence."""
    failures: dict[str, list[str]] = {}
    for run in reversed(unanswered(runs)):
        failures.setdefault(run.sha256, []).append(f"{run.where} ({run.date})")
    return {sha256: ", ".join(devices) for sha256, devices in failures.items()}


def by_wheel(runs: Iterable[Run]) -> dict[str, str]:
    """sha256 of a wheel -> the GPUs on which its selftest passed, oldest run first, as part of a sentence."""
    passes: dict[str, list[str]] = {}
    for run in sorted(runs, key=lambda each: each.date):
        if run.ok:
            passes.setdefault(run.sha256, []).append(f"{run.where} ({run.date})")
    return {sha256: ", ".join(devices) for sha256, devices in passes.items()}


class _Complaint:
    """Builds the error for a value of a report."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, place: str, value: object, reason: str) -> DataError:
        return DataError(
            f"{self.name}: {place}: {value if isinstance(value, list) else shown(value)} {reason}", remedy=REMEDY
        )


def _read_wheel(path: Path) -> WheelFile:
    try:
        return contents.read(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no wheel: {error}", remedy="Give --wheel the published file.") from error


def _check_wheel(say: _Complaint, claim: Mapping[str, Any], wheel: WheelFile) -> None:
    """Raises DataError unless the report's digest is the digest of the wheel's contents."""
    digest = sources.module("diagnosis.selftest.wheel").contents(wheel.record.decode())
    if claim["contents"] != digest:
        raise say("wheel/contents", claim["contents"], f"is not the digest of {wheel.name}, which is {digest}")


def _check_machine(say: _Complaint, machine: Mapping[str, Any], wheel: Mapping[str, Any], versions: Versions) -> None:
    if emulator := machine.get("emulator"):
        raise say("machine/emulator", emulator, "emulated this GPU: such a run is no run on hardware")
    target = machine["target"]
    if target not in versions.targets or versions.targets[target].is_generic:
        raise say("machine/target", target, "is no AMD GPU that a wheel is for")
    if not isinstance(machine["hip"], str):
        raise say("machine/hip", machine["hip"], "is no version: this torch is not for ROCm")
    loads = sources.module("kernels.targets").serving_targets(target, machine["hip"])
    if not set(loads) & set(wheel["targets"]):
        raise say("machine/target", target, f"loads nothing of the wheel, which is for {', '.join(wheel['targets'])}")
    if machine["architecture"].partition(":")[0] != target:
        raise say("machine/architecture", machine["architecture"], f"is no {target}")
    if override := machine["variables"].get("HSA_OVERRIDE_GFX_VERSION", ""):
        # With an override, HIP treats the GPU as one of that version, whatever its name is.
        parts = _OVERRIDE.fullmatch(override)
        if parts is None or f"gfx{parts[1]}{int(parts[2]):x}{int(parts[3]):x}" != target:
            raise say("machine/variables/HSA_OVERRIDE_GFX_VERSION", override, f"makes no {target}")
    elif wrong := reports.wrong_device(machine["device"], target, versions):
        raise say("machine/device", machine["device"], f"{wrong}, and machine/target says {target}")


def _check_date(say: _Complaint, text: str, today: datetime.date) -> None:
    try:
        date = datetime.date.fromisoformat(text)
    except ValueError:
        raise say("date", text, "is no date") from None
    if not _FIRST_DAY <= date <= today + datetime.timedelta(days=1):
        raise say("date", text, f"is not between {_FIRST_DAY} and today")


def _check_checks(say: _Complaint, checks: Sequence[Mapping[str, Any]]) -> None:
    """Require a minimum number of checks, one from each group, with plausible measured errors."""
    cases = sources.module("diagnosis.selftest.cases")
    if len({line["check"] for line in checks}) != len(checks) or len(checks) < _FEWEST_CHECKS:
        raise say("checks", len(checks), f"is no number of different checks of a GPU: at least {_FEWEST_CHECKS}")
    missing = [group for group in cases.GROUPS if all(line["group"] != group for line in checks)]
    if missing:
        raise say("checks", missing, "are groups without a check")
    known = [list(limits) for limits in {*cases.LIMITS.values(), *(case.limits for case in cases.cases())}]
    for line in checks:
        place = f"checks/{line['check']}"
        if line["limits"] not in known:
            raise say(place, line["limits"], "are no limits of the selftest")
        errors = [error for error in (line["forward"], line["backward"]) if error is not None]
        over = any(error > limit for error, limit in zip(errors, line["limits"], strict=False))
        if line["ok"] is True and (over or not errors):
            raise say(place, errors, f"did not pass: at most {line['limits']}")
    exact = [line for line in checks if line["group"] in ("head dims", "masks") and line["ok"] and not line["forward"]]
    if exact:
        raise say(f"checks/{exact[0]['check']}", 0.0, "is no error of a rounded result")


def _check_speed(say: _Complaint, speed: Sequence[Mapping[str, Any]]) -> None:
    shapes = {shape.name: shape for shape in sources.module("diagnosis.selftest.cases").SPEEDS}
    for line in speed:
        if line.get("failure"):
            continue
        shape = shapes.get(line["shape"])
        if shape is None:
            raise say("speed", line["shape"], "is no shape of the selftest")
        for way, factor in (("forward_ms", 1.0), ("backward_ms", 2.5)):
            time = line.get(way)
            if time is not None and not 0 < factor * shape.flops / _MOST_TFLOPS * 1e-9 < time:
                raise say(f"speed/{line['shape']}/{way}", time, "ms is faster than any GPU, or no time")
