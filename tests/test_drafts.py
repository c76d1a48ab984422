from __future__ import annotations

import re
from pathlib import Path

import pytest
import wheelhouse
from fake_github import Hub
from publishing import TAG, arguments, expected, publish, state, write_plan
from wheelhouse import COMMIT, OTHER_COMMIT

from rocm_wheels import cli
from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.matrix.release_plan import FILE


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


def test_draft_only(hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hub.tags[TAG] = COMMIT
    plan = str(write_plan(tmp_path, dist))
    for _ in range(2):
        assert cli.main(arguments(dist, "--draft-only", "--plan", plan)) == 0
        out, err = capsys.readouterr()
        assert out == f"commit={COMMIT}\n"
        assert f"draft of {TAG}: " in err
        assert "it shall hold 3 wheels" in err
    assets = {FILE: expected(dist)[FILE]}
    assert state(hub) == {"tag": TAG, "draft": True, "body": "", "assets": assets}


def test_a_draft_needs_the_plan_of_its_tag(
    hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hub.tags[TAG] = COMMIT
    for more, message in (
        ((), "--draft-only needs the plan of the release\nMake it with: ./create_matrix.py --plan --tag"),
        (("--plan", str(write_plan(tmp_path, dist, "v9.9.9"))), f"is the plan of v9.9.9, not of {TAG}"),
        (("--plan", str(dist / "none.json")), "none.json cannot be read"),
    ):
        assert cli.main(arguments(dist, "--draft-only", *more)) == DataError.exit_code
        assert message in capsys.readouterr().err
    assert hub.releases == {}


@pytest.mark.parametrize(
    ("tags", "ref", "message"),
    [
        ({}, f"refs/tags/{TAG}", f"there is no tag {TAG}\nPush it: git tag {TAG} && git push origin {TAG}."),
        ({}, "", f"there is no tag {TAG}"),
        (
            {TAG: COMMIT},
            "refs/heads/main",
            "this run is at refs/heads/main, and the environment `release` takes the tags",
        ),
        ({TAG: COMMIT}, "refs/tags/v9.9.9", f"Start it at the tag: gh workflow run build.yml --ref {TAG}"),
    ],
)
def test_the_first_job_finds_faults_that_would_stop_the_last_job(
    hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tags: dict[str, str],
    ref: str, message: str, tmp_path: Path,
) -> None:  # fmt: skip
    hub.tags |= tags
    monkeypatch.setenv("GITHUB_REF", ref)
    plan = str(write_plan(tmp_path, dist))
    assert cli.main(arguments(dist, "--draft-only", "--plan", plan)) == PublishFailed.exit_code
    assert message in capsys.readouterr().err
    assert hub.releases == {}


@pytest.mark.parametrize(("tag", "candidate"), [("v1.2.3rc1", True), ("v1.2.3", False), ("v1.2.3.post1", False)])
def test_a_candidate_is_a_pre_release(hub: Hub, dist: Path, tag: str, candidate: bool, tmp_path: Path) -> None:
    hub.tags[tag] = COMMIT
    command = ["publish", "--tag", tag, "--dist", str(dist)]
    assert cli.main([*command, "--draft-only", "--plan", str(write_plan(tmp_path, dist, tag))]) == 0
    (result,) = hub.releases.values()
    assert (result["draft"], result["prerelease"]) == (True, candidate)
    result["prerelease"] = not candidate  # as if the draft had been created by hand
    assert cli.main(command) == 0
    assert (result["draft"], result["prerelease"]) == (False, candidate)
    assert ("it is not in the package index" in result["body"]) is candidate
    assert ("--extra-index-url" in result["body"]) is not candidate
    urls = re.findall(r'pip install "(http[^"]+)"', result["body"])
    assert len(urls) == candidate
    assert set(urls) <= {asset["browser_download_url"] for asset in result["assets"]}, "those of the public release"


def test_a_wheel_of_flash_attn_3_in_a_draft_is_replaced(hub: Hub, tmp_path: Path) -> None:
    _, fa3 = wheelhouse.write_with_fa3(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    hub.add_asset(hub.add_release(TAG, target_commitish=COMMIT), fa3.name, b"an earlier build")
    publish(hub, tmp_path)
    assert state(hub)["assets"] == expected(tmp_path)


def test_a_draft_of_another_commit_is_not_mixed_with_this_one(hub: Hub, dist: Path) -> None:
    """The tag was moved between a run that was killed and the next run."""
    draft = hub.add_release(TAG, target_commitish=OTHER_COMMIT)
    publish(hub, dist)  # the draft was empty
    assert state(hub)["draft"] is False
    assert draft["target_commitish"] == COMMIT
    hub.releases.clear()
    hub.tags.clear()
    hub.add_asset(hub.add_release(TAG, target_commitish=OTHER_COMMIT), "x.zip", b"x")
    with pytest.raises(
        PublishFailed, match=f"was begun at {OTHER_COMMIT} and holds files, this release is of {COMMIT}"
    ):
        publish(hub, dist)


def test_two_drafts_with_files_are_left_alone(hub: Hub, dist: Path) -> None:
    for _ in range(2):
        hub.add_asset(hub.add_release(TAG, target_commitish=COMMIT), "x.zip", b"x")
    with pytest.raises(PublishFailed, match=r"the drafts \d+ and \d+ of v1\.2\.3 both hold files\nDelete"):
        publish(hub, dist)
    assert [len(release["assets"]) for release in hub.releases.values()] == [1, 1]
