"""The verbs that build, test and inspect wheels; no logic of their own."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rocm_wheels import artifacts
from rocm_wheels.environment import cache_directory
from rocm_wheels.errors import DataError
from rocm_wheels.matrix import plan as plans
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import Universal, known_backend
from rocm_wheels.matrix.machine import survey
from rocm_wheels.matrix.plan import (
    Plan,
    make_plan,
    make_universal_plan,
    other_platforms,
    parallel_jobs,
    toolchain_of,
    wants_triton_too,
)
from rocm_wheels.matrix.platforms import DEFAULT, PLATFORMS
from rocm_wheels.matrix.targets import check_served, known_targets
from rocm_wheels.packages import packages_of
from rocm_wheels.wheel import container

FLASH_ATTN = ("flash-attn", "flash_attn", "version of flash-attn: 2.8.3; alone it means the universal wheel")
CELL = (
    ("python", "python", "version of Python: 3.11"),
    ("torch", "torch", "version of torch: 2.5.1, or 2.5 for the newest of them"),
    ("rocm", "rocm", "version of ROCm: 6.2"),
)


def add_verbs(verbs: Any) -> None:
    """Adds the verbs of this module to the command line."""
    plan = verbs.add_parser("plan", help="print what a build would do, as JSON; a list if it makes several wheels")
    check = verbs.add_parser(
        "check", help="check that the wheels can be built and written; print their plans, for --planned"
    )
    build = verbs.add_parser("build", help="build the universal wheel, or the wheel of one combination")
    for verb in (plan, check, build):
        verb.add_argument(FLASH_ATTN[1], metavar=FLASH_ATTN[0], help=FLASH_ATTN[2])
        for name, dest, text in CELL:
            verb.add_argument(dest, metavar=name, nargs="?", help=text)
        verb.add_argument(
            "--backend", metavar="NAME", help="ck or triton (default: ck if it has kernels for the targets)"
        )
        verb.add_argument(
            "--platform", choices=tuple(PLATFORMS),
            help="the universal wheel for the users of one system alone (default: for each of them)",
        )  # fmt: skip
        verb.set_defaults(parser=verb)
        verb.add_argument("--dist", type=_directory, default=Path("dist"), metavar="DIR", help="for the wheel (dist)")
        verb.add_argument(
            "--plan", action="store_true", help="print the plan as JSON and stop; a list for several wheels"
        )
        image = verb.add_mutually_exclusive_group()
        image.add_argument("--docker", action="store_true", help="run the same steps in a container with that ROCm")
        image.add_argument(
            "--cibuildwheel", action="store_true", help="assemble and test the universal wheel in a manylinux image too"
        )
        _add_without(verb)
        verb.add_argument(
            "--published",
            type=Path,
            metavar="FILE",
            help="output of the verb `published`: wheels that differ from the published ones get a build number",
        )
        verb.add_argument(
            "--cached-kernels", action="store_true", help="fail instead of compiling a kernel that is not in the cache"
        )
        _add_cache(verb)
    build.add_argument(
        "--planned", metavar="JSON", help="output of the verb `check`: build these plans without planning again"
    )
    plan.set_defaults(run=_plan)
    check.set_defaults(run=_check)
    build.set_defaults(run=_build)

    compile_ = verbs.add_parser("compile", help="compile the kernels of GPU targets into the cache")
    compile_.add_argument(
        "--target", action="append", required=True, metavar="GFX", help="gfx942, sm_90, ...; may be repeated"
    )
    compile_.add_argument(
        "--backend", default="triton", metavar="NAME", help="backend of the kernels: ck or triton (triton)"
    )
    compile_.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="only the I-th of N parts, counted from 1"
    )
    compile_.add_argument("--only", metavar="GLOB", help="only the kernels whose name matches: 'fwd-bf16-d128-*'")
    _add_without(compile_)
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
    _add_cache(compile_)
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
    store.add_argument("--dist", type=_directory, default=Path("dist"), metavar="DIR", help="for the stores (dist)")
    _add_without(store)
    _add_cache(store)
    store.set_defaults(run=_store, shard=(1, 1), tiles=False, jobs=None, prune=False)

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

    repair = verbs.add_parser("repair", help="turn a wheel into a manylinux wheel")
    repair.add_argument("wheel", type=Path, help="a wheel that was built with these sources")
    repair.add_argument("--output", type=Path, default=Path("dist"), metavar="DIR", help="for the wheel (dist)")
    repair.set_defaults(run=_repair)

    verify = verbs.add_parser("verify", help="install finished wheels, run their tests, replace their test reports")
    verify.add_argument("wheel", type=Path, nargs="+", help="a repaired wheel; its test report is written next to it")
    verify.add_argument(
        "--every-torch",
        action="store_true",
        help="test the universal wheel with every supported torch and every Python on this machine",
    )
    verify.add_argument("--require-gpu", action="store_true", help="fail unless the tests ran on a GPU and passed")
    _add_cache(verify)
    verify.set_defaults(run=_verify)

    unlabelled = verbs.add_parser(
        "unlabelled", help="write a universal wheel under its version without +rocm, for programs that compare versions"
    )
    unlabelled.add_argument("wheel", type=Path, help="a universal wheel")
    unlabelled.add_argument("--output", type=_directory, required=True, metavar="DIR", help="for the wheel")
    unlabelled.set_defaults(run=_unlabelled)

    hub = verbs.add_parser("hub", help="convert a wheel to a repository for Hugging Face's package `kernels`")
    hub.add_argument("wheel", type=Path, help="a repaired wheel, preferably the universal wheel")
    hub.add_argument("--output", type=_directory, required=True, metavar="DIR", help="a new directory")
    hub.set_defaults(run=_hub)

    benchmark = verbs.add_parser(
        "benchmark", help="benchmark a finished wheel on this machine's GPU, in a clean environment"
    )
    benchmark.add_argument("wheel", type=Path, help="a repaired wheel")
    benchmark.add_argument(
        "--out", type=Path, default=Path("build/results"), metavar="DIR", help="for the JSON results"
    )
    _add_cache(benchmark)
    benchmark.set_defaults(run=_benchmark)

    merge = verbs.add_parser("merge", help="move the files of several artifacts into one directory")
    merge.add_argument("source", type=Path, help="directory that contains one directory per artifact")
    merge.add_argument(
        "target", type=Path, help="directory for the files; two different files with one name are an error"
    )
    merge.add_argument("--count", type=int, metavar="N", help="fail unless there are N artifacts")
    merge.set_defaults(run=_merge)

    lock = verbs.add_parser("lock", help="regenerate the lock files from pyproject.toml with uv")
    lock.set_defaults(run=_lock)

    refresh = verbs.add_parser("refresh", help="update pinned packages and image digests")
    refresh.add_argument("--dry-run", action="store_true", help="print the changes and write nothing")
    refresh.set_defaults(run=_refresh)

    inspect = verbs.add_parser("inspect", help="show what is in a wheel or a kernel store")
    inspect.add_argument("file", type=Path, nargs="+", help="a wheel, or the zip file of one target")
    inspect.add_argument(
        "--sizes", action="store_true", help="print the compressed size of each operation and target in KiB instead"
    )
    inspect.set_defaults(run=_inspect)


def _plan(arguments: argparse.Namespace) -> int:
    from rocm_wheels.wheel import forecast

    made = _plans(arguments)
    try:
        cache = _cache(arguments)
    except DataError:  # a user without a home directory has no cache yet
        cache = None
    work = [forecast.of(plan, versions.load(), cache=cache, without=arguments.without) for plan in made]
    entries = [{**plan.as_dict(), "work": each.as_dict()} for plan, each in zip(made, work, strict=True)]
    print(json.dumps(entries if len(entries) > 1 else entries[0], indent=2))
    for plan, each in zip(made, work, strict=True):
        for note in plan.notes:  # Also print to stderr, because the user does not see stdout if it is piped.
            print(f"note: {note}", file=sys.stderr)
        if sys.stderr.isatty():
            print(f"note: {f'{plan.wheel}: ' if len(made) > 1 else ''}{each.line}", file=sys.stderr)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from rocm_wheels.wheel import build, manylinux

    made = _plans(arguments)
    for plan in made[:1] if arguments.cibuildwheel else ():
        manylinux.check_plan(plan)
    build.check_writable(dist=arguments.dist.absolute(), cache=_cache(arguments))
    print(plans.dump(made))
    return 0


@packages_of("build")
def _build(arguments: argparse.Namespace) -> int:
    if arguments.plan:
        return _plan(arguments)
    made = _plans(arguments) if arguments.planned is None else plans.load(arguments.planned)
    dist, cache = arguments.dist.absolute(), _cache(arguments)
    from rocm_wheels.wheel import build, numbering

    build.check_writable(dist=dist, cache=cache)
    public = numbering.load(arguments.published) if arguments.published else []
    say = partial(print, flush=True)
    for plan in made:
        for note in plan.notes:
            say(f"note: {note}")
        if arguments.docker:
            code = container.run(
                plan, dist=dist, cache=cache, cached_kernels=arguments.cached_kernels, without=arguments.without
            )
            if code != 0:
                return code
            continue
        say(f"{plan.wheel} for {', '.join(plan.targets)} ({plan.targets_from}), {plan.jobs} jobs")
        build.run(
            plan,
            dist=dist,
            cache=cache,
            cached_kernels=arguments.cached_kernels,
            without=arguments.without,
            cibuildwheel=arguments.cibuildwheel and plan.platform == DEFAULT,
            public=public,
            say=say,
        )
    return 0


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

    dist, cache = arguments.dist.absolute(), _cache(arguments)
    build.check_writable(dist=dist, cache=cache)
    for target, store in _stores(arguments, arguments.target).items():
        files.write(dist / f"{target}.zip", store.read_bytes())
        print(dist / f"{target}.zip")
    if arguments.backend == "ck":
        print(planner.build(dist, cache=cache))
    return 0


@packages_of("build")
def _tiles(arguments: argparse.Namespace) -> int:
    from rocm_wheels.compile.triton import tile_table

    print("\n".join(tile_table.table(arguments.target, arguments.operation, arguments.size)))
    return 0


def _hazards(arguments: argparse.Namespace) -> int:
    from rocm_wheels.compile.triton import hazards

    data = versions.load()
    (target,) = known_targets(data, [arguments.target])
    check_served(data, [target], "triton")
    for line in hazards.table(target, arguments.only):
        print(line, flush=True)
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

    build.check_writable(cache=_cache(arguments))

    return kernels.compile_store(
        targets,
        cache=_cache(arguments),
        jobs=jobs,
        shard=arguments.shard,
        only=arguments.only,
        backend=backend.name,
        toolchain=toolchain_of(machine, backend.name),
        tiles=arguments.tiles,
        without=arguments.without,
        prune=arguments.prune,
    )


@packages_of("build")
def _repair(arguments: argparse.Namespace) -> int:
    from rocm_wheels.wheel import repair

    print(repair.repair(arguments.wheel, arguments.output.absolute()))
    return 0


@packages_of("build")
def _verify(arguments: argparse.Namespace) -> int:
    from rocm_wheels.wheel import build

    for wheel in arguments.wheel:
        verdict = build.verify_again(
            wheel, cache=_cache(arguments), require_gpu=arguments.require_gpu, every=arguments.every_torch
        )
        print(verdict.summary(), flush=True)
    return 0


def _unlabelled(arguments: argparse.Namespace) -> int:
    from rocm_wheels.matrix import names
    from rocm_wheels.wheel import rewrite

    if names.unlabelled(arguments.wheel.name) is None or not arguments.wheel.is_file():
        raise DataError(
            f"{arguments.wheel} is not a universal wheel",
            remedy="Give one: dist/flash_attn-2.8.3+rocm-cp310-abi3-*.whl",
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(rewrite.without_label(arguments.wheel, arguments.output))
    return 0


@packages_of("build")
def _hub(arguments: argparse.Namespace) -> int:
    from rocm_wheels.wheel import hub

    for variant in hub.write(arguments.wheel, arguments.output):
        print(variant)
    return 0


@packages_of("build")
def _benchmark(arguments: argparse.Namespace) -> int:
    from rocm_wheels.wheel import benchmark

    for result in benchmark.run(arguments.wheel, cache=_cache(arguments), output=arguments.out):
        print(result)
    return 0


@packages_of("build")
def _refresh(arguments: argparse.Namespace) -> int:
    from rocm_wheels.matrix import refresh

    for change in refresh.run(dry_run=arguments.dry_run):
        print(change)
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    sources = artifacts.unpacked(arguments.source)
    if arguments.count is not None and len(sources) != arguments.count:
        raise DataError(
            f"{arguments.source} holds {len(sources)} artifacts, {arguments.count} were built",
            remedy="Artifacts live 30 days: run all jobs again, not the failed ones alone.",
        )
    print(f"{arguments.target}: {artifacts.merge(sources, arguments.target)} files of {len(sources)} artifacts")
    return 0


def _lock(_: argparse.Namespace) -> int:
    from rocm_wheels.matrix import locks

    for change in locks.write(today=datetime.datetime.now(datetime.timezone.utc).date()):
        print(change)
    return 0


@packages_of("build")
def _inspect(arguments: argparse.Namespace) -> int:
    from rocm_wheels.compile import inspect_store

    for index, file in enumerate(arguments.file):
        if len(arguments.file) > 1:
            print("\n" * (index > 0) + f"{file}:")
        print(inspect_store.sizes(file) if arguments.sizes else inspect_store.report(file))
    return 0


def _planned(arguments: argparse.Namespace, backend: str | None = None) -> Plan:
    cell = {name: getattr(arguments, name) for _, name, _ in CELL}
    missing = [name for name, _, _ in CELL if getattr(arguments, name.replace("-", "_")) is None]
    if len(missing) == len(CELL):
        if arguments.backend is not None:
            raise DataError(
                f"--backend {arguments.backend} is for one combination; the universal wheel has every backend",
                remedy="Leave it out, or name Python, torch and ROCm too: 2.8.3 3.11 2.5.1 6.2",
            )
        if (arguments.platform or DEFAULT) != DEFAULT and (arguments.docker or arguments.cibuildwheel):
            raise DataError(
                "--docker and --cibuildwheel run Linux containers, but the wheel is for another system",
                remedy=f"Leave them out: ./build_rocm.sh {arguments.flash_attn} --platform {arguments.platform}",
            )
        return make_universal_plan(
            versions.load(), flash_attn=arguments.flash_attn, env=os.environ, platform=arguments.platform or DEFAULT
        )
    if arguments.platform is not None:
        raise DataError(
            f"--platform {arguments.platform} is for the universal wheel; the wheel of one combination is for Linux",
            remedy=f"Name the version of flash-attn alone: {arguments.flash_attn} --platform {arguments.platform}",
        )
    if missing:
        arguments.parser.error(
            f"{', '.join(missing)} missing: a combination has four versions, such as 2.8.3 3.11 2.5.1 6.2, "
            "the universal wheel one, such as 2.8.3"
        )
    return make_plan(
        versions.load(),
        flash_attn=arguments.flash_attn,
        **cell,
        backend=backend or arguments.backend,
        env=os.environ,
    )


def _plans(arguments: argparse.Namespace) -> list[Plan]:
    """The plan of the wheel. If BUILD_TRITON_BACKEND is true, the plan of the triton wheel follows. The plans of the
    universal wheels for other systems follow the plan for Linux if they have one of its GPU targets.
    """
    plan = _planned(arguments)
    if wants_triton_too(plan, os.environ):
        return [plan, _planned(arguments, "triton")]
    if arguments.platform or not isinstance(plan.cell, Universal) or arguments.docker:
        return [plan]
    return [plan, *other_platforms(versions.load(), plan)]


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with 1 <= i <= n, such as 2/4")
    return int(index), int(count)


def _directory(text: str) -> Path:
    """A directory from a variable. An empty value counts as unset; otherwise it would mean the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the directory is empty")
    return Path(text)


def _cache(arguments: argparse.Namespace) -> Path:
    return (arguments.cache or cache_directory(os.environ)).absolute()


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _add_without(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without",
        action="append",
        choices=("asm",),
        default=[],
        help="leave out a kernel provider of the ck backend: asm (AMD's assembly kernels)",
    )


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache",
        type=_directory,
        metavar="DIR",
        help="compiled kernels, kept between builds (default: $ROCM_WHEELS_CACHE, else ~/.cache/rocm_wheels)",
    )
