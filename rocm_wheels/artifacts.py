"""Artifacts of several jobs, merged into one directory: a file is never replaced by other contents.

`actions/download-artifact` unpacks a single artifact flat and several into a directory each. So every artifact here
holds one directory of its own name, and the workflows download with `merge-multiple`: both cases then look the same.
"""

from __future__ import annotations

import filecmp
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rocm_wheels.errors import DataError

_AGAIN = "Run the jobs that upload it again, all of one commit."


def unpacked(directory: Path) -> list[Path]:
    """The directories of the artifacts that were downloaded into `directory`; empty if it does not exist.

    Raises DataError for a file or link next to the directories, because each artifact must hold one directory with its
    name.
    """
    _refuse_links(directory)
    if not directory.exists():
        return []
    entries = sorted(directory.iterdir())
    if loose := [path.name for path in entries if path.is_symlink() or not path.is_dir()]:
        raise DataError(
            f"{directory} holds files outside of an artifact's directory: {', '.join(loose)}",
            remedy="Upload a directory that holds one directory, named as the artifact; download with merge-multiple.",
        )
    return entries


def merge(sources: Sequence[Path], target: Path, only: str = "*") -> int:
    """Moves the files below the directories `sources` into `target`, under their paths. Returns the number of files.

    only: globs with semicolons between them; a file whose name matches none stays.

    Raises DataError, before anything is moved, if two directories hold different files under one path, if `target` has
    another file there, if two paths differ only by case, which are one file on Windows and macOS, or if a path is a
    link, which could lead out of the directory.
    """
    paths: dict[Path, Path] = {}
    _refuse_links(target)
    for source in sources:
        _refuse_links(source)
        if not source.is_dir():
            raise DataError(f"{source} is not a directory", remedy="Give the directories of the artifacts.")
        for path in _files(source):
            if not any(fnmatch.fnmatchcase(path.name, glob) for glob in only.split(";")):
                continue
            name = path.relative_to(source)
            _check_place(target, name)
            for other in filter(None, (paths.get(name), target / name if (target / name).exists() else None)):
                if not filecmp.cmp(path, other, shallow=False):
                    raise DataError(f"{path} and {other} have one name and different contents", remedy=_AGAIN)
            paths.setdefault(name, path)
    _refuse_other_case(paths, target)
    for name in paths:
        if clash := next((parent for parent in name.parents if parent in paths), None):
            raise DataError(f"{paths[clash]} is a file, {paths[name].parent} a directory", remedy=_AGAIN)
    for name, path in paths.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        path.replace(target / name)
    return len(paths)


def _files(source: Path) -> Iterator[Path]:
    """The files below a directory, sorted. Raises DataError for a link and for anything that is neither a file nor a
    directory.
    """
    for path in sorted(source.iterdir()):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise DataError(f"{path} is no regular file", remedy="Leave it out of the artifact.")
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _refuse_other_case(paths: Iterable[Path], target: Path) -> None:
    """Raises DataError if two of the paths or their directories, or one of them and one in `target`, differ only by
    case.
    """
    there = [path.relative_to(target) for path in target.rglob("*")] if target.is_dir() else []
    every = [part for path in paths for part in (*path.parents, path)]
    spelled: dict[str, Path] = {}
    for name in (*there, *every):
        other = spelled.setdefault(str(name).casefold(), name)
        if other != name:
            raise DataError(f"{name} and {other} differ only by case", remedy="Name one of them differently.")


def _check_place(target: Path, name: Path) -> None:
    """Raises DataError if the path of a file below `target` leads through a link or a file, or if a directory has that
    path.
    """
    for place in (*reversed([target / parent for parent in name.parents]), target / name):
        last = place == target / name
        if place.is_symlink() or (place.exists() and not (place.is_file() if last else place.is_dir())):
            raise DataError(f"{place} is no regular {'file' if last else 'directory'}", remedy="Remove it.")


def _refuse_links(directory: Path) -> None:
    if directory.is_symlink():
        raise DataError(f"{directory} is a link", remedy="Give the directory that it leads to.")
