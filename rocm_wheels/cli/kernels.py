"""The verbs that compile and show kernels; no logic of their own."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rocm_wheels.cli.options import add_cache, add_without, cache_of, directory
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import known_backend
from rocm_wheels.matrix.machine import survey
from rocm_wheels.matrix.plan import parallel_jobs, toolchain_of
from rocm_wheels.matrix.targets import check_served, known_targets
from rocm_wheels.packages import packages_of
from rocm_wheels.tables import version_key


def _targets(text: str) -> list[str]:
    return text.split(";")


def add_verbs(verbs: Any) -> None:
    """Adds the verbs of this module to the command line."""
    compile_ = verbs.add_parser("compile", help="compile the kernels of GPU targets into the cache")
    compile_.add_argument(
        "--target",
        action="extend",
        type=_targets,
        required=True,
        metavar="GFX",
        help="gfx942, sm_90, ..., or several: 'gfx1100;gfx11-generic'; may be repeated",
    )
    compile_.add_argument(
        "--backend", default="triton", metavar="NAME", help="backend of the kernels: ck or triton (triton)"
    )
    compile_.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="only the I-th of N parts, counted from 1"
    )
    compile_.add_argument("--only", metavar="GLOB", help="only the kernels whose name matches: 'fwd-bf16-d128-*'")
    add_without(compile_)
    compile_.add_argument(
        "--tiles", action="store_true",
        help="compile every tile of Triton's kernels that benchmarks/tune.py compares on a GPU",
    )  # fmt: skip
    compile_.add_argument(
        "--jobs",
        type=_jobs,
        metavar="N",
        help="compile jobs at once (default: MAX_JOBS, or by cores and memory)",
    )
    add_cache(compile_)
    compile_.add_argument(
        "--prune",
        action="store_true",
        help="delete all other kernels from the cache; only for a cache that no other job uses",
    )
    compile_.set_defaults(run=_compile)

    store = verbs.add_parser("store", help="write the kernel stores of GPU targets, for programs without Python")
    store.add_argument("target", nargs="+", metavar="GFX", help="gfx942, sm_90, ...")
    store.add_argument(
        "--backend", default="triton", metavar="NAME", help="backend of the kernels: ck or triton (triton)"
    )
    store.add_argument("--only", metavar="GLOB", help="only the kernels whose name matches: '*-bf16-d128*'")
    store.add_argument("--dist", type=directory, default=Path("dist"), metavar="DIR", help="for the stores (dist)")
    add_without(store)
    add_cache(store)
    store.set_defaults(run=_store, shard=(1, 1), tiles=False, jobs=None, prune=False)

    firstlight = verbs.add_parser(
        "firstlight", help="write one Python file that runs flash_attn.firstlight where nothing can be installed"
    )
    firstlight.add_argument(
        "--target", required=True, metavar="GFX", help="the GPU that it is for: gfx942, gfx1201, ..."
    )
    firstlight.add_argument("--output", type=Path, metavar="FILE", help="(firstlight_TARGET.py)")
    add_cache(firstlight)
    firstlight.set_defaults(
        run=_firstlight, backend="triton", without=[], shard=(1, 1), tiles=False, jobs=None, prune=False
    )

    hazards = verbs.add_parser(
        "hazards", help="compile Triton's kernels for a GPU target and print the hazards found in them"
    )
    hazards.add_argument("target", metavar="GFX", help="gfx1100, gfx942, ...")
    hazards.add_argument("--only", metavar="GLOB", help="only the kernels whose name matches: 'fwd-bf16-*'")
    hazards.set_defaults(run=_hazards)

    tiles = verbs.add_parser("tiles", help="print which tile each score modifier takes on a GPU target")
    tiles.add_argument("target", metavar="GFX", help="gfx1100, gfx942, ...")
    tiles.add_argument("operation", metavar="OPERATION", help="fwd, bwd-dq, decode, ...")
    tiles.add_argument("size", metavar="SIZE", help="the largest head dim of the kernel: d128")
    tiles.set_defaults(run=_tiles)

    inspect = verbs.add_parser("inspect", help="show what is in a wheel or a kernel store")
    inspect.add_argument("file", type=Path, nargs="+", help="a wheel, or the zip file of one target")
    inspect.add_argument(
        "--sizes", action="store_true", help="print the compressed size of each operation and target in KiB instead"
    )
    inspect.set_defaults(run=_inspect)


@packages_of("build")
def _compile(arguments: argparse.Namespace) -> int:
    for target, store in _stores(arguments, arguments.target).items():
        print(f"{target}  {store}")
    return 0


@packages_of("build")
def _store(arguments: argparse.Namespace) -> int:
    from rocm_wheels.compile import cache as files
    from rocm_wheels.compile.ck import planner
    from rocm_wheels.wheel import build

    dist, cache = arguments.dist.absolute(), cache_of(arguments)
    build.check_writable(dist=dist, cache=cache)
    for target, store in _stores(arguments, arguments.target).items():
        files.write(dist / f"{target}.zip", store.read_bytes())
        print(dist / f"{target}.zip")
    if arguments.backend == "ck":
        print(planner.build(dist, cache=cache))
    return 0


@packages_of("build")
def _firstlight(arguments: argparse.Namespace) -> int:
    from rocm_wheels.wheel import one_file

    arguments.only = one_file.KERNELS
    output = arguments.output or Path(f"firstlight_{arguments.target}.py")
    (target, store), *others = _stores(arguments, [arguments.target]).items()
    assert not others
    version = max(versions.load().flash_attn, key=version_key)
    print(f"{output}: {one_file.write(target, version, store, output) >> 10} KiB")
    return 0


def _hazards(arguments: argparse.Namespace) -> int:
    from rocm_wheels.compile.triton import hazards

    data = versions.load()
    (target,) = known_targets(data, [arguments.target])
    check_served(data, [target], "triton")
    for line in hazards.table(target, arguments.only):
        print(line, flush=True)
    return 0


@packages_of("build")
def _tiles(arguments: argparse.Namespace) -> int:
    from rocm_wheels.compile.triton import tile_table

    print("\n".join(tile_table.table(arguments.target, arguments.operation, arguments.size)))
    return 0


@packages_of("build")
def _inspect(arguments: argparse.Namespace) -> int:
    from rocm_wheels.compile import inspect_store

    for index, file in enumerate(arguments.file):
        if len(arguments.file) > 1:
            print("\n" * (index > 0) + f"{file}:")
        print(inspect_store.sizes(file) if arguments.sizes else inspect_store.report(file))
    return 0


def _stores(arguments: argparse.Namespace, names: list[str]) -> dict[str, Path]:
    """Compiles the kernels that are not in the cache. Returns a mapping of GPU target to kernel store."""
    data = versions.load()
    machine = survey(os.environ)
    backend = known_backend(data, arguments.backend)
    targets = known_targets(data, names)
    check_served(data, targets, backend.name)
    jobs = arguments.jobs or parallel_jobs(data, os.environ, machine, backend.name)
    from rocm_wheels.compile import kernels
    from rocm_wheels.wheel import build

    build.check_writable(cache=cache_of(arguments))

    return kernels.compile_store(
        targets,
        cache=cache_of(arguments),
        jobs=jobs,
        shard=arguments.shard,
        only=arguments.only,
        backend=backend.name,
        toolchain=toolchain_of(machine, backend.name),
        tiles=arguments.tiles,
        without=arguments.without,
        prune=arguments.prune,
    )


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with 1 <= i <= n, such as 2/4")
    return int(index), int(count)


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
