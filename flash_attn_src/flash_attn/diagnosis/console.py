"""The console that the diagnosis prints on."""

from __future__ import annotations

import io
import sys


def accept_every_character() -> None:
    """Makes stdout print a character that its encoding lacks as an escape.

    Without it, a path with such a character raises UnicodeEncodeError, for example where the output goes to a file in
    the code page of a Windows console.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
