"""Helpers that publish a release to the stand-in for GitHub."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_github import REPOSITORY, TOKEN, Hub
from wheelhouse import COMMIT

from rocm_wheels.matrix import release_plan
from rocm_wheels.matrix.release_plan import FILE
from rocm_wheels.publish import assets, github, plans, publishing

TAG = "v1.2.3"


def environment(hub: Hub) -> dict[str, str]:
    """The environment of a run on a laptop or, with another GITHUB_REF, of a workflow."""
    names = {"GITHUB_API_URL": hub.url, "GITHUB_TOKEN": TOKEN, "GITHUB_REPOSITORY": REPOSITORY, "GITHUB_SHA": COMMIT}
    return names | {"GITHUB_REF": ""}


def arguments(dist: Path, *more: str) -> list[str]:
    return ["publish", "--tag", TAG, "--dist", str(dist), *more]


def expected(*dists: Path) -> dict[str, str]:
    """name -> sha256 of every asset that the release of these directories must hold."""
    plan = release_plan.ReleasePlan(tag=TAG, commit=COMMIT, wheels=())
    result: dict[str, str] = {}
    for dist in dists:
        directory, wanted = assets.collect(dist)
        plan = plan.joined(plans.of_directory(directory, TAG, COMMIT), public=True)
        result |= {asset.name: asset.sha256 for asset in wanted}
    result[FILE] = assets.of_bytes(FILE, plan.as_json().encode(), final=False).sha256
    return {**result, assets.SUMS: assets.sums(result).sha256}


def write_plan(directory: Path, dist: Path, tag: str = TAG) -> Path:
    """Writes the plan of a release that holds the wheels of `dist`."""
    path = directory / "plan.json"
    path.write_text(plans.of_directory(assets.collect(dist)[0], tag, COMMIT).as_json(), encoding="utf-8")
    return path


def state(hub: Hub) -> dict[str, Any]:
    """Everything that a visitor of the release sees."""
    (result,) = hub.releases.values()
    names = [asset["name"] for asset in result["assets"]]
    assert len(names) == len(set(names))
    assert {asset["state"] for asset in result["assets"]} <= {"uploaded"}
    digests = {asset["name"]: hashlib.sha256(hub.content[asset["id"]]).hexdigest() for asset in result["assets"]}
    return {"tag": result["tag_name"], "draft": result["draft"], "body": result["body"], "assets": digests}


def silent(_: str) -> None:
    pass


def client(hub: Hub, say: Callable[[str], None] = silent) -> github.GitHub:
    return github.GitHub(REPOSITORY, token=TOKEN, api_url=hub.url, say=say)


def publish(hub: Hub, dist: Path, say: Callable[[str], None] = silent) -> None:
    publish_as(client(hub, say), TAG, dist, say)


def publish_as(api: github.GitHub, tag: str, dist: Path, say: Callable[[str], None], commit: str = COMMIT) -> str:
    return publishing.publish(api, tag, dist, commit=commit, index_url="https://owner.github.io/name/", say=say)
