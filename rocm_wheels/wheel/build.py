"""Runs a plan: check, compile, assemble, repair, verify, with one line of progress for each stage."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_wheels.errors import DataError, VerifyFailed
from rocm_wheels.matrix import names, versions
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.matrix.plan import Plan, make_plan, make_universal_plan
from rocm_wheels.matrix.platforms import DEFAULT, platform_of
from rocm_wheels.wheel import closing, contents
from rocm_wheels.wheel.series import Say, Series, StageLog, interfaces
from rocm_wheels.wheel.verdict import Verdict
from rocm_wheels.wheel.workspace import work_directory

if TYPE_CHECKING:
    from rocm_wheels.wheel.numbering import PublicWheel


def check_writable(
    *, cache: Path, dist: Path | None = None, verdicts: Path | None = None, results: Path | None = None
) -> None:
    """Creates the directories. Raises DataError, which names the option to pass, for a directory that is not
    writable.
    """
    for directory, what, remedy in (
        (cache, "the cache", "Set ROCM_WHEELS_CACHE, or give --cache,"),
        (dist, "the directory of the wheel", "Give --dist,"),
        (verdicts, "the directory of the wheel, for its verdict,", "Copy the wheel to"),
        (results, "the directory of the results", "Give --out,"),
    ):
        if directory is None:
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            message = f"{what} {directory} cannot be written: {error.strerror}"
            raise DataError(message, remedy=f"{remedy} a directory that can.") from None


def run(
    plan: Plan,
    *,
    dist: Path,
    cache: Path,
    say: Say,
    cached_kernels: bool = False,
    without: Sequence[str] = (),
    cibuildwheel: bool = False,
    public: Sequence[PublicWheel] = (),
    packages: bool = False,
) -> Path:
    """Builds the wheel of a plan into `dist` and returns its path. Its test report is next to it.

    without: names of compilers whose kernels the wheel does not get. cached_kernels: compile nothing; CompileFailed
    names the first kernel that is not in the cache. cibuildwheel: the wheel is assembled, repaired and tested in a
    manylinux image before it is verified here. public: the public wheels; a wheel that differs from the public one of
    its name gets the next build number. packages: the wheels of the interfaces (FlashAttention-3, vLLM's plug-in and
    others) go into `dist` too; else they are made for the tests alone.

    Errors of the stages are not caught. After a VerifyFailed the wheel and its test report are left for inspection.
    """
    # Imported here: a Python without the packages of the stages must be able to check a plan.
    from rocm_wheels.compile import toolchain
    from rocm_wheels.wheel import combinations, interpreters, manylinux, repair, verify, windows

    check_writable(dist=dist, cache=cache)
    log = StageLog(say)
    series = Series(
        dist=dist,
        cache=cache,
        log=log,
        cached_kernels=cached_kernels,
        without=without,
        public=public,
        packages=packages,
    )
    with work_directory(cache) as work:
        checks = work / "verify"
        checks.mkdir()
        with log.stage("check", cache) as detail:
            toolchain.check(plan)
            if plan.platform == DEFAULT:
                repair.check()
                (tested, *_) = combinations.of(plan, versions.load(), interpreters.found)
                python = interpreters.find(tested.python)  # for verify: report it now, not after hours
                detail.append(f"Python {tested.python} at {python}")
            if cibuildwheel:
                manylinux.check(plan)
            detail += [plan.compiler, f"toolchain {plan.toolchain}"]
        repaired, beside = series.make(plan, work, cibuildwheel=cibuildwheel)
        if plan.platform == DEFAULT:
            say(f"  testing it in clean environments with {tested}; torch may have to be downloaded")
        with log.stage("verify", cache) as detail:
            if plan.platform == DEFAULT:
                verdict = verify.verify(repaired, plan, checks, beside=beside)
            else:
                verdict = windows.verify(repaired, plan, checks)
            detail.append("passed" if verdict.ok else "failed")
    say(f"\n{verdict.summary()}\n")
    for line in closing.facts(plan, repaired, beside if packages else ()):
        say(line)
    return repaired


def assemble_all(
    plans: Sequence[Plan], *, dist: Path, cache: Path, say: Say, public: Sequence[PublicWheel] = ()
) -> None:
    """Makes the wheels of plans in `dist` from compiled kernels alone; `verify_again` tests them. A universal wheel for
    Linux is made and tested in a manylinux image, as by `run` with `cibuildwheel`.
    """
    check_writable(dist=dist, cache=cache)
    series = Series(dist=dist, cache=cache, log=StageLog(say), cached_kernels=True, public=public)
    for plan in plans:
        in_image = isinstance(plan.cell, Universal) and plan.platform == DEFAULT
        with work_directory(cache) as work:
            series.make(plan, work, cibuildwheel=in_image)


def verify_again(
    wheels: Sequence[Path], *, cache: Path, require_gpu: bool, every: bool = False, one_torch: bool = False
) -> list[Verdict]:
    """Tests finished wheels on this machine and replaces their test reports. every, one_torch: as of
    `verify.verify_all`.

    Raises DataError if one is not a wheel of these sources, VerifyFailed if one does not pass, or with `require_gpu` if
    its tests did not run on a GPU.
    """
    from rocm_wheels.wheel import verdict, verify, windows

    plans = {wheel: plan_of(wheel) for wheel in wheels}
    elsewhere = [wheel for wheel in wheels if plans[wheel].platform != DEFAULT]
    if elsewhere and require_gpu:
        raise DataError(
            f"{elsewhere[0].name} is for {plans[elsewhere[0]].platform.capitalize()}, this machine cannot run it",
            remedy="Install it there and run: python -m flash_attn.selftest",
        )
    verdicts = []
    for wheel in wheels:
        check_writable(cache=cache, verdicts=wheel.absolute().parent)
    for wheel in elsewhere:
        with work_directory(cache) as work:
            verdicts.append(windows.verify(wheel, plans[wheel], work))
    here = [(wheel, plans[wheel], _beside(wheel, plans[wheel])) for wheel in wheels if wheel not in elsewhere]
    with work_directory(cache) as work:
        verdicts += verify.verify_all(here, work, require_gpu=require_gpu, every=every, one_torch=one_torch)
    if missed := [each for each in verdicts if require_gpu and each.gpu.status != verdict.PASSED]:
        raise VerifyFailed(
            f"{missed[0].wheel} was not tested on a GPU: {missed[0].gpu.status}",
            remedy="Give the job its GPU (--device=/dev/kfd --device=/dev/dri --group-add video).",
        )
    return verdicts


def _beside(wheel: Path, plan: Plan) -> list[Path]:
    """The interface wheels in the same directory with the same label, if they accompany this wheel."""
    beside = wheel.resolve().parent
    return sorted(path for each in interfaces(plan) for path in beside.glob(f"{each.name}-*+{plan.label}-*.whl"))


def plan_of(wheel: Path) -> Plan:
    """The plan of a finished wheel, as far as its name and contents tell. Raises DataError for a file that is not a
    wheel.
    """
    universal = names.parse_universal(wheel.name)
    name = None if universal else names.parse(wheel.name)
    with contents.Contents(wheel) as opened:
        targets = opened.build_info().get("targets")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise DataError(f"{wheel.name} is not a wheel that was built with these sources: it names no GPU targets")
    env = {"PYTORCH_ROCM_ARCH": ";".join(targets)}
    if name is None:
        platform = platform_of(wheel.name).name
        return make_universal_plan(versions.load(), flash_attn=str(universal), env=env, platform=platform)
    return make_plan(
        versions.load(),
        flash_attn=name.flash_attn,
        python=name.python,
        torch=name.torch_minor,
        rocm=name.rocm,
        backend=name.backend,
        env=env,
    )
