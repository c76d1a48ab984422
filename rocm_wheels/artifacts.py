"""Files of several jobs in one directory: a file that is there is never replaced by another content."""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from pathlib import Path

from rocm_wheels.errors import DataError


def merge(sources: Sequence[Path], target: Path) -> int:
    """Moves the files below the directories `sources` into `target`, under their paths, and returns how many there are.

    DataError, before anything is moved, if two directories hold different files under one path, or if `target` has
    another file there. Links are refused: they could lead out of the directory.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        if not source.is_dir():
            raise DataError(f"{source} is not a directory", remedy="Give the directories of the artifacts.")
        for path in sorted(source.rglob("*")):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise DataError(f"{path} is no regular file", remedy="Leave it out of the artifact.")
            if path.is_dir():
                continue
            name = path.relative_to(source)
            for other in filter(None, (found.get(name), target / name if (target / name).exists() else None)):
                if not filecmp.cmp(path, other, shallow=False):
                    raise DataError(
                        f"{path} and {other} have one name and different contents",
                        remedy="Run the jobs that made them again, all of one commit.",
                    )
            found.setdefault(name, path)
    for name, path in found.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        path.replace(target / name)
    return len(found)
