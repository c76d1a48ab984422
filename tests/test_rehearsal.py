"""Releases of a repository from the first one on, with the stand-in for GitHub (docs/notes/rehearsal.md has the
table).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import wheelhouse
from fake_github import Hub
from publishing import client, publish_as

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.publish import catalogue, github, index, release, yanks
from rocm_wheels.publish.home import Home
from rocm_wheels.wheel import verdict
from rocm_wheels.wheel.verdict import FAILED, GPU, PASSED

CELL = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
OTHER = wheelhouse.cell("2.8.3 3.12 2.6.0 6.2")
UNIVERSAL = Universal(flash_attn="2.8.3", python="3.10", backend="ck")
HOME = Home(url="https://owner.github.io/name/", repository="https://github.com/owner/name")


LIMITS = {60: 80, 3600: 500}  # content-creating requests, by GitHub's documentation


class Clock:
    """A clock for the client and the stand-in alike: waiting takes no time."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def sleep(self, seconds: float) -> None:
        self.hub.clock += seconds

    def time(self) -> float:
        return self.hub.now()

    monotonic = time


class Rehearsal:
    """One repository: its releases, its yanked.toml, and the site that would be rendered now."""

    def __init__(self, hub: Hub, root: Path) -> None:
        self.hub, self.root, self.marks = hub, root, root / "yanked.toml"
        self.marks.write_text("[wheels]\n[withdrawn]\n")

    def release(self, tag: str, *wheels: tuple[object, dict[str, object]]) -> list[str]:
        """Publishes. Returns the wheels with a label in the release."""
        dist = self.root / tag
        for claim, options in wheels:
            wheelhouse.write(dist, claim, **options)  # type: ignore[arg-type]
        publish_as(client(self.hub), tag, dist, lambda _: None)
        result = [each for each in self.hub.releases.values() if each["tag_name"] == tag]
        assert all(not each["draft"] for each in result)
        return sorted(
            asset["name"] for each in result for asset in each["assets"] if re.search(r"\+.*\.whl$", asset["name"])
        )

    def listed(self) -> dict[str, bool]:
        """Wheel -> whether it is yanked, over all pages of the site."""
        marks = (yanks.load(self.marks), yanks.withdrawn(self.marks))
        result = catalogue.from_releases(
            catalogue.final(self.hub.releases.values()), lambda asset: self.hub.content[asset["id"]], *marks
        )
        assert result.problems == ()
        site = self.root / "site"
        index.build(result, site, versions=versions.load(), home=HOME)
        pages = "".join(page.read_text() for page in site.rglob("simple/flash-attn/index.html"))
        anchors = re.findall(r"<a ([^>]*)>([^<]+\.whl)</a>", pages)
        return {name: "data-yanked" in attributes for attributes, name in anchors if "+" in name}


def test_releases_from_an_empty_repository_on(hub: Hub, tmp_path: Path) -> None:
    here = Rehearsal(hub, tmp_path)
    changed: dict[str, object] = {"payload": "changed = 1\n", "build": 1}
    first = here.release("v1.0.0", (UNIVERSAL, {}), (CELL, {}))
    assert len(first) == 2
    assert here.listed() == dict.fromkeys(first, False)
    universal, cell = sorted(first, key=lambda name: "torch" in name)

    (second,) = here.release("v1.1.0", (UNIVERSAL, {}), (CELL, changed))
    assert second == cell.replace("-cp311-", "-1-cp311-", 1), "the universal wheel stays in the first release"
    assert here.release("v1.2.0", (UNIVERSAL, {})) == [], "nothing is new: there is no release"
    assert here.listed() == dict.fromkeys((universal, cell, second), False)

    yanks.mark(second, "half as fast", here.marks)
    assert here.listed() == {universal: False, cell: False, second: True}
    yanks.mark(second, None, here.marks)
    yanks.withdraw([second], "dQ is wrong", here.marks)
    assert here.listed() == {universal: False, cell: False}, "its file stays in the release"
    assert any(asset["name"] == second for each in hub.releases.values() for asset in each["assets"])

    (post,) = here.release("v1.3.0", (Universal(flash_attn="2.8.3.post1", python="3.10", backend="ck"), {}))
    (backport,) = here.release("v1.0.1", (CELL, {"payload": "changed = 2\n", "build": 2}))
    assert backport.startswith(cell.partition("-cp311")[0] + "-2-")
    assert post in here.listed()

    before = dict(hub.stored)
    (one,) = here.release("v1.4.0", (OTHER, {}))
    sent = dict(hub.stored)
    assert here.release("v1.4.0", (OTHER, {})) == [one]
    assert hub.stored == sent != before, "the run again sends nothing"
    assert here.listed()[one] is False


def test_both_systems_through_a_strict_github(
    hub: Hub, tmp_path: Path, windows_launcher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With immutable releases, limits, listings that lag, starter uploads and another host for the bytes: a first
    release that is killed and run again, a backport, and a GPU that fails the next one.
    """
    monkeypatch.setattr(github, "time", Clock(hub))
    monkeypatch.setattr(release, "time", Clock(hub))
    monkeypatch.setattr(github, "BACKOFF_SECONDS", 1.0)
    hub.immutable, hub.lag, hub.limits = True, 2.0, LIMITS
    here = Rehearsal(hub, tmp_path)
    windows = {"platform": "win_amd64", "targets": ("gfx1030", "gfx1201"), "launcher": windows_launcher}
    both: list[tuple[object, dict[str, object]]] = [(UNIVERSAL, {}), (UNIVERSAL, windows)]

    hub.planned = ["starter", "late error", "error", "starter"]
    first = here.release("v1.1.0", *both, (CELL, {}))
    assert len(first) == 3
    assert hub.faults == {"starter": 2, "late error": 1, "error": 1}
    assert here.listed() == dict.fromkeys(first, False)
    sent = dict(hub.stored)
    assert here.release("v1.1.0", *both, (CELL, {})) == first
    assert hub.stored == sent, "run again, nothing is sent"
    (public,) = hub.releases.values()
    assert (public["immutable"], hub.latest) == (True, public["id"])

    changed = {"payload": "changed = 1\n", "build": 1}
    assert len(here.release("v1.0.1", (CELL, changed))) == 1
    assert hub.latest == public["id"], "a backport is not the latest release"

    dist = tmp_path / "v1.2.0"
    next_ = {"payload": "changed = 2\n", "build": 2}
    wheel = wheelhouse.write(dist, UNIVERSAL, **next_, device=wheelhouse.W7900)  # type: ignore[arg-type]
    report = verdict.read(wheel.with_name(f"{wheel.name}.verdict.json"))
    failed = replace(report.stages[GPU], status=FAILED, details={"devices": [wheelhouse.MI300X]})
    replace(report, stages={**report.stages, GPU: failed}).with_reports_of(report).write(wheel)
    with pytest.raises(DataError, match="did not pass its tests"):
        publish_as(client(hub), "v1.2.0", dist, lambda _: None)
    answered = replace(failed, status=PASSED)
    earlier = verdict.read(wheel.with_name(f"{wheel.name}.verdict.json"))
    replace(report, stages={**report.stages, GPU: answered}).with_reports_of(earlier).write(wheel)
    publish_as(client(hub), "v1.2.0", dist, lambda _: None)
    newest = hub.releases[hub.latest]
    assert newest["tag_name"] == "v1.2.0"
    assert "AMD Instinct MI300X (gfx942)" in newest["body"]
    assert "AMD Radeon PRO W7900 (gfx1100)" in newest["body"]
