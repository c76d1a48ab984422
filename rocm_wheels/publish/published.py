"""Lists what GitHub already has, so that a run builds only missing wheels and numbers them correctly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_wheels.errors import DataError
from rocm_wheels.wheel.numbering import REMEDY, PublicWheel

if TYPE_CHECKING:
    from rocm_wheels.publish.github import GitHub


def files(path: Path) -> list[str]:
    """Names of the files in a list that `published` has written. Raises DataError for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [str(name) for name in content["files"]]
    except OSError as error:
        raise DataError(f"--missing {path}: {error.strerror}", remedy=REMEDY) from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{path} does not describe a release: {error!r}",
            remedy=REMEDY,
        ) from error


def check_open(path: Path) -> None:
    """Raises DataError if the list belongs to an immutable release, because it takes no more files: a wheel built
    for it could not be published.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("immutable"):
        raise DataError(
            f"release {content['tag']} is immutable and lacks some of these wheels",
            remedy="Build them for a new tag; the index joins all releases.",
        )


def listing(api: GitHub, tag: str, commit: str) -> dict[str, Any]:
    """The valid files in the release of a tag, and all public wheels of the other releases.

    A wheel of the tag counts only with a test report of success, for these bytes and this commit.
    """
    from rocm_wheels.publish import catalogue

    good: list[str] = []
    immutable = False
    for release in api.releases():
        if release["tag_name"] != tag:
            continue
        immutable |= not release["draft"] and bool(release.get("immutable"))
        there = {asset["name"]: asset for asset in api.assets(release["id"]) if asset["state"] == "uploaded"}
        fields = {**release, "assets": list(there.values())}
        found = catalogue.from_releases([fields], lambda asset: api.download(asset["url"]), {})
        wheels = [wheel.name for wheel in found.wheels if wheel.verdict.commit == commit]
        good += [name for name in there if not name.endswith(".whl") or name in wheels]
        good += [each.name for each in found.interfaces]
    public = public_wheels(api, but=tag)
    return {
        "tag": tag,
        "commit": commit,
        "immutable": immutable,
        "files": sorted(good),
        "wheels": [vars(wheel) for wheel in sorted(public, key=lambda wheel: wheel.name)],
    }


def public_wheels(api: GitHub, *, but: str) -> list[PublicWheel]:
    """The wheels of all public releases except the release of that tag."""
    from rocm_wheels.publish import catalogue

    releases: list[Mapping[str, Any]] = [
        release for release in api.releases() if not release["draft"] and release["tag_name"] != but
    ]
    finals = {release["tag_name"] for release in catalogue.final(releases)}
    found = catalogue.from_releases(releases, lambda asset: api.download(asset["browser_download_url"]), {})
    tested: dict[str, str] = {}
    for wheel in found.wheels:
        tested.update(wheel.verdict.beside)
    contents = {wheel.name: wheel.verdict.contents for wheel in found.wheels} | tested
    return [
        PublicWheel(
            name=link.name,
            sha256=link.sha256,
            contents=contents.get(link.name, ""),
            final=link.release in finals,
        )
        for link in (*found.wheels, *found.interfaces, *found.unverified)
    ]
