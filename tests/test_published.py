from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import wheelhouse
from fake_github import Hub
from publishing import TAG, client, publish, publish_as
from wheelhouse import COMMIT, OTHER_COMMIT

from rocm_wheels import cli
from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.matrix.names import stem
from rocm_wheels.publish import published
from rocm_wheels.wheel import contents, numbering

ROOT = Path(__file__).resolve().parent.parent


def there(hub: Hub, tag: str, commit: str = COMMIT) -> dict[str, list[str]]:
    """Stem -> GPU targets of what the release of a tag holds."""
    result: dict[str, list[str]] = published.listing(client(hub), tag, commit)["there"]
    return result


def test_all_pages_are_read_and_unfinished_uploads_left_out(hub: Hub, dist: Path) -> None:
    for number in range(8):
        hub.add_asset(hub.add_release(f"v0.{number}.0", draft=False), "other", b"")
    publish(hub, dist)
    (release,) = (each for each in hub.releases.values() if each["tag_name"] == TAG)
    held = there(hub, TAG)
    assert held.keys() == {stem(each.name) for each in dist.glob("*.whl")}
    wheel = next(asset for asset in release["assets"] if asset["name"].endswith(".whl"))
    wheel["state"] = "starter"
    assert held.keys() - there(hub, TAG).keys() == {stem(wheel["name"])}
    assert there(hub, "v9.9.9") == {}


def test_matrix_and_build_read_the_listing(
    hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    publish(hub, dist)
    assert cli.main(["published", TAG]) == 0
    path = tmp_path / "published.json"
    path.write_text(capsys.readouterr().out)
    assert published.there(path) == there(hub, TAG)
    assert set(map(tuple, published.there(path).values())) == {("gfx90a", "gfx942")}
    assert numbering.load(path) == []
    assert cli.main(["published", "v1.3.0", "--commit", OTHER_COMMIT]) == 0
    path.write_text(capsys.readouterr().out)
    assert published.there(path) == {}
    assert {(wheel.name, wheel.contents, wheel.final) for wheel in numbering.load(path)} == {
        (each.name, contents.read(each).contents, True) for each in dist.glob("*.whl")
    }
    path.write_text("[]")
    with pytest.raises(DataError, match="is no list of public wheels"):
        numbering.load(path)


def test_a_wheel_counts_with_a_verdict_about_it_and_this_commit(hub: Hub, dist: Path) -> None:
    """A name proves nothing: the wheel may be of another commit, or its test report of another wheel."""
    publish(hub, dist)
    (release,) = hub.releases.values()
    assert there(hub, TAG, OTHER_COMMIT) == {}
    held = there(hub, TAG)
    names = [asset["name"] for asset in release["assets"] if asset["name"].endswith(".whl")]
    verdict = next(asset for asset in release["assets"] if asset["name"] == f"{names[0]}.verdict.json")
    hub.content[verdict["id"]] = hub.content[verdict["id"]].replace(b'"ok": true', b'"ok": false')
    assert held.keys() - there(hub, TAG).keys() == {stem(names[0])}


def test_build_numbers(hub: Hub, tmp_path: Path) -> None:
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")

    def build(name: str, payload: str, commit: str = COMMIT) -> Path:
        path = wheelhouse.write(tmp_path / name, cell, payload=payload, commit=commit)
        path.with_name(f"{path.name}.verdict.json").unlink()
        return numbering.assign(path, published.public_wheels(client(hub), but=name))

    first = build("v1.0.0", "")
    assert "-cp311-cp311-" in first.name
    assert first.name.count("-") == 4
    wheelhouse.write_verdict(first)
    publish_as(client(hub), "v1.0.0", first.parent, print)
    assert build("v1.1.0", "", OTHER_COMMIT).name == first.name, "unchanged"
    second = build("v1.1.0", "changed = 1\n")
    assert second.name == first.name.replace("-cp311-", "-1-cp311-", 1)
    with contents.Contents(second) as opened:
        assert opened.record_errors() == []
        assert b"\nBuild: 1\n" in opened.text(f"{opened.info}/WHEEL")
    for path in second.parent.iterdir():
        if path != second:
            path.unlink()
    wheelhouse.write_verdict(second)
    publish_as(client(hub), "v1.1.0", second.parent, print)
    assert build("v1.2.0", "changed = 1\n", OTHER_COMMIT).name == second.name, "unchanged since build 1"
    assert build("v1.2.0", "").name == first.name.replace("-cp311-", "-2-cp311-", 1), "changed back"


def test_repository_and_token_must_be_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert cli.main(["published", "v1.2.3"]) == PublishFailed.exit_code
    assert "the repository is '', not owner/name" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"--missing .*other\.json: No such file"):
        published.there(tmp_path / "other.json")


def test_the_matrix_reads_the_list_without_any_package(tmp_path: Path) -> None:
    listing = tmp_path / "none.json"
    listing.write_text(json.dumps({"there": {}}))
    command = [sys.executable, "-S", str(ROOT / "create_matrix.py"), "--only", "2.8.3 3.11 2.5.1 6.2 triton"]
    done = subprocess.run([*command, "--missing", str(listing)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
