from __future__ import annotations

import copy
import random
import re
import shutil
import subprocess
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_github
import fake_parts
import kills
import pytest
import requests
import wheelhouse
from fake_github import REPOSITORY, TOKEN, Hub
from publishing import TAG, arguments, client, expected, publish, publish_as, state
from wheelhouse import COMMIT

from rocm_wheels import cli
from rocm_wheels.errors import DataError, PublishFailed, RocmWheelsError
from rocm_wheels.matrix import versions
from rocm_wheels.paths import ROOT
from rocm_wheels.publish import assets, catalogue, github, published, release, yanks
from rocm_wheels.wheel import assemble, contents, numbering


def test_publishes_everything_and_says_so(hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(dist)) == 0
    printed = capsys.readouterr()
    found = state(hub)
    assert found["assets"] == expected(dist)
    assert (found["tag"], found["draft"]) == (TAG, False)
    assert "* Faster <kernels>" in found["body"]
    assert "pip install" in found["body"]
    assert "[10/10] kernels-triton-gfx942.zip" in printed.out
    assert f"published: {hub.url}/{REPOSITORY}/releases/{TAG}, 3 wheels of 3 in it" in printed.out
    assert TOKEN not in printed.out + printed.err


def test_sums_are_what_sha256sum_checks(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    (found,) = hub.releases.values()
    for asset in found["assets"]:
        (tmp_path / asset["name"]).write_bytes(hub.content[asset["id"]])
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", assets.SUMS], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.count(": OK") == 10


def test_a_second_run_sends_nothing(hub: Hub, dist: Path) -> None:
    publish(hub, dist)
    before, stored = state(hub), dict(hub.stored)
    said: list[str] = []
    publish(hub, dist, said.append)
    assert (state(hub), hub.stored) == (before, stored)
    assert [line for line in said if "already there" in line] == ["  already there"] * 10 + [
        f"{assets.SUMS}\n  already there"
    ]


def test_wheels_added_later_keep_the_others(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    later = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.14.0 7.2"), device=wheelhouse.MI300X)
    publish(hub, tmp_path)
    found = state(hub)
    both = {asset.name: asset.sha256 for place in (dist, tmp_path) for asset in assets.collect(place)[1]}
    assert found["assets"] == {**both, assets.SUMS: assets.sums(both).sha256}
    assert "1 of 4 passed their tests on an AMD GPU" in found["body"]
    assert later.name in found["body"]


def test_a_published_wheel_never_changes(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    before = state(hub)
    wheelhouse.write(tmp_path, wheelhouse.cell("2.6.3 3.11 2.5.1 6.2"))
    wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), payload="changed = 1\n")
    with pytest.raises(
        PublishFailed, match=r"with other contents, of commit c0ffee0+\nBuild with --published: changed contents get"
    ):
        publish(hub, tmp_path)
    assert state(hub) == before, "neither its verdict nor a wheel that came before it"


def test_the_verdict_of_a_published_wheel_is_about_that_wheel(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    (found,) = hub.releases.values()
    other = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), payload="changed = 1\n")
    name = f"{other.name}.verdict.json"
    found["assets"] = [asset for asset in found["assets"] if asset["name"] != name]
    hub.add_asset(found, name, (tmp_path / name).read_bytes())
    broken = catalogue.from_releases([found], lambda asset: hub.content[asset["id"]], {})
    assert broken.problems == (f"release {TAG}: the verdict beside {other.name} is about another file of that name",)
    assert [(link.name, link.yanked) for link in broken.unverified] == [
        (other.name, "it is not known whether it passed its tests")
    ]
    assert len(broken.wheels) == 2, "the others are as they were"
    publish(hub, dist)  # sends the right one
    assert state(hub)["assets"] == expected(dist)


def test_a_wheel_of_a_draft_is_replaced(hub: Hub, tmp_path: Path) -> None:
    draft = hub.add_release(TAG, target_commitish=COMMIT)
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    hub.add_asset(draft, path.name, b"an earlier build")
    publish(hub, tmp_path)
    assert state(hub)["assets"] == expected(tmp_path)


def test_leftovers_of_broken_runs_go(hub: Hub, dist: Path) -> None:
    first, second = (hub.add_release(TAG, target_commitish=COMMIT) for _ in range(2))
    hub.add_asset(first, next(iter(expected(dist))), b"", "starter")
    hub.add_asset(first, "foreign.bin", b"", "starter")
    said: list[str] = []
    publish(hub, dist, said.append)
    assert state(hub)["assets"] == expected(dist)
    assert f"draft {second['id']} of {TAG} is there a second time and is deleted" in said
    assert "  foreign.bin: an unfinished upload is deleted" in said


def test_assets_without_a_digest_are_read_back(hub: Hub, dist: Path) -> None:
    hub.digests = False
    publish(hub, dist)
    (found,) = hub.releases.values()
    broken = next(asset for asset in found["assets"] if asset["name"].endswith(".whl"))
    hub.content[broken["id"]] = b"x" * broken["size"]
    with pytest.raises(PublishFailed, match="is published with other content\nA published file never changes"):
        publish(hub, dist)


@pytest.mark.parametrize("digests", [True, False])
def test_a_corrupt_upload_of_the_right_size_is_sent_again(hub: Hub, dist: Path, digests: bool) -> None:
    hub.digests, hub.corrupt = digests, True
    publish(hub, dist)
    assert state(hub)["assets"] == expected(dist)
    (found,) = hub.releases.values()
    found["draft"] = True
    broken = next(asset for asset in found["assets"] if asset["name"].endswith(".whl"))
    hub.content[broken["id"]] = b"x" * broken["size"]
    if not digests:
        publish(hub, dist)
        assert state(hub)["assets"] == expected(dist)


def test_draft_only(hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert cli.main(arguments(dist, "--draft-only")) == 0
        out, err = capsys.readouterr()
        assert out == f"commit={COMMIT}\n"
        assert f"draft of {TAG}: " in err
    assert state(hub) == {"tag": TAG, "draft": True, "body": "", "assets": {}}


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2", "not a tag!", "v1.2.3\n", ""])
def test_a_tag_is_checked_before_anything_is_made(
    hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str], tag: str
) -> None:
    for more in ([], ["--draft-only"], ["--dry-run"]):
        with pytest.raises(SystemExit):
            cli.main(["publish", "--tag", tag, "--dist", str(dist), *more])
        assert f"{tag!r} is not a release tag such as v1.2.3 or v1.2.3rc1" in capsys.readouterr().err
    assert hub.requests == 0


@pytest.mark.parametrize(("tag", "candidate"), [("v1.2.3rc1", True), ("v1.2.3", False), ("v1.2.3.post1", False)])
def test_a_candidate_is_a_pre_release(hub: Hub, dist: Path, tag: str, candidate: bool) -> None:
    command = ["publish", "--tag", tag, "--dist", str(dist)]
    assert cli.main([*command, "--draft-only"]) == 0
    (found,) = hub.releases.values()
    assert (found["draft"], found["prerelease"]) == (True, candidate)
    found["prerelease"] = not candidate  # as a draft that was made by hand
    assert cli.main(command) == 0
    assert (found["draft"], found["prerelease"]) == (False, candidate)
    assert ("the package index leads nobody to it" in found["body"]) is candidate
    assert ("--extra-index-url" in found["body"]) is not candidate
    urls = re.findall(r'pip install "(http[^"]+)"', found["body"])
    assert len(urls) == candidate
    assert set(urls) <= {asset["browser_download_url"] for asset in found["assets"]}, "those of the public release"


def test_dry_run_asks_github_nothing(hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(dist, "--dry-run")) == 0
    printed = capsys.readouterr().out
    assert hub.requests == 0
    own = {name: digest for name, digest in expected(dist).items() if not name.endswith((".metadata", ".verdict.json"))}
    lines = {line.split()[3]: line for line in printed.splitlines() if re.match("[0-9a-f]{64} ", line)}
    assert {name: line.split()[0] for name, line in lines.items()} == own
    assert all(line.endswith(".whl with .metadata, .verdict.json") for name, line in lines.items() if ".whl" in name)
    assert "would hold these 11 assets" in printed
    assert "nothing was sent" in printed


def test_the_wheel_of_flash_attn_3_goes_along(hub: Hub, tmp_path: Path) -> None:
    """The verdict of a wheel with its label says that it was tested."""
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2", "triton")
    path, fa3 = wheelhouse.write_with_fa3(tmp_path, cell)
    publish(hub, tmp_path)
    found = state(hub)
    assert found["assets"][fa3.name] == contents.file_sha256(fa3)
    assert f"{fa3.name}.metadata" in found["assets"]
    (published,) = hub.releases.values()
    (sums,) = (hub.content[asset["id"]] for asset in published["assets"] if asset["name"] == assets.SUMS)
    assert fa3.name in sums.decode()
    wheelhouse.write_verdict(path)
    with pytest.raises(PublishFailed, match=f"no verdict says that {re.escape(fa3.name)} was tested\nTest it with"):
        publish(hub, tmp_path)


def test_wheels_are_added_to_a_release_with_a_wheel_of_flash_attn_3(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built again with the wheel of another Python: later, then by a newer hatchling."""
    built: list[Path] = []
    said: list[str] = []
    pythons = ("3.10", "3.11", "3.12")
    for python in pythons:
        if python == "3.12":
            newer = tmp_path / "site/sitecustomize.py"
            newer.parent.mkdir()
            newer.write_text("import hatchling.__about__\nhatchling.__about__.__version__ = '99.0'\n")
            monkeypatch.setenv("PYTHONPATH", str(newer.parent))
        fa3 = assemble.assemble_interface(
            versions.load().interfaces["flash_attn_3"], fake_parts.plan("gfx942", python=python), tmp_path / python
        )
        wheelhouse.write(tmp_path / python, wheelhouse.cell(f"2.8.3 {python} 2.5.1 6.2"), beside=[fa3])
        built.append(fa3)
        publish(hub, tmp_path / python, said.append)
    first, later, other = built
    assert first.read_bytes() == later.read_bytes() != other.read_bytes()
    assert contents.digest(first) == contents.digest(other)
    assert first.name == other.name
    assert [line for line in said if "stays" in line] == 2 * [f"{first.name}: the one that is public stays"]
    found = state(hub)["assets"]
    assert set(found) == {asset.name for each in pythons for asset in assets.collect(tmp_path / each)[1]} | {
        assets.SUMS
    }
    assert found[first.name] == contents.file_sha256(first)


def test_a_wheel_of_flash_attn_3_in_a_draft_is_replaced(hub: Hub, tmp_path: Path) -> None:
    _, fa3 = wheelhouse.write_with_fa3(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    hub.add_asset(hub.add_release(TAG, target_commitish=COMMIT), fa3.name, b"an earlier build")
    publish(hub, tmp_path)
    assert state(hub)["assets"] == expected(tmp_path)


def test_a_yank_is_the_indexs_and_changes_no_release(
    hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(hub, dist)
    before = state(hub)
    wheel = next(path.name for path in dist.glob("*.whl"))
    monkeypatch.setattr(yanks, "DATA_FILE", ROOT / "build" / "yanked-by-the-tests.toml")
    file = tmp_path / "yanked.toml"
    shutil.copy(ROOT / "rocm_wheels/publish/yanked.toml", file)
    assert yanks.load(file) == {}
    yanks.mark(wheel, 'wrong "dQ"', file)
    assert yanks.load(file) == {wheel: 'wrong "dQ"'}
    monkeypatch.setattr(yanks, "load", lambda: {wheel: "wrong dQ"})
    assert cli.main(["notes", "--tag", TAG, "--update"]) == 0
    assert "**yanked**: wrong dQ" in state(hub)["body"]
    assert state(hub)["assets"] == before["assets"]
    assert cli.main(["notes", "--tag", "v9", "--update"]) == PublishFailed.exit_code
    assert "there is no release v9" in capsys.readouterr().err
    monkeypatch.undo()
    yanks.mark(wheel, None, file)
    assert yanks.load(file) == {}
    with pytest.raises(DataError, match="is not yanked"):
        yanks.mark(wheel, None, file)
    with pytest.raises(DataError, match="is not the file name of one of these wheels"):
        yanks.mark("einops-0.8.2-py3-none-any.whl", "x", file)
    assert cli.main(["yank", wheel, "--undo"]) == DataError.exit_code


def test_gives_up_in_the_end_and_says_how_to_go_on(hub: Hub, dist: Path) -> None:
    hub.rate = 1.0
    with pytest.raises(RocmWheelsError, match=r"Run (it|the same command) again: it goes on from what is there\."):
        publish(hub, dist)


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_github_change_nothing(hub: Hub, dist: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(github, "ATTEMPTS", 12)
    hub.random = random.Random(fake_github.seed("faults", seed))
    hub.rate = 0.3
    publish(hub, dist)
    assert sum(hub.faults.values()) >= 5
    kills.check_once(hub, dist)


def test_killed_at_any_point_and_run_again_it_ends_the_same(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """The reset is a time of GitHub's clock: with this machine's, two hours behind, the run would give up."""
    response = requests.Response()
    response.status_code = 403
    response.headers.update({"X-RateLimit-Remaining": "0", "Date": "Tue, 24 Nov 2026 12:00:00 GMT"})
    response.headers["X-RateLimit-Reset"] = str(1795521600 + 30)
    assert github._rate_limit(response) == 31.0
    hub.clock, hub.rate = 7200.0, 0.5
    hub.random = random.Random(1)
    assert list(client(hub).releases()) == []


def test_a_file_that_only_an_old_listing_calls_unfinished_is_not_deleted(hub: Hub, dist: Path) -> None:
    """A listing may be seconds old: the asset itself is looked at before it goes."""
    publish(hub, dist)
    (found,) = hub.releases.values()
    before = state(hub)
    hub.history = [(0.0, copy.deepcopy([found]))]
    (old,) = hub.history[0][1]
    old["assets"][0]["state"] = "starter"
    old["assets"][-1]["name"] += ".next"
    hub.lag = 0.001
    publish(hub, dist)
    hub.lag = 0.0
    assert state(hub) == before


OTHER = "beef" + 36 * "0"


def test_the_release_is_of_one_commit(hub: Hub, dist: Path, tmp_path: Path) -> None:
    """The draft, its tag, and every wheel."""
    publish(hub, dist)
    (found,) = hub.releases.values()
    assert (found["target_commitish"], hub.tags) == (COMMIT, {TAG: COMMIT})
    wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.14.0 7.2"), commit=OTHER)
    before = state(hub)
    with pytest.raises(PublishFailed, match=f"was built from commit {OTHER}, the release is of {COMMIT}"):
        publish(hub, tmp_path)
    with pytest.raises(PublishFailed, match=f"the tag {TAG} names commit {COMMIT}, this release is of {OTHER}"):
        publish_as(client(hub), TAG, tmp_path, print, OTHER)
    assert state(hub) == before


def test_an_annotated_tag_names_the_commit_of_its_object(hub: Hub) -> None:
    hub.tags |= {TAG: f"tag:{OTHER}", f"object {OTHER}": COMMIT}
    assert client(hub).tag_commit(TAG) == COMMIT
    assert client(hub).tag_commit("v9.9.9") is None


def test_a_draft_of_another_commit_is_not_mixed_with_this_one(hub: Hub, dist: Path) -> None:
    """The tag was moved between a run that was killed and the next one."""
    draft = hub.add_release(TAG, target_commitish=OTHER)
    publish(hub, dist)  # it was empty
    assert state(hub)["draft"] is False
    assert draft["target_commitish"] == COMMIT
    hub.releases.clear()
    hub.tags.clear()
    hub.add_asset(hub.add_release(TAG, target_commitish=OTHER), "x.zip", b"x")
    with pytest.raises(PublishFailed, match=f"was begun at {OTHER} and holds files, this release is of {COMMIT}"):
        publish(hub, dist)


def test_two_drafts_with_files_are_left_alone(hub: Hub, dist: Path) -> None:
    for _ in range(2):
        hub.add_asset(hub.add_release(TAG, target_commitish=COMMIT), "x.zip", b"x")
    with pytest.raises(PublishFailed, match=r"the drafts \d+ and \d+ of v1\.2\.3 both hold files\nDelete"):
        publish(hub, dist)
    assert [len(release["assets"]) for release in hub.releases.values()] == [1, 1]


def test_contents_that_are_public_are_not_published_again(hub: Hub, dist: Path, tmp_path: Path) -> None:
    """Built at another commit a wheel has other bytes; its contents tell that it is the same."""
    publish(hub, dist)
    said: list[str] = []
    for text, backend in (("2.8.3 3.11 2.5.1 6.2", "triton"), ("2.8.3 3.12 2.5.1 6.2", "ck")):
        wheelhouse.write(tmp_path, wheelhouse.cell(text, backend), commit=OTHER)
    new = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.14.0 7.2"), commit=OTHER)
    publish_as(client(hub), "v1.3.0", tmp_path, said.append, OTHER)
    (later,) = (release for release in hub.releases.values() if release["tag_name"] == "v1.3.0")
    assert sorted(asset["name"] for asset in later["assets"] if asset["name"].endswith(".whl")) == [new.name]
    assert sum("unchanged, it stays in the release that has it" in line for line in said) == 2
    assert sum(count for name, count in hub.stored.items() if name.endswith(".whl")) == 4


def test_a_release_without_anything_new_is_not_made(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    before = state(hub)
    wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), commit=OTHER)
    said: list[str] = []
    assert publish_as(client(hub), "v1.3.0", tmp_path, said.append, OTHER) == ""
    assert said[-1] == "nothing is new since the last release: v1.3.0 needs no wheels, and no release"
    assert state(hub) == before, "no empty draft stays"


def test_changed_contents_need_another_build_number(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
    changed = wheelhouse.write(tmp_path, cell, payload="changed = 1\n", commit=OTHER)
    with pytest.raises(PublishFailed, match="is published with other content\nBuild with --published"):
        publish_as(client(hub), "v1.3.0", tmp_path, print, OTHER)
    public = published.public_wheels(client(hub), but="v1.3.0")
    changed.with_name(f"{changed.name}.verdict.json").unlink()
    numbered = numbering.assign(changed, public)
    assert numbered.name == changed.name.replace("-cp311-cp311-", "-1-cp311-cp311-")
    wheelhouse.write_verdict(numbered, commit=OTHER)
    publish_as(client(hub), "v1.3.0", tmp_path, print, OTHER)
    found = catalogue.from_releases(list(hub.releases.values()), lambda asset: hub.content[asset["id"]], {})
    assert found.problems == ()
    both = [wheel.name for wheel in found.wheels if (wheel.python, wheel.torch) == ("3.11", "2.5")]
    assert both == [numbered.name, changed.name], "what was ever public stays listed"
    assert [wheel.name for wheel in catalogue.newest(found.wheels) if wheel.name in both] == [numbered.name]


def test_a_candidates_wheels_are_published_in_the_release(hub: Hub, dist: Path) -> None:
    """The index leads nobody to a candidate: a release has its wheels, byte for byte the same."""
    publish_as(client(hub), "v1.2.3rc1", dist, print)
    publish(hub, dist)
    assert [len(release["assets"]) for release in hub.releases.values()] == [len(expected(dist))] * 2


def test_a_release_that_another_run_made_public_meanwhile_loses_nothing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both began with the draft; this run has other bytes, and a stale answer that says `draft`."""
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
    """With equal bytes both succeed. With others one may be refused, and what is public is whole."""
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


def test_sums_of_a_public_release_stay_until_their_successor_is_there(
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
    both = {asset.name: asset.sha256 for place in (dist, tmp_path) for asset in assets.collect(place)[1]}
    assert state(hub)["assets"] == {**both, assets.SUMS: assets.sums(both).sha256}


def test_an_immutable_release_is_not_added_to(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    (found,) = hub.releases.values()
    found["immutable"] = True
    publish(hub, dist)  # nothing is added
    wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.14.0 7.2"))
    with pytest.raises(PublishFailed, match=r"release v1\.2\.3 is immutable: .* cannot be added\D*new tag"):
        publish(hub, tmp_path)
    assert state(hub)["assets"] == expected(dist)


def test_a_lost_verdict_of_a_public_release_can_be_given_again(hub: Hub, dist: Path) -> None:
    publish(hub, dist)
    (found,) = hub.releases.values()
    found["assets"] = [asset for asset in found["assets"] if not asset["name"].endswith(".verdict.json")]
    cat = catalogue.from_releases([found], lambda asset: hub.content[asset["id"]], {})
    assert (len(cat.wheels), len(cat.unverified), len(cat.problems)) == (0, 3, 3)
    publish(hub, dist)
    assert state(hub)["assets"] == expected(dist)
