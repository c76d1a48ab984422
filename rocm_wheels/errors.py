"""The failures of the pipeline: one class and one exit code for each kind."""

from __future__ import annotations

import errno
import os
import signal
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

# ruff: noqa: N818 - the names say what happened, without the suffix Error

_FULL = (errno.ENOSPC, errno.EDQUOT)


class RocmWheelsError(Exception):
    """A failure with its reason and, if there is one, a remedy."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}" if self.remedy else self.message


class UnknownVersion(RocmWheelsError):
    """A version that versions.toml does not list."""

    exit_code = 2


class ImpossibleCell(RocmWheelsError):
    """Known versions that do not exist in combination."""

    exit_code = 3


class BadTarget(RocmWheelsError):
    """A GPU target that does not exist, or that the combination of versions does not support."""

    exit_code = 4


class MissingTool(RocmWheelsError):
    """The machine lacks a compiler, a header or a program."""

    exit_code = 5


class CompileFailed(RocmWheelsError):
    """A kernel or the launcher did not compile."""

    exit_code = 6


class AssembleFailed(RocmWheelsError):
    """A wheel could not be put together."""

    exit_code = 7


class RepairFailed(RocmWheelsError):
    """A wheel could not be made a manylinux wheel."""

    exit_code = 8


class VerifyFailed(RocmWheelsError):
    """A wheel did not pass its tests."""

    exit_code = 9


class DataError(RocmWheelsError):
    """A file, a setting or a file name does not have the required form."""

    exit_code = 10


class PublishFailed(RocmWheelsError):
    """A release could not be made, or does not have the required contents."""

    exit_code = 11


@contextmanager
def writing_to(directory: Path | None) -> Iterator[None]:
    """Names the directory in the OSError of a full disk, which does not name a file if it was raised by a write."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or directory is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(directory)) from error


def exit_code(run: Callable[[], int], *, again: str = "Run it again.") -> int:
    """Runs a program and returns its exit code. A failure prints one message on stderr, never a traceback.

    again: a sentence for the user who interrupted the program.
    """
    try:
        code = run()
        sys.stdout.flush()
    except RocmWheelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of the output, such as `| head`, has closed it. Python must not try to write the rest when it
        # exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        # A copy that fails names its source first, but the target's disk is the full one.
        path = error.filename2 if error.errno in _FULL and error.filename2 else error.filename
        print(f"error: {f'{path}: {error.strerror}' if path else error}", file=sys.stderr)
        if error.errno in _FULL:
            print(f"Make room where it writes: --cache, --dist, --out, TMPDIR. {again}", file=sys.stderr)
        return RocmWheelsError.exit_code
    except (UnicodeDecodeError, zipfile.BadZipFile, zlib.error) as error:
        print(f"error: a file cannot be read: {error}", file=sys.stderr)
        return RocmWheelsError.exit_code
    except KeyboardInterrupt:
        print(f"error: interrupted\n{again}", file=sys.stderr)
        return 130
    return code
