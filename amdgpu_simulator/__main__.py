"""Commands of the simulator.

    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128             # a kernel by its own tile
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128 --near      # and by the tiles near it
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128 128,64,4,2  # by other tiles
    python -m amdgpu_simulator cycles gfx942 asm-fwd-bf16-d128-plain   # AMD's assembly; --code FILE: another one
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128-batch       # Composable Kernel
    python -m amdgpu_simulator cycles gfx942 dqdkdv-bf16-d128-batch    # its backward
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128 --store gfx942.zip
    python -m amdgpu_simulator table gfx942                            # every source beside the others, an hour
    python -m amdgpu_simulator calibrate                               # the clock against published figures
    python -m amdgpu_simulator coverage gfx942.zip --executed FILE     # forms of instructions; which ran in tests
    python -m amdgpu_simulator hazards                                 # wait states in AMD's assembly kernels
    python -m amdgpu_simulator wheel dist/flash_attn-*.whl             # a wheel's kernels, through AMD's HIP

In the environment that `./run_tests.sh` makes. A tile is block_m,block_n,warps,stages and, where need be, depth and the
compiler's options: 64,32,4,1,0,matrix_instr_nonkdim=16,schedule_hint=attention+memory-bound-attention.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from amdgpu_simulator.clock.latencies import latencies
from amdgpu_simulator.debian import UnavailableError
from rocm_wheels.errors import RocmWheelsError
from rocm_wheels.paths import FLASH_ATTN_SRC

if TYPE_CHECKING:
    from amdgpu_simulator.workloads import Workload


def main(arguments: list[str] | None = None) -> None:
    """Prints a table. SystemExit with a message for what is unknown."""
    parser = argparse.ArgumentParser(
        prog="python -m amdgpu_simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    cycles = commands.add_parser("cycles", help="the cycles of a kernel on a compute unit")
    cycles.add_argument("target", help="gfx942")
    cycles.add_argument("kernel", help="its name, of any of the forms above")
    cycles.add_argument("tiles", nargs="*", help="block_m,block_n,warps,stages; default: the kernel's own")
    cycles.add_argument("--near", action="store_true", help="the tiles near its own too")
    cycles.add_argument("--causal", action="store_true", help="with a causal mask")
    cycles.add_argument(
        "--latency", type=int, help="cycles of a load of global memory, instead of what clock/latencies.py says"
    )
    cycles.add_argument("--store", help="a kernel store, such as gfx942.zip, to take the kernel from")
    cycles.add_argument("--code", help="a code object to run in the place of an asm- kernel")
    cycles.set_defaults(run=_cycles)
    table = commands.add_parser("table", help="cycles of every source of kernels on a target")
    table.add_argument("target", help="gfx942")
    table.add_argument("--dim", type=int, action="append", help="this head dim alone; may be repeated")
    table.add_argument("--dtype", action="append", choices=("bf16", "fp16"), help="this type alone; may be repeated")
    table.set_defaults(run=_table)
    calibrate = commands.add_parser("calibrate", help="the clock against published figures of hardware")
    calibrate.set_defaults(run=_calibrate)
    wheel = commands.add_parser(
        "wheel", help="attention by a wheel's kernels, through AMD's HIP, on a GPU of each family"
    )
    wheel.add_argument("wheel", type=Path)
    wheel.add_argument("--hip", action="append", metavar="RELEASE", help="6.4 or 7.2; may be repeated (default: both)")
    wheel.add_argument(
        "--gpu", action="append", metavar="GFX", help="gfx1103; may be repeated (default: some of each family)"
    )
    wheel.set_defaults(run=_wheel)
    forms = commands.add_parser("coverage", help="the forms of kernels' instructions, and which of them tests executed")
    forms.add_argument("files", type=Path, nargs="+", help="kernel stores (gfx942.zip) and assembly texts (.s)")
    forms.add_argument(
        "--executed", type=Path, metavar="FILE", help="what tests wrote with AMDGPU_SIMULATOR_FORMS=FILE"
    )
    forms.set_defaults(run=_coverage)
    hazards = commands.add_parser(
        "hazards", help="check the wait states of AMD's assembly kernels against the data file"
    )
    hazards.set_defaults(run=_hazards)
    given = parser.parse_args(arguments)
    if str(FLASH_ATTN_SRC) not in sys.path:
        sys.path.insert(0, str(FLASH_ATTN_SRC))
    from flash_attn.runtime.store import KernelError

    try:
        given.run(given)
    except (ValueError, OSError, RocmWheelsError, UnavailableError, KernelError) as error:
        raise SystemExit(f"error: {error}") from None


def _cycles(given: argparse.Namespace) -> None:
    from amdgpu_simulator import measure

    made = _stored(given) if given.store else _assembly(given) if given.kernel.startswith("asm-") else _compiled(given)
    result = latencies(given.target)
    if given.latency is not None:
        result = replace(result, memory=given.latency)
    for line in measure.table(made, result):
        print(line, flush=True)


def _wheel(given: argparse.Namespace) -> None:
    from amdgpu_simulator import wheel
    from amdgpu_simulator.hip import process

    releases = given.hip or list(process.RELEASES)
    if unknown := [one for one in releases if one not in process.RELEASES]:
        raise ValueError(f"HIP {unknown[0]} is not to be had: {', '.join(process.RELEASES)}")
    if not wheel.run(given.wheel, releases, given.gpu or wheel.GPUS):
        raise SystemExit(1)


Made = dict[str, "Callable[[], Workload]"]


def _assembly(given: argparse.Namespace) -> Made:
    from amdgpu_simulator.workloads import assembly

    image = Path(given.code).read_bytes() if given.code else None
    return {given.code or given.kernel: partial(assembly.workload, given.target, given.kernel, image=image)}


def _compiled(given: argparse.Namespace) -> Made:
    from amdgpu_simulator.workloads import composable, triton

    if given.code:
        raise ValueError(f"--code takes the place of an asm- kernel, whose arguments are known; {given.kernel} is none")
    if "-batch" in given.kernel:
        return {given.kernel: partial(composable.workload, given.target, given.kernel)}
    variant = triton.parse_kernel(given.kernel)
    own = triton.tiles(given.target, variant, near=given.near)
    tiles = [*map(triton.parse_tile, given.tiles), *(own[1:] if given.tiles else own)]
    return {
        triton.write_tile(tile): partial(triton.workload, given.target, variant, tile, causal=given.causal)
        for tile in tiles
    }


def _stored(given: argparse.Namespace) -> Made:
    from flash_attn.runtime.store import Store

    from amdgpu_simulator.workloads import assembly, composable, triton

    store = Store(Path(given.store))
    if store.target != given.target:
        raise ValueError(f"{given.store} is a store of {store.target}, not of {given.target}")
    if given.kernel.startswith("asm-"):
        return {given.kernel: partial(assembly.workload, given.target, given.kernel, image=store.image(given.kernel))}
    if "-batch" in given.kernel:
        return {given.kernel: partial(composable.stored, store, given.kernel)}
    return {given.kernel: partial(triton.stored, store, triton.parse_kernel(given.kernel), causal=given.causal)}


def _table(given: argparse.Namespace) -> None:
    from amdgpu_simulator import overview

    for line in overview.table(given.target, given.dim or overview.DIMS, given.dtype or overview.DTYPES):
        print(line, flush=True)


def _coverage(given: argparse.Namespace) -> None:
    from amdgpu_simulator import coverage

    for line in coverage.table(given.files, given.executed):
        print(line, flush=True)


def _hazards(_given: argparse.Namespace) -> None:
    from amdgpu_simulator import assembly_hazards

    for line in assembly_hazards.table():
        print(line, flush=True)


def _calibrate(_given: argparse.Namespace) -> None:
    from amdgpu_simulator import calibration

    for line in calibration.report():
        print(line, flush=True)


if __name__ == "__main__":
    main()
