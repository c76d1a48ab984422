"""The verbs that update pinned versions; no logic of their own."""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from rocm_wheels.packages import packages_of


def add_verbs(verbs: Any) -> None:
    """Adds the verbs of this module to the command line."""
    lock = verbs.add_parser("lock", help="regenerate the lock files from pyproject.toml with uv")
    lock.set_defaults(run=_lock)

    refresh = verbs.add_parser("refresh", help="update pinned packages and image digests")
    refresh.add_argument("--dry-run", action="store_true", help="print the changes and write nothing")
    refresh.set_defaults(run=_refresh)


def _lock(_: argparse.Namespace) -> int:
    from rocm_wheels.matrix import locks

    for change in locks.write(today=datetime.datetime.now(datetime.timezone.utc).date()):
        print(change)
    return 0


@packages_of("build")
def _refresh(arguments: argparse.Namespace) -> int:
    from rocm_wheels.matrix import refresh

    for change in refresh.run(dry_run=arguments.dry_run):
        print(change)
    return 0
