"""Files that flash_attn keeps for the user."""

from __future__ import annotations

import os
from pathlib import Path

from flash_attn.core.platform import PLATFORM


def write_whole(path: Path, text: str) -> None:
    """Writes a file, so that its readers get the old content or the new one. Creates its directory.

    Raises OSError, and leaves the old content then and no other file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        part.write_text(text, encoding="utf-8")
        PLATFORM.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
