"""Stage 1: compiles kernel variants into the kernel store, one archive per GPU target.

Every compiled unit lands in a content-addressed cache first, so an interrupted build continues where it stopped,
shards of one build can run on different machines, and a build for another Python or torch compiles nothing.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import json
import multiprocessing
import os
import signal
import tempfile
import uuid
import zipfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rocm_wheels import ck_compiler, ck_sources, triton_compiler, units
from rocm_wheels.errors import CompileFailed, RocmWheelsError
from rocm_wheels.progress import Progress
from rocm_wheels.units import Unit

_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
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
    missing = [unit for unit in wanted if _cached(unit, cache) is None]
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
    return {target: _pack([unit for unit in wanted if unit.target == target], cache, made_by) for target in targets}


def require_cached(targets: Sequence[str], *, cache: Path, backend: str = "triton", toolchain: str = "pypi") -> None:
    """Raises CompileFailed unless the cache has every kernel of the targets."""
    wanted = units.find(targets, backend=backend, toolchain=toolchain)
    missing = [unit for unit in wanted if _cached(unit, cache) is None]
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
    _write(path, image)
    held = {name: {**entry, "sha256": digest} for name, entry in entries.items()}
    _write(path.with_suffix(".json"), json.dumps(held, sort_keys=True).encode())


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, whenever the process is killed."""
    # A name that no process of another container takes, which has the same cache and numbers of processes.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _cached(unit: Unit, cache: Path) -> tuple[bytes, dict[str, dict[str, Any]]] | None:
    """A unit's code object and entries, or None where the cache lacks it or holds a damaged copy."""
    path = unit.path(cache)
    try:
        image = path.read_bytes()
        entries: dict[str, dict[str, Any]] = json.loads(path.with_suffix(".json").read_bytes())
        digest = hashlib.sha256(image).hexdigest()
        whole = sorted(entries) == sorted(unit.kernels) and all(e["sha256"] == digest for e in entries.values())
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return (image, entries) if whole else None


def _pack(wanted: Sequence[Unit], cache: Path, made_by: tuple[str, str]) -> Path:
    """The archive of one target: the same units give the same bytes."""
    target = wanted[0].target
    kernels: dict[str, dict[str, Any]] = {}
    images: dict[str, bytes] = {}
    for unit in wanted:
        held = _cached(unit, cache)
        if held is None:
            raise CompileFailed(
                f"{unit.name} for {target} vanished from the cache {cache}",
                remedy="Let nothing else write there, and run it again: what is missing is compiled anew.",
            )
        images[unit.name] = held[0]
        kernels.update(held[1])
    manifest = {
        "format": 1,
        "target": target,
        "compiler": dict(zip(("name", "version"), made_by, strict=True)),
        "kernels": kernels,
    }
    text = json.dumps(manifest, sort_keys=True, indent=1).encode()
    # One directory for one set of units, so that stores of different sets (`--only`) do not overwrite each other.
    identity = hashlib.sha256("".join(unit.key for unit in wanted).encode()).hexdigest()
    path = cache / "stores" / identity[:16] / f"{target}.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file, content in (("manifest.json", text), *((f"{name}.co", images[name]) for name in sorted(images))):
            information = zipfile.ZipInfo(file, _ZIP_DATE)
            information.compress_type = zipfile.ZIP_DEFLATED
            information.external_attr = 0o644 << 16
            archive.writestr(information, content)
    _write(path, packed.getvalue())
    return path
