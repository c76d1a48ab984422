"""The files that a release on GitHub has, so that a run builds only what is missing."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rocm_wheels.errors import DataError, MissingTool
from rocm_wheels.packages import setup


def files(release: str) -> list[str]:
    """Names of the wholly uploaded files of a release: its tag, or a file with GitHub's own JSON of it.

    A release that does not exist has none. DataError where a file describes no release; PublishFailed where GitHub
    cannot be asked.
    """
    path = Path(release)
    if not path.is_file():
        if path.suffix == ".json":
            raise DataError(f"--missing {release}: no such file", remedy="Name a file, or the tag of a release.")
        return _uploaded(listing(release))
    try:
        return _uploaded(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{release} does not describe a release: {error!r}",
            remedy="Make it with: gh api repos/OWNER/NAME/releases/tags/TAG",
        ) from error


def listing(tag: str) -> dict[str, Any]:
    """A release as GitHub describes it, with the name and the state of each file; without files if there is none.

    A draft is found among all releases: by its tag GitHub shows published ones alone. Raises as `files` does.
    """
    try:
        from rocm_wheels.publish.github import (
            GitHub,  # create_matrix.py asks GitHub for this alone, and runs without requests
        )
    except ModuleNotFoundError as error:
        remedy = f"{setup('release')} Or name a JSON file of the release instead of its tag."
        raise MissingTool(f"{error.name} is not installed", remedy=remedy) from None
    api = GitHub.from_environment(repository=None, say=partial(print, file=sys.stderr, flush=True), writes=False)
    assets = [
        {"name": asset["name"], "state": asset["state"]}
        for release in api.releases()
        if release["tag_name"] == tag
        for asset in api.assets(release["id"])
    ]
    return {"tag_name": tag, "assets": assets}


def _uploaded(content: Any) -> list[str]:
    """Of one release, a list of them, or a list of pages."""
    if isinstance(content, list):
        return [name for each in content for name in _uploaded(each)]
    return [asset["name"] for asset in content["assets"] if asset["state"] == "uploaded"]
