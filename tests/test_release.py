from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import fake_parts
import pytest
import wheelhouse
from fake_github import REPOSITORY, TOKEN, Hub
from publishing import TAG, arguments, client, expected, publish, publish_as, state
from wheelhouse import COMMIT, OTHER_COMMIT

from rocm_wheels import cli
from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.matrix import versions
from rocm_wheels.paths import ROOT
from rocm_wheels.publish import assets, catalogue, published, yanks
from rocm_wheels.wheel import assemble, contents, numbering


def test_publishes_everything_and_prints_it(hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(dist)) == 0
    printed = capsys.readouterr()
    result = state(hub)
    assert result["assets"] == expected(dist)
    assert (result["tag"], result["draft"]) == (TAG, False)
    assert "* Faster &lt;kernels>" in result["body"]
    assert "pip install" in result["body"]
    assert "[10/10] kernels-triton-gfx942.zip" in printed.out
    assert f"published: {hub.url}/{REPOSITORY}/releases/{TAG}, 3 wheels of 3 in it" in printed.out
    assert TOKEN not in printed.out + printed.err


def test_sha256sum_accepts_the_sums(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    (result,) = hub.releases.values()
    for asset in result["assets"]:
        (tmp_path / asset["name"]).write_bytes(hub.content[asset["id"]])
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", assets.SUMS], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.count(": OK") == 11


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
    result = state(hub)
    assert result["assets"] == expected(dist, tmp_path)
    assert "1 of 4 passed their tests on an AMD GPU" in result["body"]
    assert later.name in result["body"]


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
    (result,) = hub.releases.values()
    other = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), payload="changed = 1\n")
    name = f"{other.name}.verdict.json"
    result["assets"] = [asset for asset in result["assets"] if asset["name"] != name]
    hub.add_asset(result, name, (tmp_path / name).read_bytes())
    broken = catalogue.from_releases([result], lambda asset: hub.content[asset["id"]], {})
    assert broken.problems == (f"release {TAG}: the verdict beside {other.name} is about another file of that name",)
    assert [(link.name, link.yanked) for link in broken.unverified] == [
        (other.name, "it is not known whether it passed its tests")
    ]
    assert len(broken.wheels) == 2, "the others are as they were"
    publish(hub, dist)  # sends the correct bytes
    assert state(hub)["assets"] == expected(dist)


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2", "not a tag!", "v1.2.3\n", "", "v01.0.0", "v\uff11.0.0", "v1.0.0rc01"])
def test_a_tag_is_checked_before_anything_is_made(
    hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str], tag: str
) -> None:
    for more in ([], ["--draft-only"], ["--dry-run"]):
        with pytest.raises(SystemExit):
            cli.main(["publish", "--tag", tag, "--dist", str(dist), *more])
        assert f"{tag!r} is not a release tag such as v1.2.3 or v1.2.3rc1" in capsys.readouterr().err
    assert hub.requests == 0


def test_dry_run_asks_github_nothing(hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(dist, "--dry-run")) == 0
    printed = capsys.readouterr().out
    assert hub.requests == 0
    own = {name: digest for name, digest in expected(dist).items() if not name.endswith((".metadata", ".verdict.json"))}
    lines = {line.split()[3]: line for line in printed.splitlines() if re.match("[0-9a-f]{64} ", line)}
    assert {name: line.split()[0] for name, line in lines.items()} == own
    assert all(line.endswith(".whl with .metadata, .verdict.json") for name, line in lines.items() if ".whl" in name)
    assert "would hold these 12 assets" in printed
    assert "nothing was sent" in printed


def test_the_wheel_of_flash_attn_3_goes_along(hub: Hub, tmp_path: Path) -> None:
    """The test report of a wheel with its label says that it was tested."""
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2", "triton")
    path, fa3 = wheelhouse.write_with_fa3(tmp_path, cell)
    publish(hub, tmp_path)
    result = state(hub)
    assert result["assets"][fa3.name] == contents.file_sha256(fa3)
    assert f"{fa3.name}.metadata" in result["assets"]
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
    assert contents.read(first).contents == contents.read(other).contents
    assert first.name == other.name
    assert [line for line in said if "stays" in line] == 2 * [f"{first.name}: the one that is public stays"]
    result = state(hub)["assets"]
    assert set(result) == set(expected(*(tmp_path / each for each in pythons)))
    assert result[first.name] == contents.file_sha256(first)


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


def test_the_release_is_of_one_commit(hub: Hub, dist: Path, tmp_path: Path) -> None:
    """The draft, its tag, and every wheel."""
    publish(hub, dist)
    (result,) = hub.releases.values()
    assert (result["target_commitish"], hub.tags) == (COMMIT, {TAG: COMMIT})
    wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.14.0 7.2"), commit=OTHER_COMMIT)
    before = state(hub)
    with pytest.raises(PublishFailed, match=f"was built from commit {OTHER_COMMIT}, the release is of {COMMIT}"):
        publish(hub, tmp_path)
    with pytest.raises(PublishFailed, match=f"the tag {TAG} names commit {COMMIT}, this release is of {OTHER_COMMIT}"):
        publish_as(client(hub), TAG, tmp_path, print, OTHER_COMMIT)
    assert state(hub) == before


def test_an_annotated_tag_names_the_commit_of_its_object(hub: Hub) -> None:
    hub.tags |= {TAG: f"tag:{OTHER_COMMIT}", f"object {OTHER_COMMIT}": COMMIT}
    assert client(hub).tag_commit(TAG) == COMMIT
    assert client(hub).tag_commit("v9.9.9") is None


def test_contents_that_are_public_are_not_published_again(hub: Hub, dist: Path, tmp_path: Path) -> None:
    """A wheel built at another commit has other bytes. Its contents are the same."""
    publish(hub, dist)
    said: list[str] = []
    for text, backend in (("2.8.3 3.11 2.5.1 6.2", "triton"), ("2.8.3 3.12 2.5.1 6.2", "ck")):
        wheelhouse.write(tmp_path, wheelhouse.cell(text, backend), commit=OTHER_COMMIT)
    new = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.14.0 7.2"), commit=OTHER_COMMIT)
    publish_as(client(hub), "v1.3.0", tmp_path, said.append, OTHER_COMMIT)
    (later,) = (release for release in hub.releases.values() if release["tag_name"] == "v1.3.0")
    assert sorted(asset["name"] for asset in later["assets"] if asset["name"].endswith(".whl")) == [new.name]
    assert sum("unchanged, it stays in the release that has it" in line for line in said) == 2
    assert sum(count for name, count in hub.stored.items() if name.endswith(".whl")) == 4


def test_a_release_without_anything_new_is_not_made(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    before = state(hub)
    wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), commit=OTHER_COMMIT)
    said: list[str] = []
    assert publish_as(client(hub), "v1.3.0", tmp_path, said.append, OTHER_COMMIT) == ""
    assert said[-1] == "nothing is new since the last release: v1.3.0 needs no wheels, and no release"
    assert state(hub) == before, "no empty draft stays"


def test_changed_contents_need_another_build_number(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
    changed = wheelhouse.write(tmp_path, cell, payload="changed = 1\n", commit=OTHER_COMMIT)
    with pytest.raises(PublishFailed, match="is published with other content\nBuild with --published"):
        publish_as(client(hub), "v1.3.0", tmp_path, print, OTHER_COMMIT)
    public = published.public_wheels(client(hub), but="v1.3.0")
    changed.with_name(f"{changed.name}.verdict.json").unlink()
    numbered = numbering.assign(changed, public)
    assert numbered.name == changed.name.replace("-cp311-cp311-", "-1-cp311-cp311-")
    wheelhouse.write_verdict(numbered, commit=OTHER_COMMIT)
    publish_as(client(hub), "v1.3.0", tmp_path, print, OTHER_COMMIT)
    result = catalogue.from_releases(list(hub.releases.values()), lambda asset: hub.content[asset["id"]], {})
    assert result.problems == ()
    both = [wheel.name for wheel in result.wheels if (wheel.python, wheel.torch) == ("3.11", "2.5")]
    assert both == [numbered.name, changed.name], "what was ever public stays listed"
    assert [wheel.name for wheel in catalogue.newest(result.wheels) if wheel.name in both] == [numbered.name]


def test_a_candidates_wheels_are_published_in_the_release(hub: Hub, dist: Path) -> None:
    """The index does not list a candidate. A release has its wheels, byte for byte the same."""
    publish_as(client(hub), "v1.2.3rc1", dist, print)
    publish(hub, dist)
    assert [len(release["assets"]) for release in hub.releases.values()] == [len(expected(dist))] * 2


def test_an_immutable_release_is_not_added_to(hub: Hub, dist: Path, tmp_path: Path) -> None:
    publish(hub, dist)
    (result,) = hub.releases.values()
    result["immutable"] = True
    publish(hub, dist)  # nothing is added
    wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.14.0 7.2"))
    with pytest.raises(PublishFailed, match=r"release v1\.2\.3 is immutable: .* cannot be added\D*new tag"):
        publish(hub, tmp_path)
    assert state(hub)["assets"] == expected(dist)


def test_a_lost_verdict_of_a_public_release_can_be_given_again(hub: Hub, dist: Path) -> None:
    publish(hub, dist)
    (result,) = hub.releases.values()
    result["assets"] = [asset for asset in result["assets"] if not asset["name"].endswith(".verdict.json")]
    cat = catalogue.from_releases([result], lambda asset: hub.content[asset["id"]], {})
    assert (len(cat.wheels), len(cat.unverified), len(cat.problems)) == (0, 3, 3)
    publish(hub, dist)
    assert state(hub)["assets"] == expected(dist)


def test_only_the_newest_version_becomes_the_latest_release(hub: Hub, tmp_path: Path) -> None:
    """A backport after a newer release, a candidate and a second run do not."""
    made = {}
    for number, tag in enumerate(("v1.0.0", "v1.1.0", "v1.0.1", "v1.2.0rc1", "v1.10.0", "v1.9.0")):
        payload = f"x = {number}\n"
        wheelhouse.write(tmp_path / tag, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), payload=payload, build=number)
        publish_as(client(hub), tag, tmp_path / tag, print)
        made[tag] = hub.latest
    latest = {tag: hub.releases[number]["tag_name"] for tag, number in made.items()}
    assert latest == {
        "v1.0.0": "v1.0.0",
        "v1.1.0": "v1.1.0",
        "v1.0.1": "v1.1.0",
        "v1.2.0rc1": "v1.1.0",
        "v1.10.0": "v1.10.0",
        "v1.9.0": "v1.10.0",
    }
    publish_as(client(hub), "v1.1.0", tmp_path / "v1.1.0", print)
    assert hub.latest == made["v1.10.0"]


def test_a_tag_of_a_deleted_immutable_release_is_a_clear_error(hub: Hub, dist: Path) -> None:
    hub.immutable = True
    publish(hub, dist)
    (number,) = hub.releases
    client(hub).delete_release(number)
    with pytest.raises(PublishFailed, match="tag_name was used by an immutable release"):
        publish(hub, dist)
