"""A release published to the stand-in of GitHub."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_github import REPOSITORY, TOKEN, Hub

from rocm_wheels.publish import assets, github, release

TAG = "v1.2.3"


def environment(hub: Hub) -> dict[str, str]:
    return {"GITHUB_API_URL": hub.url, "GITHUB_TOKEN": TOKEN, "GITHUB_REPOSITORY": REPOSITORY, "GITHUB_SHA": "c0ffee"}


def arguments(dist: Path, *more: str) -> list[str]:
    return ["publish", "--tag", TAG, "--dist", str(dist), *more]


def expected(dist: Path) -> dict[str, str]:
    """name -> sha256 of every asset that the release of `dist` must hold."""
    found = {asset.name: asset.sha256 for asset in assets.collect(dist)[1]}
    return {**found, assets.SUMS: assets.sums(found).sha256}


def state(hub: Hub) -> dict[str, Any]:
    """All that a visitor of the release sees."""
    (found,) = hub.releases.values()
    names = [asset["name"] for asset in found["assets"]]
    assert len(names) == len(set(names))
    assert {asset["state"] for asset in found["assets"]} <= {"uploaded"}
    digests = {asset["name"]: hashlib.sha256(hub.content[asset["id"]]).hexdigest() for asset in found["assets"]}
    return {"tag": found["tag_name"], "draft": found["draft"], "body": found["body"], "assets": digests}


def silent(_: str) -> None:
    pass


def publish(hub: Hub, dist: Path, say: Callable[[str], None] = silent) -> None:
    api = github.GitHub(REPOSITORY, token=TOKEN, api_url=hub.url, say=say)
    release.publish(api, TAG, dist, index_url="https://owner.github.io/name/", say=say)
