"""Commands of the simulator.

    python -m amdgpu_simulator coverage kernel.s                       # instruction forms; which are not implemented
    python -m amdgpu_simulator coverage gfx942.zip --executed FILE     # which forms ran in tests
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128             # a kernel with its own tile
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128 --near      # and with the tiles near its own
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128 128,64,4,2  # with other tiles
    python -m amdgpu_simulator cycles gfx942 asm-fwd-bf16-d128-plain   # AMD's assembly; --code FILE: another kernel
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128-batch       # Composable Kernel
    python -m amdgpu_simulator cycles gfx942 dqdkdv-bf16-d128-batch    # Composable Kernel, backward
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128 --store gfx942.zip
    python -m amdgpu_simulator table gfx942                            # all kernel providers side by side; an hour
    python -m amdgpu_simulator table gfx1201 --peer aotriton DIR       # beside AOTriton's kernels, from a checkout
    python -m amdgpu_simulator decoding gfx1100                        # splits and bandwidth of a whole GPU; 3 minutes
    python -m amdgpu_simulator decoding gfx942 --fp8                   # an FP8 cache beside one in bf16
    python -m amdgpu_simulator calibrate                               # simulated cycles against published figures
    python -m amdgpu_simulator traces DIR                              # the clock against thread traces of GPUs
    python -m amdgpu_simulator refit REPORT                            # the clock against a report of firstlight
    python -m amdgpu_simulator published DIR                           # and against published speeds of kernels
    python -m amdgpu_simulator hazards                                 # wait states in AMD's assembly kernels
    python -m amdgpu_simulator wheel dist/flash_attn-*manylinux*.whl   # a wheel's kernels, through AMD's HIP

All commands but `coverage` of assembly texts run kernels of flash_attn. They need the environment that `./run_tests.sh`
makes. A tile is block_m,block_n,warps,stages, optionally followed by depth and compiler options:
64,32,4,1,0,matrix_instr_nonkdim=16,schedule_hint=attention+memory-bound-attention.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from amdgpu_simulator import coverage, traces
from amdgpu_simulator.debian import UnavailableError


def main(arguments: list[str] | None = None) -> None:
    """Prints a table. Raises SystemExit with a message if an argument is invalid or a package is missing."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "coverage" and not any(path.suffix == ".zip" for path in options.files):
            for line in coverage.table(options.files, options.executed):
                print(line, flush=True)
        elif options.command == "traces":
            for line in traces.table(options.directory):
                print(line, flush=True)
        else:
            _run_in_checkout(options)
    except (ValueError, OSError, UnavailableError) as error:
        raise SystemExit(f"error: {error}") from None


def _run_in_checkout(options: argparse.Namespace) -> None:
    """Runs a command of `commands`. Raises ValueError without flash_attn or rocm_wheels."""
    source = Path(__file__).resolve().parent.parent / "flash_attn_src"
    if source.is_dir() and str(source) not in sys.path:
        sys.path.insert(0, str(source))
    try:
        commands = importlib.import_module("amdgpu_simulator.commands")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{options.command} runs kernels of flash_attn, and there is no module {error.name}: run the command in a "
            "checkout of the repository, in the environment that ./run_tests.sh makes"
        ) from None
    commands.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amdgpu_simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    forms = commands.add_parser("coverage", help="print the instruction forms of kernels; which of them tests ran")
    forms.add_argument("files", type=Path, nargs="+", help="assembly texts (.s) and kernel stores (gfx942.zip)")
    forms.add_argument(
        "--executed", type=Path, metavar="FILE", help="forms that tests wrote with AMDGPU_SIMULATOR_FORMS=FILE"
    )
    cycles = commands.add_parser("cycles", help="print the cycles of a kernel on a compute unit")
    cycles.add_argument("target", help="GPU target, such as gfx942")
    cycles.add_argument("kernel", help="name of the kernel, in one of the forms above")
    cycles.add_argument("tiles", nargs="*", help="block_m,block_n,warps,stages (default: the kernel's own tile)")
    cycles.add_argument("--near", action="store_true", help="add the tiles near the kernel's own tile")
    cycles.add_argument("--causal", action="store_true", help="apply a causal mask")
    cycles.add_argument(
        "--latency", type=int, help="cycles of a load from global memory (default: the value in clock/latencies.py)"
    )
    cycles.add_argument("--store", help="take the kernel from this kernel store, such as gfx942.zip")
    cycles.add_argument("--code", help="run this code object in place of an asm- kernel")
    table = commands.add_parser("table", help="print the cycles of every kernel provider on a target")
    table.add_argument("target", help="GPU target, such as gfx942")
    table.add_argument("--dim", type=int, action="append", help="only this head dim; may be repeated")
    table.add_argument("--dtype", action="append", choices=("bf16", "fp16"), help="only this dtype; may be repeated")
    table.add_argument(
        "--peer", nargs=2, metavar=("NAME", "DIR"), help="compare with the kernels of `aotriton` in this checkout"
    )
    peer = table.add_argument_group("with --peer")
    peer.add_argument("--op", action="append", choices=("fwd", "bwd"), help="only this operation; may be repeated")
    peer.add_argument("--mask", choices=("full", "causal"), help="only this mask (default: both)")
    peer.add_argument(
        "--keys", type=int, help="average over a whole call with this many keys (default: the loop alone; causal: 4096)"
    )
    peer.add_argument(
        "--python",
        action="append",
        metavar="PATH",
        help="a Python whose Triton compiles the peer (default: this Python); may be repeated, the fewest cycles count",
    )
    decoding = commands.add_parser("decoding", help="print the splits and the bandwidth of decoding on a whole GPU")
    decoding.add_argument("target", help="GPU target, such as gfx1100")
    decoding.add_argument("--fp8", action="store_true", help="compare an FP8 cache with one in bf16")
    commands.add_parser("calibrate", help="compare simulated cycles with published figures of hardware")
    trace = commands.add_parser("traces", help="compare the clock with thread traces of GPUs, fact by fact")
    trace.add_argument("directory", type=Path, help="directory of traces, such as DIR/gfx1100/*.pkl")
    speeds = commands.add_parser("published", help="compare the clock with published speeds of kernels")
    speeds.add_argument("directory", type=Path, help="directory of the assembly texts that published.toml names")
    speeds.add_argument("--kernel", action="append", help="beginning of a name, such as gcnasm; may be repeated")
    refit = commands.add_parser(
        "refit", help="compare the clock with a report of firstlight; latencies that would change"
    )
    refit.add_argument("report", type=Path, help="flash-attn-firstlight-TARGET.json")
    refit.add_argument("--merge", action="store_true", help="write them to clock/measured.json")
    commands.add_parser("hazards", help="check the wait states of AMD's assembly kernels against the data file")
    wheel = commands.add_parser("wheel", help="run attention from a wheel, through AMD's HIP, on a GPU of each family")
    wheel.add_argument("wheel", type=Path)
    wheel.add_argument(
        "--hip", action="append", metavar="RELEASE", help="HIP release, 6.4 or 7.2; may be repeated (default: both)"
    )
    wheel.add_argument(
        "--gpu",
        action="append",
        metavar="GFX",
        help="GPU, such as gfx1103; may be repeated (default: some a family)",
    )
    return parser


if __name__ == "__main__":
    main()
