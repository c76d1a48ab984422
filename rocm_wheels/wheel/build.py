"""Runs a plan: check, compile, assemble, repair, verify, with one line of progress for each stage."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_wheels.errors import DataError, VerifyFailed, writing_to
from rocm_wheels.matrix import names, versions
from rocm_wheels.matrix.cells import has_interfaces
from rocm_wheels.matrix.plan import Plan, make_plan, make_universal_plan
from rocm_wheels.matrix.platforms import DEFAULT, platform_of
from rocm_wheels.matrix.versions import Interface
from rocm_wheels.wheel import closing, contents
from rocm_wheels.wheel.verdict import Verdict
from rocm_wheels.wheel.workspace import work_directory

if TYPE_CHECKING:
    from rocm_wheels.wheel.numbering import PublicWheel

Say = Callable[[str], None]


class StageLog:
    """Prints the result and the duration of each stage when it ends."""

    def __init__(self, say: Say) -> None:
        self.say = say

    @contextlib.contextmanager
    def stage(self, name: str, into: Path) -> Iterator[list[str]]:
        """Times a stage that writes into a directory. The body appends details to the list, which become part of its
        line.
        """
        detail: list[str] = []
        start = time.monotonic()
        with writing_to(into):
            yield detail
        self.say(f"{name:<12}{time.monotonic() - start:7.1f} s  {', '.join(detail)}".rstrip())


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
) -> Path:
    """Builds the wheel of a plan into `dist` and returns its path. Its test report is next to it.

    without: names of compilers whose kernels the wheel does not get. cached_kernels: compile nothing; CompileFailed
    names the first kernel that is not in the cache. cibuildwheel: the wheel is assembled, repaired and tested in a
    manylinux image before it is verified here. public: the public wheels; a wheel that differs from the public one of
    its name gets the next build number.

    Errors of the stages are not caught. After a VerifyFailed the wheel and its test report are left for inspection.
    """
    # Imported here: a Python without the packages of the stages must be able to check a plan.
    from rocm_wheels.compile import kernels, toolchain
    from rocm_wheels.compile.ck import planner as ck_planner
    from rocm_wheels.wheel import (
        assemble,
        combinations,
        interpreters,
        launcher,
        manylinux,
        numbering,
        repair,
        verify,
        windows,
    )

    stages: dict[str, tuple[Callable[..., Path], Callable[[Path, Path], Path]]] = {
        "linux": (launcher.build, repair.repair),
        "windows": (partial(launcher.build_for_windows, version=plan.cell.flash_attn), windows.repair),
    }
    build_launcher, mend = stages[plan.platform]
    check_writable(dist=dist, cache=cache)
    log = StageLog(say)
    with work_directory(cache) as work:
        built, wheels, checks = (work / name for name in ("launcher", "wheel", "verify"))
        for directory in (built, wheels, checks):
            directory.mkdir()
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
        with log.stage("compile", cache) as detail:
            backend, tools = plan.cell.backend, plan.toolchain
            if cached_kernels:
                kernels.require_cached(plan.targets, cache=cache, backend=backend, toolchain=tools, without=without)
            stores = kernels.compile_store(
                plan.targets,
                cache=cache,
                jobs=plan.jobs,
                backend=backend,
                toolchain=tools,
                without=without,
                together=True,
            )
            detail += [f"{target} {closing.size(store)}" for target, store in stores.items()]
        with log.stage("assemble", cache) as detail:
            planner = ck_planner.build(built, cache=cache) if plan.cell.backend == "ck" else None
            make = manylinux.assemble if cibuildwheel else assemble.assemble
            compiled = build_launcher(built, cache=cache)
            raw = make(plan, stores, compiled, wheels, planner=planner)
            detail.append(raw.name)
        with log.stage("repair", dist) as detail:
            repaired = numbering.assign(mend(raw, dist), public)
            detail.append(repaired.name)
        beside = []
        for interface in _interfaces(plan):
            with log.stage(interface.name.replace("_", "-"), dist) as detail:
                beside.append(numbering.assign(assemble.assemble_interface(interface, plan, dist), public))
                detail.append(beside[-1].name)
        if plan.platform == DEFAULT:
            say(f"  testing it in clean environments with {tested}; torch may have to be downloaded")
        with log.stage("verify", cache) as detail:
            if plan.platform == DEFAULT:
                verdict = verify.verify(repaired, plan, checks, beside=beside)
            else:
                verdict = windows.verify(repaired, plan, checks)
            detail.append("passed" if verdict.ok else "failed")
    say(f"\n{verdict.summary()}\n")
    for line in closing.facts(plan, repaired, beside):
        say(line)
    return repaired


def verify_again(wheel: Path, *, cache: Path, require_gpu: bool, every: bool = False) -> Verdict:
    """Tests a finished wheel on this machine and replaces its test report. every: test the universal wheel with every
    torch.

    Raises DataError if it is not a wheel of these sources, VerifyFailed if it does not pass, or with `require_gpu` if
    its tests did not run on a GPU.
    """
    from rocm_wheels.wheel import verdict, verify, windows

    plan = plan_of(wheel)
    if plan.platform != DEFAULT and require_gpu:
        raise DataError(
            f"{wheel.name} is for {plan.platform.capitalize()}, this machine cannot run it",
            remedy="Install it there and run: python -m flash_attn.selftest",
        )
    check_writable(cache=cache, verdicts=wheel.absolute().parent)
    with work_directory(cache) as work:
        if plan.platform != DEFAULT:
            return windows.verify(wheel, plan, work)
        found = verify.verify(wheel, plan, work, beside=_beside(wheel, plan), require_gpu=require_gpu, every=every)
    if require_gpu and found.gpu.status != verdict.PASSED:
        raise VerifyFailed(
            f"{wheel.name} was not tested on a GPU: {found.gpu.status}",
            remedy="Give the job its GPU (--device=/dev/kfd --device=/dev/dri --group-add video).",
        )
    return found


def _interfaces(plan: Plan) -> Sequence[Interface]:
    """The interfaces whose wheels accompany the wheel. They run on every system, so the build for Linux makes them."""
    data = versions.load()
    wanted = plan.platform == DEFAULT and has_interfaces(data, plan.cell)
    return tuple(data.interfaces.values()) if wanted else ()


def _beside(wheel: Path, plan: Plan) -> list[Path]:
    """The interface wheels in the same directory with the same label."""
    beside = wheel.resolve().parent
    return sorted(path for name in versions.load().interfaces for path in beside.glob(f"{name}-*+{plan.label}-*.whl"))


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
