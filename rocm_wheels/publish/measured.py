"""Adds results of later jobs to the test report of a wheel: the tests on a GPU, and benchmarks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rocm_wheels import forms
from rocm_wheels.errors import DataError
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.publish import directory
from rocm_wheels.wheel import verdict

_MAX_BYTES = 1 << 20


def adopt(dist: Path, verdicts: Path) -> list[str]:
    """Replaces test reports in `dist` by the reports of the GPU job, which keep what other GPUs reported. Returns the
    names of their wheels.

    Raises DataError for a report about another file than the wheel of that name in `dist`. Returns an empty list if the
    directory does not exist, because no GPU job ran.
    """
    found = []
    for path in sorted(verdicts.glob(f"*{VERDICT}")) if verdicts.is_dir() else []:
        verdict_of_gpu = verdict.read(path)
        wheel = dist / path.name.removesuffix(VERDICT)
        earlier = verdict.beside(wheel)
        if earlier is None or verdict_of_gpu.sha256 != earlier.sha256:
            raise DataError(
                f"{path} is not about {wheel}", remedy="Run the GPU job again on the wheels that are to be published."
            )
        verdict_of_gpu.with_reports_of(earlier).write(wheel)
        found.append(wheel.name)
    return found


def attach(dist: Path, summary: Path) -> list[str]:
    """Adds the output of benchmarks/trend.py to the test report of the measured wheel in `dist`. Returns its name in a
    list.

    Raises DataError if the file has another format. Returns an empty list if that wheel is not in `dist`.
    """
    found = forms.load(summary.name, summary.read_bytes(), _MAX_BYTES)
    wrong = list(forms.problems(found, verdict.BENCHMARKS))
    if wrong:
        raise DataError(f"{summary} is not what benchmarks/trend.py writes: {wrong[0]}", remedy="Run the trend again.")
    version, python = found["environment"]["flash_attn"], found["environment"]["python"]
    measured = [
        wheel.name
        for wheel in directory.read(dist).wheels
        if wheel.version == version and python.startswith(f"{wheel.python}.")
    ]
    for name in measured:
        path = dist / name
        replace(verdict.read(path.with_name(name + VERDICT)), benchmarks=found).write(path)
    return measured
