"""How a plug-in of this project joins a program: it never stops the program."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Sequence


def join(wheel: str, program: str, ran_with: Sequence[str], add: Callable[[], object]) -> None:
    """Calls `add`, which registers a plug-in with a program. Logs a warning where `add` fails, and returns.

    A program calls its plug-ins at each start, whichever of them it uses, and may not catch their errors.
    wheel: the distribution of the plug-in. program: the program's distribution. ran_with: the program's releases on
    whose classes the plug-in was run.
    """
    try:
        add()
    except Exception as error:
        logging.getLogger(__name__).warning(
            "%s: %s %s starts without it: %s: %s. It was run with %s %s. Install one of these, or run "
            "`pip uninstall %s`.",
            wheel, program, _version(program), type(error).__name__, error, program, " and ".join(ran_with), wheel,
        )  # fmt: skip


def _version(program: str) -> str:
    try:
        return importlib.metadata.version(program)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
