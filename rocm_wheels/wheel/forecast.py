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
from rocm_wheels.tables import version_key
from rocm_wheels.wheel import combinations

ENVIRONMENT = ROOT / "build" / "env"
ENVIRONMENT_MIB = 1331
KERNEL_KIB = 22  # per kernel in the cache: 13.6 MiB for 636 kernels of gfx942, November 2026
# An environment with torch for ROCm, as others measured it: 2.3.1+rocm6.0, which brings ROCm (pytorch/pytorch#129165),
# and AMD's with the packages of one GPU of ROCm 10 (ultralytics/ultralytics#24137).
TORCH_MIB, TORCH_BESIDE_ROCM_MIB = 13 * 1024, 5800
ROCM_BESIDE_TORCH = (7, 14)  # from which ROCm on it comes in packages of its own


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The estimate for a build. `kernels`, `cached` and `minutes` are None if this Python lacks the packages that list
    the kernels; `why` is the reason.

    disk_mib: with torch_mib, which is for the torch of each test; uv's cache may have it already. shorter: options that
    make the build shorter, as a sentence.
    """

    kernels: int | None
    cached: int | None
    minutes: int | None
    disk_mib: int
    torch_mib: int
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
        torch = f", {self.torch_mib / 1024:.1f} of them for torch" if self.torch_mib else ""
        downloads = f"downloads: {', '.join(self.downloads) or 'none'}"
        return "; ".join(
            filter(None, (work, f"{self.disk_mib / 1024:.1f} GiB of disk{torch}", downloads, self.shorter))
        )


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
    torches = {f"torch {each.torch}+{each.torch_index}": _torch_mib(each.torch_index) for each in tested}
    downloads = (*([] if made else ["packages of locks/build.txt"]), *torches)
    torch_mib = sum(torches.values())
    disk_mib = torch_mib + (0 if made else ENVIRONMENT_MIB)
    try:
        kernels, cached, seconds = _compiling(plan, cache, without)
    except MissingTool:
        why = "kernels are not counted before ./build_rocm.sh --setup"
        return Forecast(
            kernels=None,
            cached=None,
            minutes=None,
            disk_mib=disk_mib,
            torch_mib=torch_mib,
            downloads=downloads,
            shorter=plan.shorter,
            why=why,
        )
    return Forecast(
        kernels=kernels,
        cached=cached,
        minutes=math.ceil(seconds / (60 * plan.jobs)),
        disk_mib=disk_mib + -(-(kernels - cached) * KERNEL_KIB // 1024),
        torch_mib=torch_mib,
        downloads=downloads,
        shorter=plan.shorter,
    )


def _torch_mib(index: str) -> int:
    """The disk that an environment with torch takes, by the directory of its index, such as "rocm7.2"."""
    beside = version_key(index.removeprefix("rocm")) >= ROCM_BESIDE_TORCH
    return TORCH_BESIDE_ROCM_MIB if beside else TORCH_MIB


def _compiling(plan: Plan, cache: Path | None, without: Sequence[str]) -> tuple[int, int, float]:
    """(kernels, cached kernels, core seconds for the others). Raises MissingTool without the build's packages."""
    with packages_of("build"):
        from rocm_wheels.compile import units
        from rocm_wheels.compile.cache import read
        from rocm_wheels.compile.progress import core_seconds

        selection = units.find(plan.targets, backend=plan.cell.backend, toolchain=plan.toolchain, without=without)
    missing = [unit for unit in selection if cache is None or read(unit, cache) is None]
    kernels, lacking = (sum(len(unit.kernels) for unit in some) for some in (selection, missing))
    return kernels, kernels - lacking, core_seconds(missing)
