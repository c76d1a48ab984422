"""Prints what the instruction check finds in the Triton kernels of a GPU target, as a table."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator

from rocm_wheels.compile import sources
from rocm_wheels.compile.check.stage import Report
from rocm_wheels.compile.triton import compiler
from rocm_wheels.compile.triton.units import Triton
from rocm_wheels.errors import DataError


def table(target: str, only: str | None) -> Iterator[str]:
    """Yields a line for each kernel when it is compiled, then the sums: VOPD pairs before and after, added lines,
    barriers that are not judged, instructions by rule.

    The cache is not used. Raises CompileFailed, and DataError if no kernel has such a name.
    """
    units = list(Triton().units(target, only=only))
    if not units:
        raise DataError(f"{target} has no Triton kernel {only}", remedy="look at `python -m rocm_wheels inspect STORE`")
    width = max(len(unit.name) for unit in units)
    yield f"{'':{width}}  VOPD before  after  added  not judged  hazards"
    reports: list[Report] = []
    left: list[int] = []
    vopd, has_erratum = sources.module("kernels.vopd"), sources.module("kernels.targets").get(target).vopd_hazard
    with tempfile.TemporaryDirectory() as scratch:
        compiler.prepare(scratch)
        for unit in units:
            fields, config = unit.content
            _, _, assembly = compiler.translate(target, fields, config, reports)
            left.append(len(vopd.conflicts(assembly)) if has_erratum else 0)
            yield _row(unit.name, width, reports[-1], left[-1])
    counts = sum((Counter(report.found) for report in reports), Counter[str]())
    pairs, added, unjudged = (sum(getattr(x, name) for x in reports) for name in ("pairs", "added", "unjudged"))
    sums = Report(pairs=pairs, found=dict(counts), added=added, unjudged=unjudged)
    yield _row(f"{len(units)} kernels", width, sums, sum(left))


def _row(name: str, width: int, report: Report, left: int) -> str:
    """left: number of VOPD pairs that break the rule in the final assembly."""
    hazards = "; ".join(f"{number} x {rule}" for rule, number in report.found.items())
    return f"{name:{width}}  {report.pairs:11}  {left:5}  {report.added:5}  {report.unjudged:10}  {hazards or '-'}"
