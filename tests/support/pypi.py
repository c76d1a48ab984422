"""A stand-in for PyPI: flash-attn's sources, which need CUDA to build, and torch for CUDA."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from installing import pure_wheel

# Every release of flash-attn 2 that requirements name; all of them are sources.
FLASH_ATTN = ("2.7.4.post1", "2.8.3", "2.8.3.post1", "2.8.3.post2")
TORCH = ("2.5.1", "2.9.1", "2.15.0")
_SETUP = """\
import os, sys
sys.exit("CUDA_HOME environment variable is not set. Please set it to your CUDA install root.")
"""


def write(root: Path, flash_attn: Sequence[str] = FLASH_ATTN) -> None:
    """Writes the pages and files of an index into a directory."""
    for version in flash_attn:
        _sdist(root / "flash-attn", version)
    for version in TORCH:
        pure_wheel(root / "torch", "torch", version)
    pure_wheel(root / "einops", "einops", "0.8.2")


def _sdist(directory: Path, version: str) -> None:
    """Writes sources that do not build without CUDA. Returns their line in an index page."""
    directory.mkdir(parents=True, exist_ok=True)
    info = ["Metadata-Version: 2.1", "Name: flash_attn", f"Version: {version}", "Requires-Python: >=3.9"]
    info += ["Requires-Dist: torch", "Requires-Dist: einops"]
    stem = f"flash_attn-{version}"
    with tarfile.open(directory / f"{stem}.tar.gz", "w:gz") as archive:
        for name, text in {"PKG-INFO": "\n".join([*info, ""]), "setup.py": _SETUP}.items():
            member = tarfile.TarInfo(f"{stem}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    links = "".join(
        f'<a href="{each.name}" data-requires-python="&gt;=3.9">{each.name}</a>'
        for each in sorted(directory.glob("*.tar.gz"))
    )
    (directory / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
