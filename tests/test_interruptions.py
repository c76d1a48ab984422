from __future__ import annotations

import copy
import random
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_github
import kills
import pytest
import requests
import wheelhouse
from fake_github import Hub
from publishing import TAG, client, expected, publish, publish_as, state

from rocm_wheels.errors import PublishFailed, RocmWheelsError
from rocm_wheels.publish import assets, github, release
from rocm_wheels.wheel import contents


def test_assets_without_a_digest_are_read_back(hub: Hub, dist: Path) -> None:
    hub.digests = False
    publish(hub, dist)
    (result,) = hub.releases.values()
    broken = next(asset for asset in result["assets"] if asset["name"].endswith(".whl"))
    hub.content[broken["id"]] = b"x" * broken["size"]
    with pytest.raises(PublishFailed, match="is published with other content\nA published file never changes"):
        publish(hub, dist)


@pytest.mark.parametrize("digests", [True, False])
def test_a_corrupt_upload_of_the_right_size_is_sent_again(hub: Hub, dist: Path, digests: bool) -> None:
    hub.digests, hub.corrupt = digests, True
    publish(hub, dist)
    assert state(hub)["assets"] == expected(dist)
    (result,) = hub.releases.values()
    result["draft"] = True
    broken = next(asset for asset in result["assets"] if asset["name"].endswith(".whl"))
    hub.content[broken["id"]] = b"x" * broken["size"]
    if not digests:
        publish(hub, dist)
        assert state(hub)["assets"] == expected(dist)


def test_gives_up_in_the_end_and_says_how_to_continue(hub: Hub, dist: Path) -> None:
    hub.rate = 1.0
    with pytest.raises(RocmWheelsError, match=r"Run (it|the same command) again: it goes on from what is there\."):
        publish(hub, dist)


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2))])
def test_faults_of_github_change_nothing(hub: Hub, dist: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(github, "ATTEMPTS", 12)
    hub.random = random.Random(fake_github.seed("faults", seed))
    hub.rate = 0.3
    publish(hub, dist)
    assert sum(hub.faults.values()) >= 5
    kills.check_once(hub, dist)


def test_a_run_killed_at_any_point_and_repeated_gives_the_same_result(
    dist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample; `python tests/support/kills.py --count 100` kills more often."""
    monkeypatch.setattr(github, "BACKOFF_SECONDS", kills.BACKOFF)
    monkeypatch.setattr(github, "TIMEOUT_SECONDS", kills.TIMEOUT)
    monkeypatch.setattr(github, "ATTEMPTS", kills.ATTEMPTS)
    kills.undisturbed(dist)
    jobs = [(kills.kill_publish, seed) for seed in range(8)] + [(kills.kill_index, seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        counted: Counter[str] = sum(pool.map(lambda job: job[0](dist, job[1]), jobs), Counter())
    assert counted["publish: killed"] >= 6
    assert counted["index: killed"] == 2
    for kind in ("listings behind", "clock off by two hours", "no digests", "truncated", "error"):
        assert counted[kind], f"the sample has no {kind}"


def test_a_rate_limit_is_waited_for_by_githubs_clock(hub: Hub) -> None:
    """The limit resets at a time of GitHub's clock. By this machine's clock, two hours behind, the run would give
    up.
    """
    response = requests.Response()
    response.status_code = 403
    response.headers.update({"X-RateLimit-Remaining": "0", "Date": "Tue, 24 Nov 2026 12:00:00 GMT"})
    response.headers["X-RateLimit-Reset"] = str(1795521600 + 30)
    assert github._rate_limit(response) == 31.0
    hub.clock, hub.rate = 7200.0, 0.5
    hub.random = random.Random(1)
    assert list(client(hub).releases()) == []


def test_a_file_that_only_an_old_listing_calls_unfinished_is_not_deleted(hub: Hub, dist: Path) -> None:
    """A listing may be seconds old: the asset itself is requested before it is deleted."""
    publish(hub, dist)
    (result,) = hub.releases.values()
    before = state(hub)
    hub.history = [(0.0, copy.deepcopy([result]))]
    (old,) = hub.history[0][1]
    for asset in old["assets"][:2]:  # the plan, and a file of a wheel
        asset["state"] = "starter"
    old["assets"][-1]["name"] += ".next"
    hub.lag = 0.001
    publish(hub, dist)
    hub.lag = 0.0
    assert state(hub) == before


def test_a_release_that_another_run_made_public_meanwhile_loses_nothing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs began with the draft. This run has other bytes, and a stale answer that says `draft`."""
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
    theirs = wheelhouse.write(tmp_path / "theirs", cell)
    ours = wheelhouse.write(tmp_path / "ours", cell)
    with zipfile.ZipFile(ours, "a") as archive:
        archive.comment = b"the same contents in other bytes"
    wheelhouse.write_verdict(ours)
    only = release.Release.without_leftovers

    def meanwhile(self: release.Release) -> release.Listing:
        monkeypatch.setattr(release.Release, "without_leftovers", only)
        before = only(self)
        publish(hub, tmp_path / "theirs")
        return before

    monkeypatch.setattr(release.Release, "without_leftovers", meanwhile)
    with pytest.raises(PublishFailed, match=r"was made public by another run meanwhile\nRun the same"):
        publish(hub, tmp_path / "ours")
    (public,) = (each for each in state(hub)["assets"].items() if each[0].endswith(".whl"))
    assert public == (theirs.name, contents.file_sha256(theirs))
    publish(hub, tmp_path / "ours")
    assert state(hub)["assets"] == expected(tmp_path / "theirs"), "the one that is public stays, with its verdict"


@pytest.mark.parametrize("same", [True, False])
def test_two_runs_at_once_end_well(hub: Hub, tmp_path: Path, same: bool) -> None:
    """With equal bytes both succeed. With other bytes one may be refused, and the public files are consistent."""
    runs = []
    for name in ("one", "two"):
        wheelhouse.write(tmp_path / name, wheelhouse.cell("2.8.3 3.12 2.5.1 6.2"))
        path = wheelhouse.write(tmp_path / name, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
        if not same:
            with zipfile.ZipFile(path, "a") as archive:
                archive.comment = name.encode()
            wheelhouse.write_verdict(path)
        runs.append(tmp_path / name)

    def run(dist: Path) -> str:
        try:
            return publish_as(client(hub), TAG, dist, lambda _: None)
        except PublishFailed as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, runs))
    if same:
        assert all(result.startswith("http") for result in results), results
    for dist in runs:
        publish(hub, dist)
    assert state(hub)["assets"] in [expected(dist) for dist in runs]


def test_sums_of_a_public_release_are_kept_until_they_are_replaced(
    hub: Hub, dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, dist)
    wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.14.0 7.2"))

    class Killed(BaseException):
        pass

    for method in ("delete_asset", "rename_asset"):
        with monkeypatch.context() as patch:

            def killed(*_: object) -> None:
                raise Killed

            patch.setattr(github.GitHub, method, killed)
            with pytest.raises(Killed):
                publish(hub, tmp_path)
        names = {asset["name"] for release in hub.releases.values() for asset in release["assets"]}
        assert names & {assets.SUMS, f"{assets.SUMS}.next"}
    publish(hub, tmp_path)
    assert state(hub)["assets"] == expected(dist, tmp_path)
