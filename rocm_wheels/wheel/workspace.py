"""Working directories of builds in the cache. The next build deletes the directory of a killed build."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "work-"
_LOCK = ".lock"


@contextmanager
def work_directory(cache: Path) -> Iterator[Path]:
    """A new directory in `cache`, deleted at the end. Directories of dead processes are deleted first.

    It is in the cache, because /tmp may be small or on another file system than the torch that uv links. A process
    holds the lock of its directory; the system releases the lock when the process dies.
    """
    _clean(cache)
    path = cache / f"{_PREFIX}{uuid.uuid4().hex}"
    lock = path.with_suffix(_LOCK)
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        path.mkdir()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _clean(cache: Path) -> None:
    for lock in cache.glob(f"{_PREFIX}*{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except FileNotFoundError:  # its build has just ended
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A build that has created its lock file but not locked it yet has no directory yet either.
            if (path := lock.with_suffix("")).is_dir():
                shutil.rmtree(path, ignore_errors=True)
                lock.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
