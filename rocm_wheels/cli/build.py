"""The verbs that plan and build wheels; no logic of their own."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rocm_wheels.cli.options import add_cache, add_without, cache_of, directory
from rocm_wheels.errors import DataError
from rocm_wheels.matrix import plan as plans
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import Cell, known_backend
from rocm_wheels.matrix.plan import (
    Plan,
    make_plan,
    make_universal_plan,
    other_platforms,
    wants_triton_too,
)
from rocm_wheels.matrix.platforms import ALL, DEFAULT, PLATFORMS
from rocm_wheels.packages import packages_of
from rocm_wheels.wheel import container

MANY_TARGETS = 4  # from which on a build says what it costs
EXAMPLE = ("3.11", "2.5.1", "6.2")  # Python, torch and ROCm in messages
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
            "--platform", choices=(*PLATFORMS, ALL),
            help=f"system that the universal wheel is for; a release builds all (default: {DEFAULT}, as here)",
        )  # fmt: skip
        verb.set_defaults(parser=verb)
        verb.add_argument("--dist", type=directory, default=Path("dist"), metavar="DIR", help="for the wheel (dist)")
        verb.add_argument(
            "--plan", action="store_true", help="print the plan as JSON and stop; a list for several wheels"
        )
        image = verb.add_mutually_exclusive_group()
        image.add_argument("--docker", action="store_true", help="run the same steps in a container with that ROCm")
        image.add_argument(
            "--cibuildwheel", action="store_true", help="assemble and test the universal wheel in a manylinux image too"
        )
        verb.add_argument(
            "--packages", action="store_true",
            help="write the wheels of flash-attn-3, flash-attn-4, sageattention, vLLM's plug-in and others too",
        )  # fmt: skip
        add_without(verb)
        verb.add_argument(
            "--published",
            type=Path,
            metavar="FILE",
            help="output of the verb `published`: wheels that differ from the published ones get a build number",
        )
        verb.add_argument(
            "--cached-kernels", action="store_true", help="fail instead of compiling a kernel that is not in the cache"
        )
        add_cache(verb)
    assembled = verbs.add_parser(
        "assemble", help="make the wheels of several rows of create_matrix.py from compiled kernels, untested"
    )
    assembled.add_argument(
        "--rows", required=True, metavar="JSON", help='name and GPU targets of each: [["2.8.3 universal", "gfx942"]]'
    )
    assembled.add_argument("--dist", type=directory, default=Path("dist"), metavar="DIR", help="for the wheels (dist)")
    assembled.add_argument(
        "--published", type=Path, metavar="FILE", help="as of `build`: wheels that differ get a build number"
    )
    add_cache(assembled)
    assembled.set_defaults(run=_assemble)
    build.add_argument(
        "--planned", metavar="JSON", help="output of the verb `check`: build these plans without planning again"
    )
    plan.set_defaults(run=_plan)
    check.set_defaults(run=_check)
    build.set_defaults(run=_build)


def _plan(arguments: argparse.Namespace) -> int:
    from rocm_wheels.wheel import forecast

    made = _plans(arguments)
    try:
        cache = cache_of(arguments)
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
    build.check_writable(dist=arguments.dist.absolute(), cache=cache_of(arguments))
    for plan in made:
        if cost := _cost(plan):
            print(cost, file=sys.stderr)
    print(plans.dump(made))
    return 0


def _cost(plan: Plan) -> str:
    """What the universal wheel of many GPU targets costs, and how one GPU gets a wheel in minutes; "" for others."""
    gpus = [target for target in plan.targets if target.startswith("gfx")]
    if isinstance(plan.cell, Cell) or len(gpus) < MANY_TARGETS:
        return ""
    from rocm_wheels.publish import figures

    hours = figures.compile_seconds(versions.load(), gpus) / 3600 / plan.jobs
    build = f"./build_rocm.sh {plan.cell.flash_attn}"
    return (
        f"note: this compiles the kernels of {len(gpus)} GPU targets: about {hours:.1f} h with {plan.jobs} jobs where "
        f"none is cached. A wheel for one GPU takes minutes:\n"
        f"    PYTORCH_ROCM_ARCH=native {build}     # on its machine\n"
        f"    PYTORCH_ROCM_ARCH=RX9070XT {build}   # anywhere; README.md has the names"
    )


@packages_of("build")
def _build(arguments: argparse.Namespace) -> int:
    if arguments.plan:
        return _plan(arguments)
    made = _plans(arguments) if arguments.planned is None else plans.load(arguments.planned)
    dist, cache = arguments.dist.absolute(), cache_of(arguments)
    from rocm_wheels.wheel import build, closing, numbering

    build.check_writable(dist=dist, cache=cache)
    public = numbering.load(arguments.published) if arguments.published else []
    say = partial(print, flush=True)
    wheels: list[tuple[Plan, Path]] = []
    for plan in made:
        for note in plan.notes:
            say(f"note: {note}")
        if arguments.docker:
            code = container.run(
                plan,
                dist=dist,
                cache=cache,
                cached_kernels=arguments.cached_kernels,
                without=arguments.without,
                packages=arguments.packages,
            )
            if code != 0:
                return code
            wheels += [(plan, wheel) for wheel in (closing.built(plan, dist),) if wheel]
            continue
        say(f"{plan.wheel} for {', '.join(plan.targets)} ({plan.targets_from}), {plan.jobs} jobs")
        wheel = build.run(
            plan,
            dist=dist,
            cache=cache,
            cached_kernels=arguments.cached_kernels,
            without=arguments.without,
            cibuildwheel=arguments.cibuildwheel and plan.platform == DEFAULT,
            public=public,
            packages=arguments.packages,
            say=say,
        )
        wheels.append((plan, wheel))
    for plan, wheel in sorted(wheels, key=lambda built: built[0].platform == DEFAULT):  # the last line is for here
        say("\n" + "\n".join(closing.installation(plan, wheel)))
    return 0


@packages_of("build")
def _assemble(arguments: argparse.Namespace) -> int:
    try:
        rows = [(str(name), str(gpus)) for name, gpus in json.loads(arguments.rows)]
    except (ValueError, TypeError) as error:
        remedy = 'Give a list of names and GPU targets, such as [["2.8.3 universal", "gfx942"]].'
        raise DataError(f"--rows is no list of rows: {error}", remedy=remedy) from error
    from rocm_wheels.wheel import build, numbering

    made = [plan for name, gpus in rows for plan in plans.of_row(versions.load(), name, gpus)]
    public = numbering.load(arguments.published) if arguments.published else []
    say = partial(print, flush=True)
    build.assemble_all(made, dist=arguments.dist.absolute(), cache=cache_of(arguments), say=say, public=public)
    return 0


def _planned(arguments: argparse.Namespace, backend: str | None = None) -> Plan:
    cell = {name: getattr(arguments, name) for _, name, _ in CELL}
    missing = [name for name, _, _ in CELL if getattr(arguments, name.replace("-", "_")) is None]
    if len(missing) == len(CELL):
        if arguments.backend is not None:
            backend, universal = known_backend(versions.load(), arguments.backend).name, arguments.flash_attn
            raise DataError(
                f"--backend {backend} is for one combination; the universal wheel has every backend",
                remedy=f"Leave it out: ./build_rocm.sh {universal}\nOr name Python, torch and ROCm too: "
                f"./build_rocm.sh {universal} {' '.join(EXAMPLE)} --backend {backend}",
            )
        platform = DEFAULT if arguments.platform in (None, ALL) else arguments.platform
        if platform != DEFAULT and (arguments.docker or arguments.cibuildwheel):
            raise DataError(
                "--docker and --cibuildwheel run Linux containers, but the wheel is for another system",
                remedy=f"Leave them out: ./build_rocm.sh {arguments.flash_attn} --platform {platform}",
            )
        return make_universal_plan(versions.load(), flash_attn=arguments.flash_attn, env=os.environ, platform=platform)
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
    """The plan of the wheel. If BUILD_TRITON_BACKEND is true, the plan of the triton wheel follows. With --platform
    all, the plans for the other systems follow. A note names a system whose torch has none of the GPU targets.
    """
    plan = _planned(arguments)
    if wants_triton_too(plan, os.environ):
        return [plan, _planned(arguments, "triton")]
    if arguments.platform != ALL:
        return [plan]
    others = other_platforms(versions.load(), plan)
    lacking = [name for name in PLATFORMS if name not in {each.platform for each in (plan, *others)}]
    notes = tuple(f"no wheel for {name.capitalize()}: its torch has none of these GPU targets" for name in lacking)
    return [replace(plan, notes=(*plan.notes, *notes)), *others]
