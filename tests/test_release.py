from __future__ import annotations

import functools
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_github
import fake_parts
import pytest
import wheelhouse
from fake_github import REPOSITORY, TOKEN, Hub
from publishing import TAG, arguments, environment, expected, publish, state

from rocm_wheels import cli
from rocm_wheels.errors import DataError, PublishFailed, RocmWheelsError
from rocm_wheels.publish import assets, catalogue, github
from rocm_wheels.wheel import assemble

MOMENTS = ("before", "mid", "after", "answered")
# What a user starts, with waits short enough for a test.
PUBLISH = """
import sys
from rocm_wheels import cli
from rocm_wheels.publish import github
github.BACKOFF_SECONDS, github.TIMEOUT_SECONDS, github.ATTEMPTS = 0.005, (5.0, 0.25), 12
sys.exit(cli.main(sys.argv[1:]))
"""


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
        PublishFailed, match="is published with other content\nA published file never changes: publish under a new tag"
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
    with pytest.raises(
        DataError, match=f"in release {TAG} is about another file of that name\nRun `publish --tag {TAG}`"
    ):
        catalogue.from_releases([found], lambda asset: hub.content[asset["id"]])
    publish(hub, dist)  # sends the right one
    assert state(hub)["assets"] == expected(dist)


def test_a_wheel_of_a_draft_is_replaced(hub: Hub, tmp_path: Path) -> None:
    draft = hub.add_release(TAG)
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    hub.add_asset(draft, path.name, b"an earlier build")
    publish(hub, tmp_path)
    assert state(hub)["assets"] == expected(tmp_path)


def test_leftovers_of_broken_runs_go(hub: Hub, dist: Path) -> None:
    first, second = hub.add_release(TAG), hub.add_release(TAG)
    hub.add_asset(first, next(iter(expected(dist))), b"", "starter")
    hub.add_asset(first, "foreign.bin", b"", "starter")
    hub.add_asset(second, "foreign.bin", b"x")
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
    with pytest.raises(PublishFailed, match="does not hold what was sent: flash_attn"):
        publish(hub, dist)


def test_draft_only(hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert cli.main(arguments(dist, "--draft-only")) == 0
        assert f"draft of {TAG}: " in capsys.readouterr().out
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
    for name, digest in expected(dist).items():
        assert f"{digest}  " in printed
        assert name in printed
    assert "would hold these 11 assets" in printed
    assert "nothing was sent" in printed


def test_the_interface_wheel_goes_along(hub: Hub, tmp_path: Path) -> None:
    """It has no verdict of its own: the wheels of its label do."""
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2", "triton")
    wheelhouse.write(tmp_path, cell)
    interface = wheelhouse.write_interface(tmp_path, cell)
    publish(hub, tmp_path)
    found = state(hub)
    assert found["assets"][interface.name] == catalogue.file_sha256(interface)
    assert f"{interface.name}.metadata" in found["assets"]
    (published,) = hub.releases.values()
    (sums,) = (hub.content[asset["id"]] for asset in published["assets"] if asset["name"] == assets.SUMS)
    assert interface.name in sums.decode()
    (wheel,) = catalogue.from_directory(tmp_path)
    assert wheel.name.startswith("flash_attn-2.8.3")


def test_wheels_are_added_to_a_release_with_an_interface_wheel(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interface is built again with the wheel of another Python: later, then by a newer hatchling."""
    built: list[Path] = []
    said: list[str] = []
    pythons = ("3.10", "3.11", "3.12")
    for python, committed in zip(pythons, (1700000000, 1700000002, 1700000002), strict=True):
        monkeypatch.setattr(assemble, "wheel_date", lambda _, now=committed: now)
        if python == "3.12":
            newer = tmp_path / "site/sitecustomize.py"
            newer.parent.mkdir()
            newer.write_text("import hatchling.__about__\nhatchling.__about__.__version__ = '99.0'\n")
            monkeypatch.setenv("PYTHONPATH", str(newer.parent))
        wheelhouse.write(tmp_path / python, wheelhouse.cell(f"2.8.3 {python} 2.5.1 6.2"))
        built.append(assemble.assemble_interface(fake_parts.plan("gfx942", python=python), tmp_path / python))
        publish(hub, tmp_path / python, said.append)
    first, later, other = built
    assert first.read_bytes() == later.read_bytes() != other.read_bytes()
    assert first.name == other.name
    stays = [f"{first.name}.metadata: the one that is public stays", f"{first.name}: the one that is public stays"]
    assert [line for line in said if "stays" in line] == 2 * stays
    found = state(hub)["assets"]
    assert set(found) == {asset.name for each in pythons for asset in assets.collect(tmp_path / each)[1]} | {
        assets.SUMS
    }
    assert found[first.name] == catalogue.file_sha256(first)


def test_an_interface_wheel_of_a_draft_is_replaced(hub: Hub, tmp_path: Path) -> None:
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
    wheelhouse.write(tmp_path, cell)
    interface = wheelhouse.write_interface(tmp_path, cell)
    hub.add_asset(hub.add_release(TAG), interface.name, b"an earlier build")
    publish(hub, tmp_path)
    assert state(hub)["assets"] == expected(tmp_path)


def test_yank_and_its_undoing(hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(hub, dist)
    before = state(hub)
    wheel = next(path.name for path in dist.glob("*.whl"))
    assert cli.main(["yank", "--tag", TAG, wheel, "--reason", "wrong dQ"]) == 0
    assert state(hub)["assets"][f"{wheel}.yanked"] == hashlib.sha256(b"wrong dQ\n").hexdigest()
    said: list[str] = []
    publish(hub, dist, said.append)  # is of no concern to the sums
    assert f"{assets.SUMS}\n  already there" in said
    assert "**yanked**: wrong dQ" in state(hub)["body"]
    next(iter(hub.releases.values()))["body"] = ""
    assert cli.main(["notes", "--tag", TAG, "--update"]) == 0
    assert "**yanked**: wrong dQ" in state(hub)["body"]
    assert cli.main(["notes", "--tag", "v9", "--update"]) == PublishFailed.exit_code
    assert "there is no release v9" in capsys.readouterr().err
    assert cli.main(["yank", "--tag", TAG, wheel, "--undo"]) == 0
    publish(hub, dist)
    assert state(hub) == before
    assert cli.main(["yank", "--tag", TAG, wheel, "--undo"]) == PublishFailed.exit_code
    assert "is not yanked" in capsys.readouterr().err
    assert cli.main(["yank", "--tag", "v9", wheel, "--reason", "x"]) == PublishFailed.exit_code
    assert "there is no release v9" in capsys.readouterr().err
    assert len(hub.releases) == 1


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
    check_once(hub, dist)


@functools.cache
def undisturbed(dist: Path) -> str:
    """The notes of a run in which nothing goes wrong."""
    with fake_github.serve(Hub()) as hub:
        publish(hub, dist)
        return str(state(hub)["body"])


def check_once(hub: Hub, dist: Path) -> None:
    """The end is that of an undisturbed run, and no wheel was ever stored a second time."""
    found = state(hub)
    assert found["assets"] == expected(dist)
    assert found["draft"] is False
    assert found["body"] == undisturbed(dist)
    twice = {name for name, count in hub.stored.items() if count > 1}
    assert twice <= {assets.SUMS}


class Killer:
    """Kills the client with SIGKILL at one moment of one request."""

    def __init__(self, number: int, moment: str) -> None:
        self.at = (number, moment)
        self.known = threading.Event()
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, number: int, moment: str) -> None:
        if (number, moment) == self.at:
            self.known.wait(30)
            assert self.process is not None
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(30)


def kill_and_run_again(dist: Path, seed: int) -> None:
    """One publish that is killed at a random point, and one that ends it."""
    chance = random.Random(fake_github.seed("kill", seed))
    killer = Killer(chance.randint(1, 22), chance.choice(MOMENTS))
    with fake_github.serve(Hub(seed=seed, rate=0.15, on_request=killer)) as hub:
        with subprocess.Popen(
            [sys.executable, "-c", PUBLISH, *arguments(dist)],
            env={**os.environ, **environment(hub)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            killer.process = process
            killer.known.set()
            printed = process.communicate(timeout=60)[0]
        assert process.returncode == -signal.SIGKILL, printed
        assert TOKEN not in printed
        publish(hub, dist)
        check_once(hub, dist)


def test_killed_at_thirty_points_and_run_again_it_ends_the_same(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github, "BACKOFF_SECONDS", 0.005)
    monkeypatch.setattr(github, "TIMEOUT_SECONDS", (5.0, 0.25))
    monkeypatch.setattr(github, "ATTEMPTS", 12)
    undisturbed(dist)
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda seed: kill_and_run_again(dist, seed), range(30)))) == 30
