"""Commands of the simulator.

    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128             # a kernel by its own tile
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128 --near      # and by the tiles near it
    python -m amdgpu_simulator cycles gfx942 fwd-bf16-d128 128,64,4,2  # by other tiles

In the environment that `./run_tests.sh` makes. A tile is block_m,block_n,warps,stages and, where need be, depth and the
compiler's options: 64,32,4,1,0,matrix_instr_nonkdim=16,schedule_hint=attention+memory-bound-attention.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial

from amdgpu_simulator.clock.latencies import latencies
from rocm_wheels.paths import FLASH_ATTN_SRC


def main(arguments: list[str] | None = None) -> None:
    """Prints a table. SystemExit with a message for what is unknown."""
    parser = argparse.ArgumentParser(
        prog="python -m amdgpu_simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    cycles = commands.add_parser("cycles", help="the cycles of a kernel on a compute unit")
    cycles.add_argument("target", help="gfx942")
    cycles.add_argument("kernel", help="fwd-bf16-d128, bwd-dq-fp16-d64-softcap")
    cycles.add_argument("tiles", nargs="*", help="block_m,block_n,warps,stages; default: the kernel's own")
    cycles.add_argument("--near", action="store_true", help="the tiles near its own too")
    cycles.add_argument("--causal", action="store_true", help="with a causal mask")
    cycles.add_argument(
        "--latency", type=int, help="cycles of a load of global memory, instead of what clock/latencies.py says"
    )
    cycles.set_defaults(run=_cycles)
    given = parser.parse_args(arguments)
    if str(FLASH_ATTN_SRC) not in sys.path:
        sys.path.insert(0, str(FLASH_ATTN_SRC))
    try:
        given.run(given)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def _cycles(given: argparse.Namespace) -> None:
    from amdgpu_simulator import measure, workloads

    variant = workloads.parse_kernel(given.kernel)
    own = workloads.tiles(given.target, variant, near=given.near)
    tiles = [*map(workloads.parse_tile, given.tiles), *(own[1:] if given.tiles else own)]

    made = {
        workloads.write_tile(tile): partial(workloads.triton, given.target, variant, tile, causal=given.causal)
        for tile in tiles
    }
    result = latencies(given.target)
    if given.latency is not None:
        result = replace(result, memory=given.latency)
    for line in measure.table(made, result):
        print(line, flush=True)


if __name__ == "__main__":
    main()
