"""CPU time of the whole matrix: kernels compiled for each wheel, against compiled once and assembled.

    python benchmarks/build_cost.py                    # every target of the matrix, some minutes on two cores
    python benchmarks/build_cost.py --only 'fwd*'      # a part of the kernels, scaled up by their number
    python benchmarks/build_cost.py --backend ck       # of the wheels with Composable Kernel: about two hours

Compiles into an empty cache, then assembles and repairs one wheel of each target set, and counts CPU seconds of all
processes, which other work on the machine changes little. Verifying is left out: it costs the same either way.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import create_matrix  # noqa: E402
from rocm_wheels.matrix.cells import Cell  # noqa: E402
from rocm_wheels.packages import setup  # noqa: E402

try:
    from rocm_wheels.compile import kernels, units
    from rocm_wheels.compile.ck import planner as ck_planner
    from rocm_wheels.matrix import plan, rows, versions
    from rocm_wheels.matrix import select as matrix
    from rocm_wheels.wheel import assemble, launcher, repair
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error.name} is not installed\n{setup()}") from None


def cpu_seconds(work: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of this process and its finished children while `work` runs, and seconds on the clock."""

    def used() -> float:
        both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    before, started = used(), time.monotonic()
    work()
    return used() - before, time.monotonic() - started


def compile_target(target: str, cache: Path, backend: str, only: str | None, jobs: int) -> None:
    """Its progress goes to stderr: stdout is the table."""
    with contextlib.redirect_stdout(sys.stderr):
        kernels.compile_store([target], cache=cache, jobs=jobs, only=only, backend=backend)


def assemble(cell: Cell, targets: tuple[str, ...], cache: Path, only: str | None, work: Path) -> Path:
    """What a wheel job does with kernels that are compiled; the wheel, repaired."""
    made = plan.make_plan(
        versions.load(),
        flash_attn=cell.flash_attn,
        python=cell.python,
        torch=cell.torch,
        rocm=cell.rocm,
        backend=cell.backend,
        env={"PYTORCH_ROCM_ARCH": ";".join(targets)},
    )
    stores = kernels.compile_store(targets, cache=cache, jobs=1, only=only, backend=cell.backend)
    planner = ck_planner.build(work, cache=cache) if cell.backend == "ck" else None
    raw = assemble.assemble(made, stores, launcher.build(work, cache=cache), work, planner=planner)
    return repair.repair(raw, work / "repaired")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="GLOB", help="these kernels alone, scaled up by their number")
    parser.add_argument("--backend", choices=("ck", "triton"), default="triton", help="whose wheels (triton)")
    parser.add_argument("--jobs", type=int, default=2, help="compile jobs at once (2)")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"argument --jobs: {arguments.jobs} is not a whole number above 0")
    data = versions.load()
    cells = matrix.select(data, {"rocm": create_matrix.ROCM_MATRIX}, only=f"* {arguments.backend}").cells
    served = {cell: rows.row_targets(data, cell, None) for cell in cells}
    targets = list(dict.fromkeys(target for each in served.values() for target in each))
    every, some = (units.find(targets[:1], only=only, backend=arguments.backend) for only in (None, arguments.only))
    if not some:
        parser.error(f"argument --only: no kernel for {targets[0]} matches {arguments.only!r}")
    scale = sum(len(unit.kernels) for unit in every) / sum(len(unit.kernels) for unit in some)

    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cache"
        cost: dict[str, float] = {}
        print(f"{platform.processor() or platform.machine()}, {arguments.jobs} jobs", file=sys.stderr)
        for target in targets:
            options = (target, cache, arguments.backend, arguments.only, arguments.jobs)
            cpu, clock = cpu_seconds(lambda: compile_target(*options))  # noqa: B023
            cost[target] = cpu * scale
            print(f"{target}: {cpu:.0f} s of CPU, {clock:.0f} s", file=sys.stderr)
        work = Path(directory) / "work"
        work.mkdir()
        assembly, _ = cpu_seconds(lambda: assemble(cells[-1], served[cells[-1]], cache, arguments.only, work))
        size = next((work / "repaired").glob("*.whl")).stat().st_size

    each = sum(cost[target] for cell in cells for target in served[cell]) + assembly * len(cells)
    once = sum(cost.values()) + assembly * len(cells)
    print("| | CPU seconds |\n|-|-|")
    for target in targets:
        print(f"| kernels of {target} | {cost[target]:.0f} |")
    print(f"| assembling and repairing one wheel ({size / 2**20:.1f} MiB) | {assembly:.1f} |")
    print(f"| {len(cells)} wheels, kernels compiled for each | {each:.0f} ({each / 3600:.1f} h) |")
    print(f"| {len(cells)} wheels, kernels compiled once | {once:.0f} ({once / 3600:.2f} h) |")
    print(f"\n{each / once:.0f} times less.")


if __name__ == "__main__":
    main()
