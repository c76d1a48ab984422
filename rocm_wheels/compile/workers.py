"""Worker processes that compile units and store each in the cache when it is compiled."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import cast

from rocm_wheels.compile import cache as compiled
from rocm_wheels.compile.compiler import Unit
from rocm_wheels.compile.progress import LOG_SECONDS, Progress
from rocm_wheels.compile.units import COMPILERS
from rocm_wheels.errors import CompileFailed, RocmWheelsError

_PR_SET_PDEATHSIG = 1


def compile_units(missing: Sequence[Unit], cache: Path, jobs: int, *, keep_going: bool) -> list[Unit]:
    """Compiles units into the cache. With `keep_going` it returns the units that did not compile.

    Raises CompileFailed, which names the kernel that failed. Units that were compiled before stay in the cache.
    """
    for name in {unit.compiler for unit in missing}:
        COMPILERS[name].prepare(cache)
    progress = Progress(missing, jobs)
    context = multiprocessing.get_context("spawn")
    failed = []
    scratch = tempfile.TemporaryDirectory(prefix="rocm_wheels-")
    pool = ProcessPoolExecutor(min(jobs, len(missing)), context, initializer=start, initargs=(scratch.name,))
    try:
        # Sort by cache key (a hash). This shuffles fast and slow kernels, so the time estimate is right early.
        mixed = sorted(missing, key=lambda unit: unit.key)
        futures = {pool.submit(_compile, unit, cache): unit for unit in mixed}
        for future in _done(futures, progress):
            unit = futures[future]
            try:
                future.result()
            except BrokenProcessPool:
                raise
            except Exception as error:
                problem = _told(error, unit, cache, scratch.name)
                if not keep_going or problem is not error or not isinstance(error, CompileFailed):
                    raise problem from error.__cause__ if problem is error else error
                print(f"  left out: {str(error).splitlines()[0]}", flush=True)
                failed.append(unit)
            progress.count(unit)
    except BrokenProcessPool as error:
        more = f"fewer jobs than {jobs} (MAX_JOBS, --jobs)" if jobs > 1 else "more memory free"
        raise CompileFailed(
            "a compiler process ended before it was done: most likely memory ran out",
            remedy=f"Run it again with {more}: what was compiled is kept.",
        ) from error
    except KeyboardInterrupt:
        for worker in multiprocessing.active_children():
            _kill(worker)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        scratch.cleanup()
    return failed


def _done(futures: Collection[Future[None]], progress: Progress) -> Iterator[Future[None]]:
    """Yields each future when it is done. Logs a line after each minute in which no future was done.

    `concurrent.futures.wait` takes the locks of all futures, and an interruption inside of it keeps some of them: the
    pool would never end.
    """
    done: SimpleQueue[Future[None]] = SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    left = len(futures)
    while left:
        with contextlib.suppress(Empty):
            yield done.get(timeout=LOG_SECONDS)
            left -= 1
            continue
        progress.wait()


def _told(error: Exception, unit: Unit, cache: Path, scratch: str) -> Exception:
    """Converts an exception of a worker to the error to raise.

    Returns the exception itself if its message is sufficient.
    """
    what = f"compiling {unit.name} for {unit.target}"
    # Each compiler has its own message for a full disk.
    if isinstance(error, OSError) or os.strerror(errno.ENOSPC) in str(error):
        return CompileFailed(
            f"{what}: {getattr(error, 'strerror', None) or error}",
            remedy=f"Files go to {cache} (--cache) and {scratch} (TMPDIR). What was compiled is kept.",
        )
    return error if isinstance(error, RocmWheelsError) else CompileFailed(f"{what}: {error!r}")


def start(scratch: str) -> None:
    """Sets up a worker. Its temporary files go to `scratch`. SIGTERM or the end of its parent ends the worker and its
    compilers.
    """
    # Triton makes many small objects: looking for unused ones after each 700 of them takes a fifteenth of the time.
    gc.set_threshold(100_000)
    os.setpgrp()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    tempfile.tempdir = scratch
    for compiler in COMPILERS.values():
        compiler.start(scratch)


def _kill(worker: BaseProcess) -> None:
    """Kills a worker and its compilers at once. A worker handles SIGTERM only between two calls into LLVM, and one of
    those may take a minute.
    """
    try:
        os.killpg(cast(int, worker.pid), signal.SIGKILL)
    except ProcessLookupError:
        # `start` has not made the process group yet, or the worker has ended.
        worker.kill()


def _compile(unit: Unit, cache: Path) -> None:
    """Runs in a worker."""
    compiled.put(unit, COMPILERS[unit.compiler].compile(unit, cache), cache)
