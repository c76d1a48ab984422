"""Figures in the docs that follow from the data: ranges of versions, counts of kernels, wheels and jobs.

A page holds each between two comments, `<!--=torch-->2.5 to 2.15<!--/-->`. `coverage --readme` writes it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rocm_wheels.compile import sources
from rocm_wheels.compile.asm import package as assembly
from rocm_wheels.compile.ck import instances
from rocm_wheels.errors import DataError
from rocm_wheels.matrix import rows
from rocm_wheels.matrix.platforms import PLATFORMS
from rocm_wheels.matrix.rows import Row
from rocm_wheels.matrix.select import select
from rocm_wheels.matrix.targets import has_kernels, universal
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.tables import version_key

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "docs/notes/*.md", "candle-flash-rocm/README.md")
_PLACE = re.compile(r"(<!--=([\w.-]+)-->)(.*?)(<!--/-->)", re.DOTALL)
# Estimated minutes of a hosted runner: to start a job and set it up, to download and unpack a torch for ROCm, to
# assemble a wheel, and to test it in two environments.
MINUTES = {"job": 2, "torch": 4, "assemble": 1, "test": 3}
_OTHER_JOBS = 6  # without a GPU runner and Windows: draft, matrix, crate, sign, publish, index
_OTHER_ARTIFACTS = 2  # list of public wheels, crate
_WINDOWS = 2  # jobs and reports: pip and uv
_JOBS_AT_ONCE = 20  # on a free plan of GitHub
OTHER_MINUTES = 15 + 10 + 145 + 120  # limits of the jobs that each run once: draft, matrix, trend, publish
_KINDS = ("triton", "ck", "asm")  # compilers


def figures(versions: Versions, matrix: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Name -> figure. matrix: ROCM_MATRIX of create_matrix.py."""
    selected = select(versions, {"rocm": matrix})
    made = rows.rows(versions, selected.cells, None, selected.universals)
    stores = {target: _kernels(versions, target) for target in universal(versions, None)}
    seconds = [_seconds(versions, row) for row in made["kernels"]]
    limits = versions.jobs
    longest = (
        math.ceil(len(seconds) / _JOBS_AT_ONCE) * limits.kernel_minutes
        + math.ceil(len(made["assemble"]) / _JOBS_AT_ONCE) * limits.assemble_minutes
        + math.ceil(len(made["verify"]) / _JOBS_AT_ONCE) * limits.verify_minutes
        + len(made["gpu"]) * limits.gpu_minutes
        + OTHER_MINUTES
    )
    checks = sources.module("diagnosis.selftest.cases").cases()
    counted = {
        "universal-names": len(selected.universals),
        "kernel-jobs": len(seconds),
        "wheels": len(made["wheels"]),
        "assemble-jobs": len(made["assemble"]),
        "verify-jobs": len(made["verify"]),
        "gpu-jobs": len(made["gpu"]),
        "compile-minutes": math.ceil(max(seconds) / 60),
        "selftest-checks": len(checks),
        "selftest-checks-cpu": sum(case.on_cpu for case in checks),
        **{f"wheels-{name}": sum(cell.backend == name for cell in selected.cells) for name in versions.backends},
        **{f"targets-{name}": len(universal(versions, None, platform=name)) for name in PLATFORMS},
        **{f"kernels-{name}": sum(count[name] for count in stores.values()) for name in _KINDS},
        **{f"kernels-{name}-{target}": store[name] for target, store in stores.items() for name in _KINDS},
        **{f"ck-{name}": count for name, count in Counter(each.op for each in instances.table()).items()},
    }
    return {
        "torch": _span(".".join(version.split(".")[:2]) for version in versions.torch),
        "python": _span(versions.python),
        "rocm": _span(versions.rocm),
        "flash-attn-names": ", ".join(versions.flash_attn_names),
        "compile-hours": f"{sum(seconds) / 3600:.1f}",
        "longest-hours": f"{longest / 60:.1f}",
        **cost(versions, made),
        **{name: str(count) for name, count in counted.items()},
    }


def cost(versions: Versions, made: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    """Jobs, torches, artifacts and estimated hours of a run, and those of a run with a job for each wheel ("before").

    made: `rows.rows`. A universal wheel is tested with two torches, another one with the torch of its ROCm.
    """
    kernels, wheels = len(made["kernels"]), len(made["wheels"])
    cells = [row for row in made["wheels"] if row["python-version"]]
    universal = wheels - len(cells)
    torches = len({(row["torch-version"], row["torch-index"], row["python-version"]) for row in cells})
    groups = len(made["assemble"]) + len(made["verify"])
    seconds = sum(_seconds(versions, row) for row in made["kernels"])
    windows = _WINDOWS * bool(rows.count_for_windows(versions, made["wheels"]))
    costs: dict[str, str] = {}
    for when, jobs, downloads in (
        ("before", wheels, len(cells) + 2 * universal),
        ("after", groups, torches + 2 * bool(universal)),
    ):
        all_jobs = kernels + jobs + _OTHER_JOBS + windows
        minutes = all_jobs * MINUTES["job"] + downloads * MINUTES["torch"] + seconds / 60
        minutes += wheels * (MINUTES["assemble"] + MINUTES["test"])
        costs |= {
            f"jobs-{when}": str(all_jobs),
            f"torches-{when}": str(downloads),
            f"artifacts-{when}": str(kernels + jobs + _OTHER_ARTIFACTS + windows),
            f"hours-{when}": f"{minutes / 60:.1f}",
        }
    return {**costs, **{f"minutes-{name}": str(each) for name, each in MINUTES.items()}}


def compile_seconds(versions: Versions, targets: Iterable[str]) -> float:
    """The estimated core seconds that the kernels of GPU targets take without a cache."""
    total = 0.0
    for target in targets:
        kernels, family = _kernels(versions, target), sources.module("kernels.targets").get(target).family
        total += sum(kernels[name] * versions.backends[name].seconds(family) for name in ("ck", "triton"))
    return total


def fill(root: Path, pages: Mapping[Path, str], known: Mapping[str, str]) -> dict[Path, str]:
    """Writes the figures into the texts of `pages`, and of the other pages of a repository that hold any. Raises
    DataError for a figure that is not known.
    """
    filled = dict(pages)
    for path in (path for pattern in PAGES for path in sorted(root.glob(pattern))):
        text = filled.get(path) or path.read_text(encoding="utf-8")
        for _, name, *_ in _PLACE.findall(text):
            if name not in known:
                raise DataError(f"{path}: there is no figure {name!r}", remedy=f"Known figures: {', '.join(known)}.")
        new = _PLACE.sub(lambda match: f"{match[1]}{known[match[2]]}{match[4]}", text)
        if path in filled or new != text:
            filled[path] = new
    return filled


def outside(page: str) -> str:
    """A page without its figures."""
    return _PLACE.sub("", page)


def _kernels(versions: Versions, target: str) -> dict[str, int]:
    """Compiler -> its kernels in the store of a GPU target in the universal wheel."""
    of_gpu = sources.module("kernels.targets").get(target)
    ck = has_kernels(versions, target, "ck")
    return {
        "triton": len(sources.module("kernels.variants").table(target)),
        "ck": sum(ck and not of_gpu.loses_range(instance.dtype) for instance in instances.table()),
        "asm": sum(each.target == target for each in assembly.load().objects),
    }


def _seconds(versions: Versions, row: Row) -> float:
    """The estimated core seconds of a job that compiles kernels. Further targets of a job take the first one's code."""
    target = str(row["target"]).partition(";")[0]
    kernels, family = _kernels(versions, target), sources.module("kernels.targets").get(target).family
    names = ("ck", "triton") if row["backend"] == "ck" else ("triton",)
    shards = int(str(row["shard"]).partition("/")[2])
    return sum(kernels[name] * versions.backends[name].seconds(family) for name in names) / shards


def _span(versions: Iterable[str]) -> str:
    ordered = sorted(versions, key=version_key)
    return f"{ordered[0]} to {ordered[-1]}"
