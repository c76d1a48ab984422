from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from rocm_wheels import cli, published
from rocm_wheels.errors import DataError

ASSETS = [{"name": f"file-{number}", "state": "uploaded", "size": 1} for number in range(230)]
ASSETS[7]["state"] = "starter"
RELEASES = [{"id": number, "tag_name": f"v0.{number}.0"} for number in range(150)] + [
    {"id": 7777, "tag_name": "v1.2.3"}
]


class GitHub(http.server.BaseHTTPRequestHandler):
    """Releases and assets in pages, as GitHub's API gives them; drafts for whoever may write."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        lists = {"/repos/o/r/releases": RELEASES, "/repos/o/r/releases/7777/assets": ASSETS}
        if url.path not in lists or self.headers["Authorization"] != "Bearer secret":
            self.send_error(404)
            return
        page, size = (int(parse_qs(url.query)[name][0]) for name in ("page", "per_page"))
        body = json.dumps(lists[url.path][(page - 1) * size : page * size]).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def _github(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), GitHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GITHUB_API_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("GITHUB_REPOSITORY", "o/r")
        monkeypatch.setenv("GITHUB_TOKEN", "secret")
        yield
        server.shutdown()


@pytest.mark.usefixtures("_github")
def test_all_pages_are_read_and_unfinished_uploads_left_out() -> None:
    assert published.files("v1.2.3") == [f"file-{number}" for number in range(230) if number != 7]
    assert published.files("v9.9.9") == []


@pytest.mark.usefixtures("_github")
def test_the_listing_is_what_missing_reads(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert cli.main(["published", "v1.2.3"]) == 0
    path = tmp_path_factory.mktemp("listing") / "published.json"
    path.write_text(capsys.readouterr().out)
    assert published.files(str(path)) == published.files("v1.2.3")


@pytest.mark.usefixtures("_github")
def test_a_refusal_is_told_without_the_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "wrong-token")
    assert cli.main(["published", "v1.2.3"]) == DataError.exit_code
    out, err = capsys.readouterr()
    assert "answered 404\nCheck GITHUB_REPOSITORY and GITHUB_TOKEN" in err
    assert "wrong-token" not in out + err


def test_it_must_be_known_whom_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    with pytest.raises(DataError, match=r"GITHUB_REPOSITORY is not set, so it is not known whose v1\.2\.3"):
        published.files("v1.2.3")
    monkeypatch.setenv("GITHUB_REPOSITORY", "o/r")
    monkeypatch.setenv("GITHUB_API_URL", "file:///etc")
    with pytest.raises(DataError, match="is no web address"):
        published.files("v1.2.3")
    monkeypatch.setenv("GITHUB_API_URL", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="Try again, or name a JSON file"):
        published.files("v1.2.3")
