"""Stand-ins for GitHub's actions on a local disk, with the behaviour of the pinned versions (docs/notes/actions.md)."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NAME = re.compile(r'[":<>|*?\r\n\\/]')  # characters that an artifact's name must not have
_PATH = re.compile(r'[":<>|*?\r\n]')
_GLOB = re.compile(r"[*?\[]")
RETENTION_DAYS = 90  # limit of a repository
MAX_KEY = 512  # limit of a cache key
MAX_KEYS = 10  # limit of the key and its restore-keys


class ActionFailed(Exception):  # noqa: N818 - as the runner's result "failure"
    """The action fails its step."""


def upload(inputs: Mapping[str, Any], workspace: Path, artifacts: Path) -> None:
    """actions/upload-artifact: the files that the paths match, without hidden files; links are followed, modes are
    lost.
    """
    name = inputs["name"]
    if not name or _NAME.search(name):
        raise ActionFailed(f"the artifact name is not valid: {name!r}")
    if not 0 <= int(inputs.get("retention-days") or 0) <= RETENTION_DAYS:
        raise ActionFailed(f"retention-days: {inputs['retention-days']}")
    patterns = [line.strip() for line in inputs["path"].split("\n")]
    patterns = [os.path.normpath(workspace / line) for line in patterns if line and not line.startswith("#")]
    files = sorted({path for pattern in patterns for path in _matches(pattern)})
    if not files:
        if inputs.get("if-no-files-found", "warn") == "error":
            raise ActionFailed(f"no files were found with the provided path: {inputs['path']}")
        return
    root = _root(patterns, files)
    target = artifacts / name
    if target.exists():
        if inputs.get("overwrite") is not True:
            raise ActionFailed(f"an artifact with the name {name} exists already")
        shutil.rmtree(target)
    for path in files:
        inside = path.relative_to(root)
        if _PATH.search(inside.as_posix()):
            raise ActionFailed(f"the path for one of the files in artifact is not valid: {inside}")
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / inside)


def download(inputs: Mapping[str, Any], workspace: Path, artifacts: Path) -> None:
    """actions/download-artifact: a single match is unpacked in `path` itself, several matches in a directory each or
    merged.
    """
    target = Path(os.path.normpath(workspace / (inputs.get("path") or ".")))
    there = sorted(artifacts.iterdir(), reverse=True) if artifacts.is_dir() else []
    if name := inputs.get("name"):
        result = [path for path in there if path.name == name]
        if not result:
            raise ActionFailed(f"Artifact {name!r} not found")
    else:
        result = [path for path in there if _chosen(path.name, inputs)]
    flat = bool(name) or inputs.get("merge-multiple") is True or len(result) == 1
    for artifact in result:
        shutil.copytree(artifact, target if flat else target / artifact.name, dirs_exist_ok=True)


def check_keys(inputs: Mapping[str, Any]) -> None:
    """actions/cache: raises ActionFailed for keys that the cache refuses, or that restore nothing of an earlier run."""
    keys = [inputs["key"], *(line.strip() for line in inputs.get("restore-keys", "").split("\n") if line.strip())]
    if len(keys) > MAX_KEYS or any(not key or len(key) > MAX_KEY or "," in key or "\n" in key for key in keys):
        raise ActionFailed(f"Key Validation Error: {keys}")
    if strangers := [key for key in keys if not keys[0].startswith(key)]:
        raise ActionFailed(f"restore keys that are no prefix of the key: {strangers}")


def _chosen(name: str, inputs: Mapping[str, Any]) -> bool:
    """Whether the pattern matches the artifact. Braces without a comma are literal, as in minimatch."""
    pattern = inputs.get("pattern")
    if not pattern:
        return True
    braces = re.fullmatch(r"\{([^{}]*,[^{}]*)\}(.*)", pattern)
    choices = [f"{each}{braces[2]}" for each in braces[1].split(",")] if braces else [pattern]
    return any(fnmatch.fnmatchcase(name, each) for each in choices if each)


def _matches(pattern: str) -> list[Path]:
    """The files at or below the matches of a pattern. Directories have no entry, so an empty directory is lost."""
    base = _search_path(pattern)
    start = [base] if base == pattern else [str(path) for path in Path(base).glob(os.path.relpath(pattern, base))]
    result: list[Path] = []
    for each in map(Path, start):
        if not each.exists() or any(part.startswith(".") for part in each.relative_to(base).parts or (each.name,)):
            continue
        if each.is_file():
            result.append(each)
        for directory, inner, files in os.walk(each, followlinks=True):
            inner[:] = [name for name in inner if not name.startswith(".")]
            paths = [Path(directory, name) for name in files if not name.startswith(".")]
            result += [path for path in paths if path.is_file()]
    return result


def _search_path(pattern: str) -> str:
    """The directories before the first part with a wildcard."""
    parts = Path(pattern).parts
    fixed = next((number for number, part in enumerate(parts) if _GLOB.search(part)), len(parts))
    return str(Path(*parts[:fixed]))


def _root(patterns: Sequence[str], files: Sequence[Path]) -> Path:
    """The directory that the artifact's paths are relative to."""
    paths = [_search_path(pattern) for pattern in patterns]
    paths = [path for path in dict.fromkeys(paths) if not any(Path(other) in Path(path).parents for other in paths)]
    if len(paths) > 1:
        return Path(os.path.commonpath(paths))
    if len(files) == 1 and str(files[0]) == paths[0]:
        return files[0].parent
    return Path(paths[0])
