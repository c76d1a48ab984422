"""Installs a wheel into clean environments, runs wheel_tests there and writes the test report."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

from rocm_wheels import packages
from rocm_wheels.errors import VerifyFailed
from rocm_wheels.matrix import locks, versions
from rocm_wheels.matrix.plan import TORCH_INDEX, Plan
from rocm_wheels.package_modules import module
from rocm_wheels.paths import ROOT
from rocm_wheels.wheel import combinations, contents, interpreters
from rocm_wheels.wheel import verdict as verdicts
from rocm_wheels.wheel.combinations import Combination
from rocm_wheels.wheel.verdict import FAILED, PASSED, PIP, REPAIRED, SELFTEST, UV, Stage, Verdict, tested_stages

WHEEL_TESTS = ROOT / "wheel_tests"
SMOKE = "test_smoke.py"
_PROBES, _PROBE_SECONDS, _PAUSE_SECONDS = 3, 20, 5  # attempts to reach the index: number, timeout, pause
_INSTALL_SECONDS = 1800
_TEST_SECONDS = 1800
_LOG_LINES = 40
# Variables that change the behaviour of an installer or an import. None is set in a clean environment.
_NOT_INHERITED = ("PYTHON", "VIRTUAL_ENV", "CONDA", "FLASH_ATT", "TRITON_", "PYTEST_")


@dataclass(frozen=True, kw_only=True)
class TorchSource:
    """The origin of torch. index: None is PyPI, and `why` says why it is not the ROCm index. cache: the directory of
    uv's packages, None for the user's own cache.
    """

    requirement: str
    index: str | None
    name: str
    why: str = ""
    cache: Path | None = None


@dataclass(kw_only=True)
class _Trial:
    """The tests of one wheel. stages, reports, problems: of the combinations that were tested so far."""

    wheel: Path
    plan: Plan
    beside: Sequence[Path]
    combinations: tuple[Combination, ...]
    stages: dict[str, Stage] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    torch: str = ""

    def run(self, tested: Combination, source: TorchSource, envs: Path, *, require_gpu: bool) -> None:
        """All tests with the first combination, the smoke tests with another one."""
        python, wheels = interpreters.find(tested.python), (self.wheel, *self.beside)
        key = f"torch{tested.torch}-{source.name}-py{tested.python}"
        if tested != self.combinations[0]:
            print(f"  testing it with {tested}", flush=True)
            self._keep(str(tested), _timed(_with_uv, wheels, source, python, envs / f"{key}-uv"))
            return
        self.stages[REPAIRED] = _repaired(self.wheel)
        report = self._keep(PIP, _timed(_with_pip, wheels, source, python, envs / f"{key}-pip"))
        by_uv = self._keep(UV, _timed(_with_uv, wheels, source, python, envs / f"{key}-uv"))
        self.stages |= tested_stages(report, "the wheel could not be installed with pip")
        if require_gpu and report is not None:
            self.stages[SELFTEST], problem = _selftest(envs / f"{key}-pip")
            self.problems += [problem] if problem else []
        self.torch = _torch_words(source, report or by_uv)

    def _keep(self, stage: str, outcome: _Outcome) -> dict[str, Any] | None:
        self.stages[stage], report, problem = outcome
        self.reports += [report] if report is not None else []
        self.problems += [problem] if problem else []
        return report

    def verdict(self) -> Verdict:
        tests = [test for each in self.reports for test in each["tests"]]
        report = Verdict.of(
            contents.read(self.wheel),
            self.plan,
            beside={path.name: contents.read(path).contents for path in self.beside},
            torch_source=self.torch,
            python=self.reports[0]["python"] if self.reports else self.combinations[0].python,
            stages=self.stages,
            tests={each: sum(test["outcome"] == each for test in tests) for each in (PASSED, FAILED, "skipped")},
            failures=tuple(dict.fromkeys(test["name"] for test in tests if test["outcome"] == FAILED)),
        )
        earlier = verdicts.beside(self.wheel)
        return report.with_reports_of(earlier) if earlier else report


def verify(
    wheel: Path,
    plan: Plan,
    work: Path,
    *,
    beside: Sequence[Path] = (),
    require_gpu: bool = False,
    every: bool = False,
) -> Verdict:
    """Tests one wheel as `verify_all` does. Returns its test report."""
    (verdict,) = verify_all([(wheel, plan, beside)], work, require_gpu=require_gpu, every=every)
    return verdict


def verify_all(
    wheels: Sequence[tuple[Path, Plan, Sequence[Path]]],
    work: Path,
    *,
    require_gpu: bool = False,
    every: bool = False,
    one_torch: bool = False,
) -> list[Verdict]:
    """Tests wheels as a user would install them, and writes <wheel>.verdict.json for each. Returns the test reports.

    wheels: each with its plan and the wheels that are installed and tested beside it. `combinations.of` lists the
    Pythons and torches of a wheel; `every` requests all of them. The wheels of a torch are tested one after another, so
    it is downloaded once; `one_torch`, and `every`, delete its packages before the next torch, because several fill a
    disk. With `require_gpu`, torch comes from the ROCm index, else VerifyFailed at once, and the selftest runs too.
    Each wheel has new environments, in `work`/envs. Raises VerifyFailed, after all reports are written, with the names
    of the failing tests or the installer's message, and at once under an emulator; MissingTool without uv or Python.
    """
    if emulator := module("core.platform").PLATFORM.emulator():
        raise VerifyFailed(
            f"{emulator} emulates the GPU of this process, and a test report names hardware alone",
            remedy="Run it without the emulator; `python -m rocm_wheels emulate` tests a wheel under it.",
        )
    data = versions.load()
    trials = [
        _Trial(wheel=wheel, plan=plan, beside=beside,
               combinations=combinations.of(plan, data, interpreters.found, every=every))
        for wheel, plan, beside in wheels
    ]  # fmt: skip
    by_torch: dict[tuple[str, str], list[tuple[_Trial, Combination]]] = {}
    for trial in trials:
        for tested in trial.combinations:
            by_torch.setdefault((tested.torch, tested.torch_index), []).append((trial, tested))
    several = (every or one_torch) and len(by_torch) > 1  # one torch stays in uv's own cache
    packages_of_torch = work / "uv-cache" if several else None
    for group in by_torch.values():
        source = replace(torch_source(group[0][1], require_gpu=require_gpu), cache=packages_of_torch)
        for trial, tested in group:
            trial.run(tested, source, work / "envs", require_gpu=require_gpu)
            shutil.rmtree(work / "envs", ignore_errors=True)
        if packages_of_torch is not None:
            shutil.rmtree(packages_of_torch, ignore_errors=True)

    results, written, failed = [], [], []
    for trial in trials:
        verdict = trial.verdict()
        results.append(verdict)
        written.append(verdict.write(trial.wheel))
        if not verdict.ok:
            unmet = "; ".join(f"{name}: {stage.status}" for name, stage in verdict.unmet())
            failed += [f"{trial.wheel.name} did not pass: {unmet}", *verdict.failures, *trial.problems]
    if failed:
        raise VerifyFailed("\n".join(failed), remedy=f"the whole verdict is in {', '.join(map(str, written))}")
    return results


def torch_source(wanted: Combination, *, require_gpu: bool = False) -> TorchSource:
    """The ROCm index of a combination if it answers, else, with a note, the same version from PyPI.

    PyPI's torch is for CUDA: with `require_gpu`, raises VerifyFailed instead.
    """
    torch, index, name = wanted.torch, f"{TORCH_INDEX}/{wanted.torch_index}", wanted.torch_index
    why = _unanswered(f"{index}/torch/")
    if not why:
        return TorchSource(requirement=f"torch=={torch}+{name}", index=index, name=name)
    if require_gpu:
        raise VerifyFailed(
            f"there is no torch {torch} for ROCm to test with: {why}: {index}/torch/",
            remedy="Run it again once the index answers: PyPI's torch is for CUDA and sees no AMD GPU.",
        )
    print(f"note: {why}: testing with PyPI's torch {torch}, which sees no AMD GPU", file=sys.stderr, flush=True)
    return TorchSource(requirement=f"torch=={torch}", index=None, name="pypi", why=why)


def _unanswered(url: str) -> str:
    """The reason why the ROCm index does not serve a page, "" if it does. A temporary failure is retried."""
    for attempt in range(_PROBES):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        try:
            with urllib.request.urlopen(url, timeout=_PROBE_SECONDS):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            why, passing = f"the ROCm index answered {error.code}", error.code == 429 or error.code >= 500
        except (OSError, http.client.HTTPException) as error:
            why = "the ROCm index could not be reached"
            reason = getattr(error, "reason", error)
            # An unresolved name or a refused connection may also work again in seconds.
            passing = isinstance(reason, (TimeoutError, ConnectionResetError, http.client.HTTPException))
        if not passing:
            return why
    return f"{why}, {_PROBES} times"


def clean_environment() -> dict[str, str]:
    """This process's environment without variables that would affect the environment under test."""
    return {key: value for key, value in os.environ.items() if not key.startswith(_NOT_INHERITED)}


def _repaired(wheel: Path) -> Stage:
    platforms = sorted({tag.platform for tag in parse_wheel_filename(wheel.name)[3]})
    if any(name.startswith("manylinux") for name in platforms):
        return Stage(status=PASSED, details={"platforms": list(platforms)})
    return Stage.not_run(f"the wheel is tagged {', '.join(platforms)}")


_Outcome = tuple[Stage, dict[str, Any] | None, str]


def _timed(install: Any, wheels: Sequence[Path], source: TorchSource, python: Path, env: Path) -> _Outcome:
    """Runs a stage. Returns it, the report of its tests, and the installer's message if it failed."""
    started = time.monotonic()
    try:
        seconds, report = install(wheels, source, python, env)
    except VerifyFailed as error:
        return Stage(status=FAILED, seconds=round(time.monotonic() - started, 2)), None, str(error)
    # Installing by uv is no separate stage: the smoke tests in uv's environment cover it.
    smoke = [test["outcome"] for test in report["tests"] if test["file"] == SMOKE]
    return Stage(status=FAILED if FAILED in smoke else PASSED, seconds=seconds), report, ""


def _with_pip(wheels: Sequence[Path], source: TorchSource, python: Path, env: Path) -> tuple[float, dict[str, Any]]:
    interpreter = environment(source, python, env, locks.DIRECTORY / "pip.txt")
    started = time.monotonic()
    run_installer([interpreter, "-m", "pip", "install", "--no-input", *(wheel.resolve() for wheel in wheels)], cwd=env)
    run_installer([interpreter, "-m", "pip", "check"], cwd=env)
    seconds = round(time.monotonic() - started, 2)
    return seconds, _tests(interpreter, env, WHEEL_TESTS, f"--ignore={WHEEL_TESTS / SMOKE}")


def _with_uv(wheels: Sequence[Path], source: TorchSource, python: Path, env: Path) -> tuple[float, dict[str, Any]]:
    interpreter = environment(source, python, env)
    started = time.monotonic()
    install(interpreter, wheels, env)
    seconds = round(time.monotonic() - started, 2)
    return seconds, _tests(interpreter, env, WHEEL_TESTS / SMOKE)


def install(interpreter: Path, wheels: Sequence[Path], env: Path) -> None:
    """Installs wheels into the environment with uv. Raises VerifyFailed with uv's message."""
    # A rebuilt wheel has the same version: uv must not use the cached one.
    owned = ("flash-attn", *(name.replace("_", "-") for name in versions.load().interfaces))
    refreshed = [word for name in owned for word in ("--refresh-package", name)]
    run_installer(
        [packages.uv(), "pip", "install", "--python", interpreter, *refreshed, *(wheel.resolve() for wheel in wheels)],
        cwd=env,
    )
    run_installer([packages.uv(), "pip", "check", "--python", interpreter], cwd=env)


def environment(source: TorchSource, python: Path, env: Path, *more: Path) -> Path:
    """A new environment with torch and the packages of the tests and of `more` lock files. uv links them from its
    cache.

    torch is what a user has: its index decides which packages it needs. Everything else is locked by hash.
    """
    run_installer([packages.uv(), "venv", "--clear", "--no-project", "--python", python, env])
    interpreter = env / "bin" / "python"
    install: list[str | Path] = [packages.uv(), "pip", "install", "--python", interpreter]
    if source.cache is not None:
        install += ["--cache-dir", source.cache]
    if source.index is not None:
        run_installer([*install, "--index-url", source.index, source.requirement])
    run_installer([*install, source.requirement])
    files = (locks.DIRECTORY / "wheel_tests.txt", *more)
    run_installer([*install, "--require-hashes", *(word for file in files for word in ("-r", file))])
    return interpreter


def _tests(interpreter: Path, env: Path, *tests: str | Path) -> dict[str, Any]:
    """The report of a pytest run. Raises VerifyFailed if pytest itself failed."""
    report = env / "report.json"
    command: list[str | Path] = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", WHEEL_TESTS / "pytest.ini", "--report", report, *tests]
    done = _call(command, seconds=_TEST_SECONDS, cwd=env)
    # 1 means failed tests, which the report names. 5, no test collected, must not count as a pass.
    if done.returncode not in (0, 1) or not report.is_file():
        raise VerifyFailed(f"pytest ended with {done.returncode}:\n{_tail(done.stdout)}")
    loaded: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return loaded


def _selftest(env: Path) -> tuple[Stage, str]:
    """Runs `python -m flash_attn.selftest` in an environment with the wheel, as the owner of a GPU runs it."""
    started, path = time.monotonic(), env / "selftest.json"
    done = _call([env / "bin/python", "-m", "flash_attn.selftest", "--json", path], seconds=_TEST_SECONDS, cwd=env)
    seconds = round(time.monotonic() - started, 2)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        checks = [check["ok"] for check in report["checks"]]
        details = {"checks": len(checks), "passed": checks.count(True), "device": report["machine"]["device"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        return Stage(status=FAILED, seconds=seconds), f"the selftest wrote no report ({error!r}):\n{_tail(done.stdout)}"
    if done.returncode == 0 and report["ok"] is True:
        return Stage(status=PASSED, seconds=seconds, details=details), ""
    return Stage(status=FAILED, seconds=seconds, details=details), _tail(done.stdout)


def _torch_words(source: TorchSource, report: Mapping[str, Any] | None) -> str:
    version = report["torch"] if report else source.requirement
    return f"PyPI {version}: {source.why}" if source.index is None else f"{source.index} {version}"


def _call(command: Sequence[str | Path], *, seconds: int, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    variables = {**clean_environment(), "PYTHONNOUSERSITE": "1"}
    if cwd is not None:
        # uv does not byte-compile. With byte code, each process imports torch in a third of the time, and no
        # __pycache__ gets into the repository.
        variables["PYTHONPYCACHEPREFIX"] = str(cwd / "pycache")
    try:
        return subprocess.run(
            [str(part) for part in command],
            env=variables,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        words = " ".join(str(part) for part in command)
        raise VerifyFailed(f"`{words}` took over {seconds} s") from error


def run_installer(command: Sequence[str | Path], *, cwd: Path | None = None) -> None:
    """Runs a command of pip or uv. Raises VerifyFailed with the end of its output if it fails."""
    done = _call(command, seconds=_INSTALL_SECONDS, cwd=cwd)
    if done.returncode != 0:
        words = " ".join(str(part) for part in command)
        raise VerifyFailed(f"`{words}` ended with {done.returncode}:\n{_tail(done.stdout)}")


def _tail(log: str) -> str:
    return "\n".join(log.splitlines()[-_LOG_LINES:])
