"""Wheels that are made one after another from the same kernels: a store is packed once for all of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_wheels.errors import writing_to
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import has_interfaces
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.matrix.platforms import DEFAULT
from rocm_wheels.matrix.versions import Interface

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


@dataclass(kw_only=True)
class Series:
    """Makes wheels in `dist`. cached_kernels, without, public, packages: as of `build.run`. Errors of stages are not
    caught.

    stores: targets, backend and toolchain -> the packed stores. interfaces: label -> the wheels of the interfaces,
    which all Pythons share.
    """

    dist: Path
    cache: Path
    log: StageLog
    cached_kernels: bool = False
    without: Sequence[str] = ()
    public: Sequence[PublicWheel] = ()
    packages: bool = True
    stores: dict[tuple[tuple[str, ...], str, str], dict[str, Path]] = field(default_factory=dict)
    interfaces: dict[str, list[Path]] = field(default_factory=dict)

    def make(self, plan: Plan, work: Path, *, cibuildwheel: bool = False) -> tuple[Path, list[Path]]:
        """Makes the wheel of a plan, from its kernels to its public name. Returns its path and the wheels beside it.

        cibuildwheel: it is assembled, repaired and tested in a manylinux image.
        """
        from rocm_wheels.compile.ck import planner as ck_planner
        from rocm_wheels.wheel import assemble, launcher, manylinux, numbering, repair, windows

        stages: dict[str, tuple[Callable[..., Path], Callable[[Path, Path], Path]]] = {
            "linux": (launcher.build, repair.repair),
            "windows": (partial(launcher.build_for_windows, version=plan.cell.flash_attn), windows.repair),
        }
        build_launcher, mend = stages[plan.platform]
        built, wheels = work / "launcher", work / "wheel"
        for directory in (built, wheels):
            directory.mkdir()
        stores = self._stores(plan)
        with self.log.stage("assemble", self.cache) as detail:
            planner = ck_planner.build(built, cache=self.cache) if plan.cell.backend == "ck" else None
            make = manylinux.assemble if cibuildwheel else assemble.assemble
            raw = make(plan, stores, build_launcher(built, cache=self.cache), wheels, planner=planner)
            detail.append(raw.name)
        with self.log.stage("repair", self.dist) as detail:
            repaired = numbering.assign(mend(raw, self.dist), self.public)
            detail.append(repaired.name)
        if (companions := interfaces(plan)) and plan.label not in self.interfaces:
            into = self.dist if self.packages else work / "packages"
            into.mkdir(exist_ok=True)
            self.interfaces[plan.label] = [self._interface(each, plan, into) for each in companions]
        return repaired, self.interfaces[plan.label] if companions else []

    def _stores(self, plan: Plan) -> dict[str, Path]:
        from rocm_wheels.compile import kernels
        from rocm_wheels.wheel import closing

        targets, backend, tools = key = (plan.targets, plan.cell.backend, plan.toolchain)
        cache, without = self.cache, self.without
        if key in self.stores:
            return self.stores[key]
        with self.log.stage("compile", cache) as detail:
            if self.cached_kernels:
                kernels.require_cached(targets, cache=cache, backend=backend, toolchain=tools, without=without)
            self.stores[key] = kernels.compile_store(
                targets, cache=cache, jobs=plan.jobs, backend=backend, toolchain=tools, without=without, together=True,
            )  # fmt: skip
            detail += [f"{target} {closing.size(store)}" for target, store in self.stores[key].items()]
        return self.stores[key]

    def _interface(self, interface: Interface, plan: Plan, into: Path) -> Path:
        from rocm_wheels.wheel import assemble, numbering

        with self.log.stage(interface.name.replace("_", "-"), into) as detail:
            made = numbering.assign(assemble.assemble_interface(interface, plan, into), self.public)
            detail.append(made.name)
        return made


def interfaces(plan: Plan) -> Sequence[Interface]:
    """The interfaces whose wheels accompany the wheel. They run on every system, so the build for Linux makes them."""
    data = versions.load()
    needed = plan.platform == DEFAULT and has_interfaces(data, plan.cell)
    return tuple(data.interfaces.values()) if needed else ()
