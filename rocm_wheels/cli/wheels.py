"""The verbs that repair, test, rewrite and merge finished wheels; no logic of their own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rocm_wheels import artifacts
from rocm_wheels.cli.options import add_cache, cache_of, directory
from rocm_wheels.errors import DataError
from rocm_wheels.packages import packages_of


def add_verbs(verbs: Any) -> None:
    """Adds the verbs of this module to the command line."""
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
    verify.add_argument(
        "--one-torch", action="store_true", help="delete the packages of a torch before the next one, for a small disk"
    )
    verify.add_argument("--require-gpu", action="store_true", help="fail unless the tests ran on a GPU and passed")
    add_cache(verify)
    verify.set_defaults(run=_verify)

    unlabelled = verbs.add_parser(
        "unlabelled", help="write a universal wheel under its version without +rocm, for programs that compare versions"
    )
    unlabelled.add_argument("wheel", type=Path, nargs="+", help="a universal wheel")
    unlabelled.add_argument("--output", type=directory, required=True, metavar="DIR", help="for the wheel")
    unlabelled.set_defaults(run=_unlabelled)

    sign = verbs.add_parser("sign", help="sign the launcher for Windows in the cache, which the next build takes")
    sign.add_argument("flash_attn", metavar="VERSION", help="version of flash_attn: 2.8.3")
    sign.add_argument(
        "--command", required=True, metavar="COMMAND", help="writes a signed copy of the file {input} to {output}"
    )
    add_cache(sign)
    sign.set_defaults(run=_sign)

    hub = verbs.add_parser("hub", help="convert a wheel to a repository for Hugging Face's package `kernels`")
    hub.add_argument("wheel", type=Path, help="a repaired wheel, preferably the universal wheel")
    hub.add_argument("--output", type=directory, required=True, metavar="DIR", help="a new directory")
    hub.set_defaults(run=_hub)

    benchmark = verbs.add_parser(
        "benchmark", help="benchmark a finished wheel on this machine's GPU, in a clean environment"
    )
    benchmark.add_argument("wheel", type=Path, help="a repaired wheel")
    benchmark.add_argument(
        "--out", type=Path, default=Path("build/results"), metavar="DIR", help="for the JSON results"
    )
    add_cache(benchmark)
    benchmark.set_defaults(run=_benchmark)

    emulate = verbs.add_parser("emulate", help="test a universal wheel on a GPU that AMD's rocjitsu emulates")
    emulate.add_argument("target", metavar="GFX", help="the GPU to emulate: gfx942, gfx1100, ...")
    emulate.add_argument("--wheel", type=Path, metavar="FILE", help="(default: the newest release's universal wheel)")
    emulate.add_argument(
        "--minutes", type=float, default=90, metavar="N", help="for the selftest, and as many for the tests (90)"
    )
    emulate.add_argument(
        "--out", type=Path, default=Path("build/emulated"), metavar="DIR", help="for the result (build/emulated)"
    )
    emulate.add_argument("--summary", type=Path, metavar="FILE", help="add the result to this file, as Markdown")
    emulate.add_argument("--repo", metavar="OWNER/NAME", help="default: GITHUB_REPOSITORY")
    emulate.add_argument("--url", help="of the site (default: the repository's GitHub Pages)")
    emulate.set_defaults(run=_emulate)

    merge = verbs.add_parser("merge", help="move the files of several artifacts into one directory")
    merge.add_argument("source", type=Path, help="directory that contains one directory per artifact")
    merge.add_argument(
        "target", type=Path, help="directory for the files; two different files with one name are an error"
    )
    merge.add_argument(
        "--only", metavar="GLOBS", default="*", help="only files of these names, as 'flash_attn-*;*-py3-none-any.whl'"
    )
    merge.add_argument("--count", type=int, metavar="N", help="fail unless there are N artifacts")
    merge.set_defaults(run=_merge)


@packages_of("build")
def _repair(arguments: argparse.Namespace) -> int:
    from rocm_wheels.wheel import repair

    print(repair.repair(arguments.wheel, arguments.output.absolute()))
    return 0


@packages_of("build")
def _verify(arguments: argparse.Namespace) -> int:
    from rocm_wheels.wheel import build

    for verdict in build.verify_again(
        arguments.wheel,
        cache=cache_of(arguments),
        require_gpu=arguments.require_gpu,
        every=arguments.every_torch,
        one_torch=arguments.one_torch,
    ):
        print(verdict.summary(), flush=True)
    return 0


def _unlabelled(arguments: argparse.Namespace) -> int:
    from rocm_wheels.matrix import names
    from rocm_wheels.wheel import rewrite

    for wheel in arguments.wheel:
        if names.unlabelled(wheel.name) is None or not wheel.is_file():
            raise DataError(
                f"{wheel} is not a universal wheel", remedy="Give one: dist/flash_attn-2.8.3+rocm-cp310-abi3-*.whl"
            )
    arguments.output.mkdir(parents=True, exist_ok=True)
    for wheel in arguments.wheel:
        print(rewrite.without_label(wheel, arguments.output))
    return 0


@packages_of("build")
def _sign(arguments: argparse.Namespace) -> int:
    from rocm_wheels.matrix import plan, versions
    from rocm_wheels.wheel import signature

    data = versions.load()
    known = plan.make_universal_plan(data, flash_attn=arguments.flash_attn, env={}, platform="windows")
    cache = cache_of(arguments)
    signature.sign_launcher(arguments.command, version=known.cell.flash_attn, cache=cache)
    print(f"the launcher for flash_attn {known.cell.flash_attn} is signed, in {cache}")
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

    for result in benchmark.run(arguments.wheel, cache=cache_of(arguments), output=arguments.out):
        print(result)
    return 0


@packages_of("build")
def _emulate(arguments: argparse.Namespace) -> int:
    from rocm_wheels.publish import emulation, tryout
    from rocm_wheels.publish.home import Home

    wheel = [str(arguments.wheel)]
    if arguments.wheel is None:
        site = Home.of(repository=arguments.repo, url=arguments.url).url
        listing = tryout.listing(site)
        if listing is None:
            print(f"{site}: nothing is published yet")
            return 0
        newest = tryout.newest_universal(listing, site)
        wheel = [f"flash_attn=={newest['version']}", "--extra-index-url", f"{site}{newest['index']}"]
    result = emulation.run(arguments.target, wheel, minutes=arguments.minutes, output=arguments.out.absolute())
    text = emulation.summary(result)
    print(text)
    if arguments.summary is not None:
        with arguments.summary.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
    return 0 if emulation.ok(result) else 1


def _merge(arguments: argparse.Namespace) -> int:
    sources = artifacts.unpacked(arguments.source)
    if arguments.count is not None and len(sources) != arguments.count:
        raise DataError(
            f"{arguments.source} holds {len(sources)} artifacts, {arguments.count} were built",
            remedy="Artifacts live 30 days: run all jobs again, not the failed ones alone.",
        )
    count = artifacts.merge(sources, arguments.target, arguments.only)
    print(f"{arguments.target}: {count} files of {len(sources)} artifacts")
    return 0
