"""Estimates a build before it starts: kernels, minutes, disk, downloads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rocm_wheels.errors import MissingTool
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.matrix.platforms import DEFAULT
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.packages import packages_of
from rocm_wheels.paths import ROOT
from rocm_wheels.wheel import combinations

ENVIRONMENT = ROOT / "build" / "env"
ENVIRONMENT_MIB = 1331
KERNEL_KIB = 22  # per kernel in the cache: 13.6 MiB for 636 kernels of gfx942, November 2026


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The estimate for a build. `kernels`, `cached` and `minutes` are None if this Python lacks the packages that list
    the kernels; `why` is the reason.

    disk_mib: without the torch of each test, which takes several GiB. shorter: options that make the build shorter, as
    a sentence.
    """

    kernels: int | None
    cached: int | None
    minutes: int | None
    disk_mib: int
    downloads: tuple[str, ...]
    shorter: str
    why: str = ""

    def as_dict(self) -> dict[str, object]:
        """JSON-ready values."""
        return asdict(self)

    @property
    def line(self) -> str:
        """One line for users."""
        work = self.why or f"{self.kernels} kernels, {self.cached} of them cached, about {self.minutes} min to compile"
        torch = " and several GiB for torch" if any(name.startswith("torch ") for name in self.downloads) else ""
        downloads = f"downloads: {', '.join(self.downloads) or 'none'}"
        return "; ".join(filter(None, (work, f"{self.disk_mib} MiB of disk{torch}", downloads, self.shorter)))


def of(
    plan: Plan,
    versions: Versions,
    *,
    cache: Path | None,
    without: Sequence[str] = (),
    found: Callable[[str], object | None] = str,
) -> Forecast:
    """The forecast for a plan. cache: None if there is none yet. found: returns the path of a Python, as in
    `combinations.of`.
    """
    made = (ENVIRONMENT / "stamp").is_file()
    # A wheel for Windows is tested without torch here, because Linux cannot run it.
    tested = combinations.of(plan, versions, found) if plan.platform == DEFAULT else ()
    torches = dict.fromkeys(each.torch for each in tested)
    downloads = (*([] if made else ["packages of locks/build.txt"]), *(f"torch {torch}" for torch in torches))
    environment = 0 if made else ENVIRONMENT_MIB
    try:
        kernels, cached, seconds = _compiling(plan, cache, without)
    except MissingTool:
        why = "kernels are not counted before ./build_rocm.sh --setup"
        return Forecast(
            kernels=None,
            cached=None,
            minutes=None,
            disk_mib=environment,
            downloads=downloads,
            shorter=plan.shorter,
            why=why,
        )
    return Forecast(
        kernels=kernels,
        cached=cached,
        minutes=math.ceil(seconds / (60 * plan.jobs)),
        disk_mib=environment + -(-(kernels - cached) * KERNEL_KIB // 1024),
        downloads=downloads,
        shorter=plan.shorter,
    )


def _compiling(plan: Plan, cache: Path | None, without: Sequence[str]) -> tuple[int, int, float]:
    """(kernels, cached kernels, core seconds for the others). Raises MissingTool without the build's packages."""
    with packages_of("build"):
        from rocm_wheels.compile import units
        from rocm_wheels.compile.cache import read
        from rocm_wheels.compile.progress import core_seconds

        wanted = units.find(plan.targets, backend=plan.cell.backend, toolchain=plan.toolchain, without=without)
    missing = [unit for unit in wanted if cache is None or read(unit, cache) is None]
    kernels, lacking = (sum(len(unit.kernels) for unit in some) for some in (wanted, missing))
    return kernels, kernels - lacking, core_seconds(missing)
