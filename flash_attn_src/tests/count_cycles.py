"""What an attention kernel takes of an AMD GPU's compute unit, counted on the simulator: no GPU needed.

    python flash_attn_src/tests/count_cycles.py gfx942 fwd-bf16-d128             # by its own tile
    python flash_attn_src/tests/count_cycles.py gfx942 fwd-bf16-d128 --near      # and by those near it
    python flash_attn_src/tests/count_cycles.py gfx942 fwd-bf16-d128 128,64,4,2  # by others

In the environment that `./run_tests.sh` makes. A tile is block_m,block_n,warps,stages and, where need be, depth and the
compiler's options: 64,32,4,1,0,matrix_instr_nonkdim=16,schedule_hint=attention+memory-bound-attention.

Cycles are those of 128 more keys (for dk and dv: queries) for 128 rows, in the loop without masks: `cycles` of a
compute unit that is full of work groups which take turns, with loads that take so long
(`amdgpu_simulator/clock/timeline.py`); then those that each unit is busy, the matrix and vector units of a SIMD, shared
memory and the cache of global memory (`amdgpu_simulator/clock/cost.py`). They say which tiles to try on a GPU, and
what holds one up; not how long a call takes.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import conftest  # noqa: F401 - puts the sources on the path
import torch
from flash_attn import flash_attn_func
from flash_attn.kernels import targets, tuning
from flash_attn.kernels.operations import HEAD_DIMS, KINDS
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.variants import Variant

from amdgpu_simulator import gpu
from amdgpu_simulator.clock import cost, timeline
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.isa import assembly, machine
from rocm_wheels.errors import CompileFailed

ROWS, KEYS = 128, 128
_LENGTHS = 256, 768
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Taken(NamedTuple):
    """Cycles, in all and of each unit, and what the kernel asks of a compute unit."""

    cycles: float
    matrix: float
    vector: float
    shared: float
    memory: float
    registers: int
    spills: int
    shared_bytes: int
    groups: int


def parse_kernel(name: str) -> Variant:
    """The variant of a name. SystemExit for one that a call of `call` does not run."""
    for op in ("fwd", "bwd-dq", "bwd-dkdv"):
        for dtype in DTYPES:
            for head_dim in HEAD_DIMS:
                for kind in KINDS[:-1]:
                    if (variant := Variant(op, dtype, head_dim, kind)).name == name:
                        return variant
    raise SystemExit(f"error: {name}: want fwd, bwd-dq or bwd-dkdv, a type, head dim and kind: bwd-dq-fp16-d64-softcap")


def parse_tile(text: str) -> Config:
    """128,64,4,2,0,waves_per_eu=2 as a launch configuration. SystemExit for something else."""
    numbers = [part for part in text.split(",") if "=" not in part]
    options = [part.split("=") for part in text.split(",") if "=" in part]
    try:
        block_m, block_n, warps, stages, depth = map(int, [*numbers, 0] if len(numbers) == 4 else numbers)
        chosen = tuple((name, int(value) if value.isdecimal() else value.replace("+", ",")) for name, value in options)
        return Config(block_m, block_n, warps, stages, depth, chosen)
    except ValueError:
        raise SystemExit(f"error: {text}: want block_m,block_n,warps,stages[,depth][,option=value...]") from None


def write_tile(tile: Config) -> str:
    """A launch configuration as `parse_tile` reads it."""
    return ",".join([*map(str, tile[:5]), *(f"{name}={value}".replace(",", "+") for name, value in tile.options)])


def call(variant: Variant, length: int) -> None:
    """A call whose kernels run one program: ROWS rows against `length` others."""
    lengths = (length, ROWS, ROWS) if variant.op == "bwd-dkdv" else (ROWS, length, length)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, 1, variant.block_d, generator=generator).to(DTYPES[variant.dtype]).requires_grad_()
        for n in lengths
    )
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "alibi": {"alibi_slopes": torch.ones(1)},
        "dropout": {"dropout_p": 0.1},
        "softcap": {"softcap": 20.0},
    }
    out = flash_attn_func(q, k, v, **options[variant.kind])
    if variant.op != "fwd":
        out.sum().backward()


def measure(target: str, variant: Variant, tile: Config, latency: int = timeline.Latencies.memory) -> Taken:
    """What a kernel takes by a tile; latency: cycles of a load. Raises CompileFailed."""
    _, entry, _ = gpu.compiled(target, variant, tile)
    groups = resident(target, entry)

    def counts(length: int) -> list[float]:
        records: dict[str, Record] = {}

        def program(kernel: assembly.Kernel) -> machine.Program:
            return machine.Program(kernel, records.setdefault(kernel.symbol, Record(kernel)))

        with gpu.pretend(target, configs={variant.op: tile}, program=program) as launched:
            call(variant, length)
        assert variant.name in launched
        found = records[variant.operation.function]
        latencies = timeline.Latencies(memory=latency)
        played = timeline.play(found.groups[0], groups, target, latencies) * len(found.groups) / groups
        simds = cost.rates(target).simds
        return [played, *(found.cycles[unit] / (simds if unit in ("matrix", "vector") else 1) for unit in cost.UNITS)]

    start, end = (counts(length) for length in _LENGTHS)
    steps = (_LENGTHS[1] - _LENGTHS[0]) / KEYS
    played, matrix, vector, shared, memory = ((more - less) / steps for less, more in zip(start, end, strict=True))
    return Taken(
        played, matrix, vector, shared, memory,
        entry["resources"]["vgprs"], entry["resources"]["vgpr_spills"], entry["shared"], groups,
    )  # fmt: skip


def resident(target: str, entry: dict[str, Any]) -> int:
    """Work groups of a kernel that a compute unit holds, by their registers and shared memory."""
    row = targets.get(target)
    waves = entry["threads"] / row.wavefront / cost.rates(target).simds
    groups = int(row.registers // max(entry["resources"]["vgprs"], 1) // waves)
    return min(groups, row.shared_memory // max(entry["shared"], 1))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("kernel")
    parser.add_argument("tiles", nargs="*", help="default: the kernel's own")
    parser.add_argument(
        "--latency", type=int, default=timeline.Latencies.memory, help="cycles of a load (default %(default)s)"
    )
    parser.add_argument("--near", action="store_true", help="the tiles near its own too")
    given = parser.parse_args(arguments)
    variant = parse_kernel(given.kernel)
    try:
        own = tuning.config(given.target, variant)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    tiles = [parse_tile(text) for text in given.tiles] or [own]
    if given.near:
        tiles += tuning.neighbours(given.target, own)
    names = [write_tile(tile) for tile in tiles]
    width = max(map(len, names))
    columns = "".join(f"{unit:>8}" for unit in ("cycles", *cost.UNITS))
    print(f"{'tile':{width}}{columns}  registers  spills  LDS KiB  groups")
    for tile, shown in zip(tiles, names, strict=True):
        try:
            found = measure(given.target, variant, tile, given.latency)
        except CompileFailed as error:
            print(f"{shown:{width}} {str(error).splitlines()[0]}", flush=True)
            continue
        units = "".join(f"{number:8.0f}" for number in found[: 1 + len(cost.UNITS)])
        print(
            f"{shown:{width}}{units}  {found.registers:9}  {found.spills:6}"
            f"  {found.shared_bytes / 1024:7.0f}  {found.groups:6}",
            flush=True,
        )


if __name__ == "__main__":
    main()
