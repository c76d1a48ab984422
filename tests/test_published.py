from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_github import Hub

from rocm_wheels import cli
from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.publish import published

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def draft(hub: Hub) -> None:
    """Among other releases, with more files than a page has."""
    for number in range(8):
        hub.add_asset(hub.add_release(f"v0.{number}.0", draft=False), "other", b"")
    release = hub.add_release("v1.2.3")
    for number in range(12):
        hub.add_asset(release, f"file-{number}", b"", state="starter" if number == 7 else "uploaded")


@pytest.mark.usefixtures("draft")
def test_all_pages_are_read_and_unfinished_uploads_left_out() -> None:
    assert published.files("v1.2.3") == [f"file-{number}" for number in range(12) if number != 7]
    assert published.files("v9.9.9") == []


@pytest.mark.usefixtures("draft")
def test_the_listing_is_what_missing_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["published", "v1.2.3"]) == 0
    path = tmp_path / "published.json"
    path.write_text(capsys.readouterr().out)
    assert published.files(str(path)) == published.files("v1.2.3")


def test_it_must_be_known_whom_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    with pytest.raises(PublishFailed, match="the repository is '', not owner/name"):
        published.files("v1.2.3")
    with pytest.raises(DataError, match=r"--missing other\.json: no such file"):
        published.files("other.json")


def test_without_requests_a_tag_is_refused_and_the_rest_works(tmp_path: Path) -> None:
    listing = tmp_path / "none.json"
    listing.write_text("[]")
    command = [sys.executable, "-S", str(ROOT / "create_matrix.py"), "--only", "2.8.3 3.11 2.5.1 6.2 triton"]
    for missing, code in ((str(listing), 0), ("v1.2.3", 5)):
        done = subprocess.run([*command, "--missing", missing], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
    assert "requests is not installed" in done.stderr
