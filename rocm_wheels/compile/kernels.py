"""Stage 1: compiles kernel variants into the kernel store, one archive per GPU target.

Every compiled unit lands in a content-addressed cache first, so an interrupted build continues where it stopped,
shards of one build can run on different machines, and a build for another Python or torch compiles nothing.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from rocm_wheels.compile import units
from rocm_wheels.compile.cache import read, write
from rocm_wheels.compile.ck import compiler as ck_compiler
from rocm_wheels.compile.ck import sources as ck_sources
from rocm_wheels.compile.progress import Progress
from rocm_wheels.compile.store import pack
from rocm_wheels.compile.triton import compiler as triton_compiler
from rocm_wheels.compile.units import Unit
from rocm_wheels.errors import CompileFailed, RocmWheelsError

_PR_SET_PDEATHSIG = 1
_NAMES = "A name reads bwd-dq-bf16-d128-any; `python -m rocm_wheels inspect WHEEL` shows those in a wheel."


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
) -> dict[str, Path]:
    """Compile what the cache lacks and pack one archive a target. Returns target -> archive.

    With a shard of several the archives are not packed: the result is empty, the cache holds the shard's units.
    tiles: see `units.find`; of these one that does not compile is left out, with its reason on stdout.
    Raises CompileFailed naming the kernel; what was compiled before stays in the cache.
    """
    wanted = units.find(targets, shard=shard, only=only, backend=backend, toolchain=toolchain, tiles=tiles)
    # A shard of few kernels may have none of them.
    if not wanted and not units.find(targets, only=only, backend=backend, toolchain=toolchain, tiles=tiles):
        raise CompileFailed(
            f"no kernel for {', '.join(targets)} matches {only!r}",
            remedy=_NAMES,
        )
    missing = [unit for unit in wanted if read(unit, cache) is None]
    lacking, total = (sum(len(unit.kernels) for unit in some) for some in (missing, wanted))
    print(f"  {total} kernels for {', '.join(targets)}: {total - lacking} cached", flush=True)
    if missing:
        failed = _compile(missing, cache, jobs, keep_going=tiles)
        wanted = [unit for unit in wanted if unit not in failed]
    if shard[1] > 1:
        return {}
    if empty := [target for target in targets if all(unit.target != target for unit in wanted)]:
        raise CompileFailed(
            f"no kernel for {', '.join(empty)} matches {only!r} and compiles",
            remedy=_NAMES,
        )
    made_by = units.compiler(backend, toolchain)
    return {target: pack([unit for unit in wanted if unit.target == target], cache, made_by) for target in targets}


def require_cached(targets: Sequence[str], *, cache: Path, backend: str = "triton", toolchain: str = "pypi") -> None:
    """Raises CompileFailed unless the cache has every kernel of the targets."""
    wanted = units.find(targets, backend=backend, toolchain=toolchain)
    missing = [unit for unit in wanted if read(unit, cache) is None]
    if missing:
        raise CompileFailed(
            f"{sum(len(unit.kernels) for unit in missing)} kernels are not in the cache {cache}: first "
            f"{missing[0].name} for {missing[0].target}",
            remedy="Bring the cache of the same sources and compiler, or leave --cached-kernels out.",
        )


def _compile(missing: Sequence[Unit], cache: Path, jobs: int, *, keep_going: bool) -> list[Unit]:
    """Returns what failed, where that is to be told and no error."""
    failed = []
    if any(unit.compiler == "ck" for unit in missing):
        ck_sources.headers(cache)  # once, before the workers ask for them all at once
    progress = Progress(missing, jobs)
    context = multiprocessing.get_context("spawn")
    scratch = tempfile.TemporaryDirectory(prefix="rocm_wheels-")
    pool = ProcessPoolExecutor(min(jobs, len(missing)), context, initializer=_prepare, initargs=(scratch.name,))
    try:
        futures = {pool.submit(_compile_unit, unit, cache): unit for unit in missing}
        for future in as_completed(futures):
            unit = futures[future]
            problem = future.exception()
            # Of a full disk a compiler's own error may tell.
            if isinstance(problem, OSError) or os.strerror(errno.ENOSPC) in str(problem):
                raise CompileFailed(
                    f"compiling {unit.name} for {unit.target}: {getattr(problem, 'strerror', None) or problem}",
                    remedy=f"Files go to {cache} (--cache) and {scratch.name} (TMPDIR). What was compiled is kept.",
                ) from problem
            if problem is not None and not isinstance(problem, (RocmWheelsError, BrokenProcessPool)):
                raise CompileFailed(f"compiling {unit.name} for {unit.target}: {problem!r}") from problem
            if keep_going and isinstance(problem, CompileFailed):
                print(f"  left out: {str(problem).splitlines()[0]}", flush=True)
                failed.append(unit)
            else:
                future.result()
            progress.count(unit)
    except BrokenProcessPool as error:
        raise CompileFailed(
            "a compiler process ended before it was done, most likely for want of memory",
            remedy="Run it again with "
            + (f"fewer jobs than {jobs} (MAX_JOBS, --jobs)" if jobs > 1 else "more memory free")
            + ": what was compiled is kept.",
        ) from error
    except KeyboardInterrupt:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        scratch.cleanup()
    return failed


def _prepare(scratch: str) -> None:
    """Set up a worker: it ends together with the compilers that it runs, when it is told to or left alone."""
    os.setpgrp()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    tempfile.tempdir = scratch
    triton_compiler.prepare(scratch)


def _compile_unit(unit: Unit, cache: Path) -> None:
    """Runs in a worker. The entries are written last: a unit counts as compiled once both files are whole."""
    if unit.compiler == "ck":
        image, entries = ck_compiler.compile_unit(
            unit.target, unit.name, unit.content, cache=cache, toolchain=unit.toolchain
        )
    else:
        image, entry = triton_compiler.compile_variant(unit.target, *unit.content)
        entries = {unit.name: entry}
    digest = hashlib.sha256(image).hexdigest()
    path = unit.path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, image)
    held = {name: {**entry, "sha256": digest} for name, entry in entries.items()}
    write(path.with_suffix(".json"), json.dumps(held, sort_keys=True).encode())
