"""The commands that run kernels of flash_attn, with the options of `__main__`. They need a checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from flash_attn.core.store import KernelError, Store

from amdgpu_simulator import (
    accuracy,
    assembly_hazards,
    calibration,
    comparison,
    coverage,
    decoding,
    measure,
    overview,
    published,
    refit,
    wheel,
)
from amdgpu_simulator.clock.latencies import latencies
from amdgpu_simulator.hip import process
from amdgpu_simulator.peers import aotriton
from amdgpu_simulator.workloads import Workload, assembly, composable, triton
from rocm_wheels.errors import RocmWheelsError

Workloads = dict[str, Callable[[], Workload]]


def run(options: argparse.Namespace) -> None:
    """Runs the command of the options.

    Raises ValueError for an unknown name, UnavailableError if a package is missing.
    """
    try:
        if options.command == "wheel":
            _wheel(options)
            return
        for line in _table(options):
            print(line, flush=True)
        if options.command in ("cycles", "table", "decoding"):
            error = accuracy.error(options.target)
            print(f"A ratio of two kernels has an error of {error:.0%} on {options.target}.", file=sys.stderr)
    except (RocmWheelsError, KernelError) as error:
        raise ValueError(error) from error


def _table(options: argparse.Namespace) -> Iterator[str]:
    """The lines of the table that a command prints."""
    if options.command == "coverage":
        return coverage.table(options.files, options.executed)
    if options.command == "hazards":
        return assembly_hazards.table()
    if options.command == "decoding":
        return (decoding.table_of_fp8 if options.fp8 else decoding.table)(options.target)
    if options.command == "refit":
        return refit.lines(options.report, merge=options.merge)
    if options.command == "published":
        return published.table(options.directory, options.kernel or ())
    if options.command == "calibrate":
        return calibration.report()
    if options.command == "table":
        return _beside(options)
    return _cycles(options)


def _beside(options: argparse.Namespace) -> Iterator[str]:
    """Compares the kernel providers with each other, or this project with another one."""
    if not options.peer:
        for name in ("op", "mask", "keys", "python"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} needs --peer: add --peer aotriton DIR")
        return overview.table(options.target, options.dim or overview.DIMS, options.dtype or overview.DTYPES)
    name, directory = options.peer
    if name != "aotriton":
        raise ValueError(f"--peer {name}: the known peer is aotriton")
    if options.keys is not None and options.keys < 1:
        raise ValueError(f"--keys {options.keys}: want 1 or more")
    masks = comparison.MASKS if options.mask is None else (options.mask == "causal",)
    return comparison.table(
        comparison.Comparison(
            target=options.target,
            checkout=aotriton.Checkout(Path(directory)),
            ops=tuple(options.op or comparison.OPS),
            dims=tuple(options.dim or comparison.DIMS),
            dtypes=tuple(options.dtype or comparison.DTYPES),
            causal=masks,
            keys=options.keys,
            pythons=tuple(options.python or (sys.executable,)),
        )
    )


def _cycles(options: argparse.Namespace) -> Iterator[str]:
    if options.store:
        workloads = _stored(options)
    else:
        workloads = _assembly(options) if options.kernel.startswith("asm-") else _compiled(options)
    result = latencies(options.target)
    if options.latency is not None:
        result = replace(result, memory=options.latency)
    return measure.table(workloads, result)


def _assembly(options: argparse.Namespace) -> Workloads:
    image = Path(options.code).read_bytes() if options.code else None
    return {options.code or options.kernel: partial(assembly.workload, options.target, options.kernel, image=image)}


def _compiled(options: argparse.Namespace) -> Workloads:
    if options.code:
        raise ValueError(
            "--code replaces the code of an asm- kernel, whose arguments are known, and "
            f"{options.kernel} is not an asm- kernel"
        )
    if "-batch" in options.kernel:
        return {options.kernel: partial(composable.workload, options.target, options.kernel)}
    variant = triton.parse_kernel(options.kernel)
    own = triton.tiles(options.target, variant, near=options.near)
    tiles = [*map(triton.parse_tile, options.tiles), *(own[1:] if options.tiles else own)]
    return {
        triton.write_tile(tile): partial(triton.workload, options.target, variant, tile, causal=options.causal)
        for tile in tiles
    }


def _stored(options: argparse.Namespace) -> Workloads:
    store, kernel = Store(Path(options.store)), options.kernel
    if store.target != options.target:
        raise ValueError(f"{options.store} is a kernel store of {store.target}, not of {options.target}")
    if kernel.startswith("asm-"):
        return {kernel: partial(assembly.workload, options.target, kernel, image=store.image(kernel))}
    if "-batch" in kernel:
        return {kernel: partial(composable.stored, store, kernel)}
    return {kernel: partial(triton.stored, store, triton.parse_kernel(kernel), causal=options.causal)}


def _wheel(options: argparse.Namespace) -> None:
    releases = options.hip or list(process.RELEASES)
    if unknown := [release for release in releases if release not in process.RELEASES]:
        raise ValueError(f"HIP {unknown[0]} is not available: choose from {', '.join(process.RELEASES)}")
    if not wheel.run(options.wheel, releases, options.gpu or wheel.GPUS):
        raise SystemExit(1)
