"""Adds results of later jobs to the test report of a wheel: the tests on a GPU, the run on Windows, and benchmarks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rocm_wheels import schema
from rocm_wheels.errors import DataError
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.publish import directory
from rocm_wheels.wheel import verdict
from rocm_wheels.wheel.verdict import Stage

_MAX_BYTES = 1 << 20
_TEXT = schema.prose(200)
_WINDOWS = schema.ObjectSchema(
    {
        "installer": schema.one_of("pip", "uv"),
        "system": _TEXT,
        "wheels": schema.ListSchema(
            schema.ObjectSchema(
                {
                    **dict.fromkeys(("python", "torch"), _TEXT),
                    "wheel": schema.text(200, r"[A-Za-z0-9_.+-]+\.whl"),
                    "sha256": schema.text(64, r"[0-9a-f]{64}"),
                    "checks": schema.number(whole=True),
                }
            ),
            100,
        ),
    }
)
_WINDOWS_AGAIN = "Run the job `windows` again on the wheels that are to be published."


def adopt(dist: Path, verdicts: Path) -> list[str]:
    """Replaces test reports in `dist` by the reports of the GPU job, which keep what other GPUs reported. Returns the
    names of their wheels.

    Raises DataError for a report about another file than the wheel of that name in `dist`. Returns an empty list if the
    directory does not exist, because no GPU job ran.
    """
    adopted = []
    for path in sorted(verdicts.glob(f"*{VERDICT}")) if verdicts.is_dir() else []:
        verdict_of_gpu = verdict.read(path)
        wheel = dist / path.name.removesuffix(VERDICT)
        earlier = verdict.beside(wheel)
        if earlier is None or verdict_of_gpu.sha256 != earlier.sha256:
            raise DataError(
                f"{path} is not about {wheel}", remedy="Run the GPU job again on the wheels that are to be published."
            )
        verdict_of_gpu.with_reports_of(earlier).write(wheel)
        adopted.append(wheel.name)
    return adopted


def seen_on_windows(dist: Path, reports: Path) -> list[str]:
    """Adds the reports of wheel_tests/on_windows.py to the test reports in `dist`. Returns the names of their wheels.

    Raises DataError for a report of another format, or about another file than the wheel of that name in `dist`.
    Returns an empty list if the directory does not exist, because no such job ran.
    """
    results: dict[str, dict[str, str]] = {}
    for path in sorted(reports.rglob("*.json")) if reports.is_dir() else []:
        report = schema.load(path.name, path.read_bytes(), _MAX_BYTES)
        if wrong := list(schema.problems(report, _WINDOWS)):
            raise DataError(f"{path} is not what wheel_tests/on_windows.py writes: {wrong[0]}", remedy=_WINDOWS_AGAIN)
        for each in report["wheels"]:
            earlier = verdict.beside(dist / each["wheel"])
            if earlier is None or earlier.sha256 != each["sha256"]:
                raise DataError(f"{path} is not about {dist / each['wheel']}", remedy=_WINDOWS_AGAIN)
            seen = f"{report['system']}, Python {each['python']}, torch {each['torch']}: {each['checks']} checks passed"
            results.setdefault(each["wheel"], {})[report["installer"]] = seen
    for name, details in results.items():
        path = dist / name
        report = verdict.read(path.with_name(name + VERDICT))
        stages = {**report.stages, verdict.WINDOWS: Stage(status=verdict.PASSED, details=details)}
        replace(report, stages=stages).write(path)
    return sorted(results)


def attach(dist: Path, summary: Path) -> list[str]:
    """Adds the output of benchmarks/trend.py to the test report of the measured wheel in `dist`. Returns its name in a
    list.

    Raises DataError if the file has another format. Returns an empty list if that wheel is not in `dist`.
    """
    trend = schema.load(summary.name, summary.read_bytes(), _MAX_BYTES)
    wrong = list(schema.problems(trend, verdict.BENCHMARKS))
    if wrong:
        raise DataError(f"{summary} is not what benchmarks/trend.py writes: {wrong[0]}", remedy="Run the trend again.")
    version, python = trend["environment"]["flash_attn"], trend["environment"]["python"]
    measured = [
        wheel.name
        for wheel in directory.read(dist).wheels
        if wheel.version == version and python.startswith(f"{wheel.python}.")
    ]
    for name in measured:
        path = dist / name
        replace(verdict.read(path.with_name(name + VERDICT)), benchmarks=trend).write(path)
    return measured
