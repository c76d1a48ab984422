from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_github
import pytest
import wheelhouse
from sites import HOME

from rocm_wheels.errors import DataError
from rocm_wheels.publish import catalogue, github, release


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none is not a directory\nGive the one that holds the wheels"):
        catalogue.from_directory(tmp_path / "none")


def test_a_release_that_lacks_a_part_is_not_indexed(dist: Path) -> None:
    path = next(dist.glob("*.whl"))
    asset = {
        "name": path.name,
        "state": "uploaded",
        "size": 1,
        "digest": None,
        "browser_download_url": f"https://x/{path.name}",
    }
    content: dict[str, Any] = {"tag_name": "v1", "id": 1, "published_at": "2026-01-01", "assets": [asset]}
    with pytest.raises(
        DataError, match=r"release v1 has flash_attn.* without its \.verdict\.json\nRun `publish --tag v1`"
    ):
        catalogue.from_releases([content], lambda _: b"")
    beside = {**asset, "name": f"{path.name}.verdict.json", "digest": f"sha256:{'0' * 64}"}
    content["assets"] = [asset, beside]
    with pytest.raises(DataError, match="came with other bytes than its digest 0000"):
        catalogue.from_releases([content], lambda _: b"{}")


def test_the_newest_release_counts(tmp_path: Path) -> None:
    """Of a wheel that was released again, as of all others."""
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
    with fake_github.serve(fake_github.Hub()) as hub:
        api = github.GitHub(fake_github.REPOSITORY, token=fake_github.TOKEN, api_url=hub.url, say=print)
        for tag in ("v1", "v2"):
            wheelhouse.write(tmp_path / tag, cell, payload=f"tag = {tag!r}\n")
            release.publish(api, tag, tmp_path / tag, index_url=HOME.url, say=print)
        listed = list(hub.releases.values())
        for order in (listed, listed[::-1]):
            (wheel,) = catalogue.from_releases(order, lambda asset: api.download(asset["url"]))
            assert wheel.release == "v2"
            assert wheel.sha256 == catalogue.file_sha256(tmp_path / "v2" / wheel.name)


def test_candidates_yanked_wheels_and_those_of_others_give_way(tmp_path: Path) -> None:
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")

    def counts() -> tuple[str, str | None, int]:
        final = catalogue.final(hub.releases.values())
        (wheel,) = catalogue.from_releases(final, fetch)
        return wheel.release, wheel.yanked, len(catalogue.interfaces_of(final, fetch))

    def fetch(asset: Mapping[str, Any]) -> bytes:
        return api.download(asset["browser_download_url"])

    with fake_github.serve(fake_github.Hub()) as hub:
        api = github.GitHub(fake_github.REPOSITORY, token=fake_github.TOKEN, api_url=hub.url, say=print)
        for tag in ("v1.0.0", "v1.1.0", "v1.2.0rc1"):
            name = wheelhouse.write(tmp_path / tag, cell, payload=f"tag = {tag!r}\n").name
            release.publish(api, tag, tmp_path / tag, index_url=HOME.url, say=print)
        tools = hub.add_release("tools-1", draft=False)
        for other in ("tools-0.1-py3-none-any.whl", "flash_attn-2.8.3-py3-none-any.whl", "flash_attn_3-3.0.0.whl"):
            hub.add_asset(tools, other, b"x")
        assert counts() == ("v1.1.0", None, 0)
        release.yank(api, "v1.1.0", name, "bad", say=print)
        assert counts() == ("v1.0.0", None, 0)
        release.yank(api, "v1.0.0", name, "bad too", say=print)
        assert counts() == ("v1.1.0", "bad", 0)
