"""The compile stage: kernel variants become kernel stores, one archive per GPU target.

Every compiled unit goes into a content-addressed cache first. So an interrupted build continues where it stopped,
shards of one build run on different machines, and a build for another Python or torch compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rocm_wheels.compile import sources, units
from rocm_wheels.compile.cache import prune as pruned
from rocm_wheels.compile.cache import read
from rocm_wheels.compile.ck import planner as ck_planner
from rocm_wheels.compile.ck.units import ComposableKernel
from rocm_wheels.compile.store import pack
from rocm_wheels.compile.workers import compile_units
from rocm_wheels.errors import CompileFailed

_NAMES = "A name reads bwd-dq-bf16-d128-any; `python -m rocm_wheels inspect WHEEL` shows the names in a wheel."


def compile_store(
    targets: Sequence[str],
    *,
    cache: Path,
    jobs: int,
    shard: tuple[int, int] = (1, 1),
    only: str | None = None,
    backend: str = "triton",
    toolchain: str = "pypi",
    tiles: bool = False,
    without: Sequence[str] = (),
    prune: bool = False,
    together: bool = False,
) -> dict[str, Path]:
    """Compiles the units that are not in the cache and packs one archive per target. Returns a mapping of target to
    archive.

    A shard packs no archive: the result is empty, and the cache holds the units of the shard. With `tiles` (see
    `units.find`), a unit that does not compile is skipped and its reason printed on stdout. together: all archives will
    be in one directory, so code that generic targets share is packed once. without: names of compilers to leave out.
    prune: delete every other unit of the cache.

    Raises CompileFailed, which names the kernel. Units that were compiled before stay in the cache.
    """
    find = partial(units.find, targets, only=only, backend=backend, toolchain=toolchain, tiles=tiles, without=without)
    selection = find(shard=shard)
    # A shard of a few kernels may be empty.
    if not selection and not find():
        raise CompileFailed(
            f"no kernel for {', '.join(targets)} matches {only!r}",
            remedy=_NAMES,
        )
    if prune:
        # Prune first, so that a job that times out does not save old units.
        print(f"  {pruned(selection, cache)} files of other units deleted", flush=True)
    missing = [unit for unit in selection if read(unit, cache) is None]
    lacking, total = (sum(len(unit.kernels) for unit in some) for some in (missing, selection))
    print(f"  {total} kernels for {', '.join(targets)}: {total - lacking} cached", flush=True)
    if missing:
        failed = compile_units(missing, cache, jobs, keep_going=tiles)
        selection = [unit for unit in selection if unit not in failed]
    if shard[1] > 1:
        return {}
    if empty := [target for target in targets if all(unit.target != target for unit in selection)]:
        raise CompileFailed(
            f"no kernel for {', '.join(empty)} matches {only!r} and compiles",
            remedy=_NAMES,
        )
    made_by = units.compiler(backend, toolchain)
    of = {target: [unit for unit in selection if unit.target == target] for target in targets}
    row = sources.module("kernels.targets").get
    beside = {target: of.get(row(target).made_for, ()) if together else () for target in targets}
    planner = {
        target: ck_planner.digest(cache) if any(unit.compiler == ComposableKernel.name for unit in of[target]) else None
        for target in targets
    }
    return {target: pack(of[target], cache, made_by, beside[target], planner[target]) for target in targets}


def require_cached(
    targets: Sequence[str],
    *,
    cache: Path,
    backend: str = "triton",
    toolchain: str = "pypi",
    without: Sequence[str] = (),
) -> None:
    """Raises CompileFailed unless the cache has every kernel of the targets."""
    selection = units.find(targets, backend=backend, toolchain=toolchain, without=without)
    missing = [unit for unit in selection if read(unit, cache) is None]
    if missing:
        raise CompileFailed(
            f"{sum(len(unit.kernels) for unit in missing)} kernels are not in the cache {cache}: first "
            f"{missing[0].name} for {missing[0].target}",
            remedy="Bring the cache of the same sources and compiler, or leave --cached-kernels out.",
        )
