"""The files that a release on GitHub has, so that a run builds only what is missing. Standard library only."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rocm_wheels.errors import DataError

_SECONDS = 30
_PAGE = 100


def files(release: str) -> list[str]:
    """Names of the wholly uploaded files of a release: its tag, or a file with GitHub's own JSON of it.

    A release that does not exist has none. DataError where GitHub cannot be asked or answers something else.
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

    A draft is found among all releases: by its tag GitHub shows published ones alone.
    """
    repository = os.environ.get("GITHUB_REPOSITORY")
    if not repository:
        raise DataError(f"GITHUB_REPOSITORY is not set, so it is not known whose {tag}", remedy="Set it to OWNER/NAME.")
    assets = [
        {"name": asset["name"], "state": asset["state"]}
        for release in _pages(f"repos/{repository}/releases")
        if release["tag_name"] == tag
        for asset in _pages(f"repos/{repository}/releases/{release['id']}/assets")
    ]
    return {"tag_name": tag, "assets": assets}


def _uploaded(content: Any) -> list[str]:
    return [asset["name"] for each in _flat(content) for asset in each["assets"] if asset["state"] == "uploaded"]


def _pages(path: str) -> Iterator[dict[str, Any]]:
    page = 0
    while True:
        page += 1
        entries = _get(f"{path}?per_page={_PAGE}&page={page}")
        yield from entries
        if len(entries) < _PAGE:
            return


def _get(path: str) -> list[dict[str, Any]]:
    url = f"{os.environ.get('GITHUB_API_URL', 'https://api.github.com')}/{path}"
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"GITHUB_API_URL: {url} is no web address")
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.github+json"})
    if token := os.environ.get("GITHUB_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            found: list[dict[str, Any]] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise DataError(
            f"{url} answered {error.code}", remedy="Check GITHUB_REPOSITORY and GITHUB_TOKEN, and try again."
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{url}: {error}", remedy="Try again, or name a JSON file instead.") from error


def _flat(content: Any) -> Iterator[Any]:
    """One release, a list of them, or a list of pages."""
    if isinstance(content, list):
        for entry in content:
            yield from _flat(entry)
    else:
        yield content
