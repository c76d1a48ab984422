from __future__ import annotations

from pathlib import Path

import pytest
import wheelhouse
from fake_github import Hub
from publishing import client, publish_as

from rocm_wheels.errors import DataError
from rocm_wheels.publish import catalogue, directory
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.wheel import contents

CELL = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")


def read(hub: Hub) -> Catalogue:
    """Reads everything that is public."""
    public = [release for release in hub.releases.values() if not release["draft"]]
    return catalogue.from_releases(public, lambda asset: hub.content[asset["id"]], {})


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none is not a directory\nGive the one that holds the wheels"):
        directory.read(tmp_path / "none")


def test_a_release_that_lacks_a_part_keeps_no_other_from_the_index(dist: Path, hub: Hub) -> None:
    """A public file stays listed for lock files, but no page offers it."""
    publish_as(client(hub), "v1.0.0", dist, print)
    path = next(dist.glob("*.whl"))
    broken = hub.add_release("v0.9.0", draft=False)
    name = path.name.replace("cp31", "cp30")
    hub.add_asset(broken, name, b"x")
    result = read(hub)
    assert result.problems == (f"release v0.9.0: {name} is there without its .metadata",)
    (link,) = result.unverified
    assert (link.name, link.yanked, link.metadata_sha256) == (name, "it is not known whether it passed its tests", "")
    assert len(result.wheels) == 3
    hub.add_asset(broken, f"{name}.metadata", b"Name: other\nVersion: 2\n")
    hub.add_asset(broken, f"{name}.verdict.json", b"[" * 100_000)
    assert "is not JSON" in read(hub).problems[0]
    verdict = next(asset for asset in broken["assets"] if asset["name"].endswith(".verdict.json"))
    verdict["digest"] = f"sha256:{'0' * 64}"
    assert "came with other bytes than its digest 0000" in read(hub).problems[0]


def test_a_wheel_that_failed_is_not_offered(hub: Hub, tmp_path: Path) -> None:
    path = wheelhouse.write(tmp_path, CELL, ok=False)
    release = hub.add_release("v1.0.0", draft=False)
    for beside in (path, path.with_name(f"{path.name}.verdict.json")):
        hub.add_asset(release, beside.name, beside.read_bytes())
    hub.add_asset(release, f"{path.name}.metadata", contents.read(path).metadata)
    result = read(hub)
    assert (result.wheels, len(result.unverified)) == ((), 1)
    assert result.problems == (f"release v1.0.0: {path.name} did not pass its tests",)


def test_the_newest_version_counts_and_not_the_latest_date(hub: Hub, tmp_path: Path) -> None:
    """v1.0.1, a backport, is published after v1.1.0. Its build number is higher, and installers would take it."""
    for build, tag in enumerate(("v1.0.0", "v1.1.0", "v1.0.1")):
        wheelhouse.write(tmp_path / tag, CELL, payload=f"tag = {tag!r}\n", build=build)
        publish_as(client(hub), tag, tmp_path / tag, print)
    listed = list(hub.releases.values())
    for order in (listed, listed[::-1]):
        result = catalogue.from_releases(order, lambda asset: hub.content[asset["id"]], {})
        assert [wheel.release for wheel in catalogue.newest(result.wheels)] == ["v1.1.0"]
        newest = next(wheel.name for wheel in result.wheels if wheel.release == "v1.1.0")
        assert {wheel.release: wheel.yanked for wheel in result.wheels} == {
            "v1.0.0": None,
            "v1.1.0": None,
            "v1.0.1": f"{newest} of release v1.1.0 is newer",
        }


def test_the_same_name_with_other_bytes_is_reported(hub: Hub, tmp_path: Path) -> None:
    """An older pipeline published a name twice."""
    for tag in ("v1.0.0", "v1.1.0"):
        path = wheelhouse.write(tmp_path / tag, CELL, payload=f"tag = {tag!r}\n")
        release = hub.add_release(tag, draft=False)
        for beside in (path, path.with_name(f"{path.name}.verdict.json")):
            hub.add_asset(release, beside.name, beside.read_bytes())
        hub.add_asset(release, f"{path.name}.metadata", contents.read(path).metadata)
    result = read(hub)
    assert result.problems == (f"{path.name} has other bytes in release v1.0.0 than in v1.1.0",)
    assert [wheel.sha256 for wheel in result.wheels] == [contents.file_sha256(path)]


def test_candidates_yanked_wheels_and_those_of_others_give_way(hub: Hub, tmp_path: Path) -> None:
    built = []
    for build, tag in enumerate(("v1.0.0", "v1.1.0", "v1.2.0rc1")):
        built.append(wheelhouse.write(tmp_path / tag, CELL, payload=f"tag = {tag!r}\n", build=build).name)
        publish_as(client(hub), tag, tmp_path / tag, print)
    tools = hub.add_release("tools-1", draft=False)
    for other in ("tools-0.1-py3-none-any.whl", "flash_attn-2.8.3-py3-none-any.whl", "flash_attn_3-3.0.0.whl"):
        hub.add_asset(tools, other, b"x")

    def counts(yanked: dict[str, str]) -> tuple[str, str | None]:
        final = catalogue.final(hub.releases.values())
        result = catalogue.from_releases(final, lambda asset: hub.content[asset["id"]], yanked)
        assert (result.problems, result.interfaces, result.unverified) == ((), (), ())
        (wheel,) = catalogue.newest(result.wheels)
        return wheel.release, wheel.yanked

    assert counts({}) == ("v1.1.0", None)
    assert counts({built[1]: "bad"}) == ("v1.0.0", None)
    assert counts({built[1]: "bad", built[0]: "bad too"}) == ("v1.1.0", "bad")
