from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import fake_github
import pytest
import requests
from fake_github import REPOSITORY, TOKEN, Hub
from publishing import arguments, client, publish, silent

from rocm_wheels import cli
from rocm_wheels.errors import PublishFailed
from rocm_wheels.publish import github


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GITHUB_TOKEN", "", "there is no token in the environment\nSet GITHUB_TOKEN"),
        ("GITHUB_TOKEN", "expired", "401 Bad credentials\nThe token is not valid"),
        ("GITHUB_REPOSITORY", "name", "the repository is 'name', not owner/name"),
        ("GITHUB_REPOSITORY", "owner/other", "404 Not Found\nThe repository or release does not exist"),
    ],
)
def test_refusals_name_the_remedy(
    hub: Hub,
    dist: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.delenv("GH_TOKEN", raising=False)
    monkeypatch.setenv(variable, value)
    assert cli.main(arguments(dist)) == PublishFailed.exit_code
    assert message in capsys.readouterr().err
    assert hub.releases == {}


def test_waits_as_long_as_github_says(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(
        [
            (429, {"Retry-After": "7"}, "no"),
            (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1030"}, "no"),
            *2
            * [(403, {}, "You have exceeded a secondary rate limit. Please wait a few minutes before you try again.")],
            (503, {}, "no"),
        ]
    )
    act = fake_github._Handler._act

    def limited(self: Any, *args: Any, **options: Any) -> Any:
        status, headers, message = next(answers, (0, {}, ""))
        return (status, {"message": message}, headers) if status else act(self, *args, **options)

    waits: list[float] = []
    monkeypatch.setattr(fake_github._Handler, "_act", limited)
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    api = github.GitHub(REPOSITORY, token=TOKEN, api_url=hub.url, say=silent)
    assert list(api.releases()) == []
    assert waits[:4] == [7.0, 31.0, 240.0, 480.0], "longer each time that the same request is refused"
    assert 0 < waits[4] < 1


def test_the_token_is_shown_to_the_api_alone(hub: Hub, dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, dist)
    seen: list[tuple[str, bool]] = []
    act = fake_github._Handler._act

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        seen.append((self.headers["Host"].partition(":")[0], "Authorization" in self.headers))
        return act(self, *args, **options)

    monkeypatch.setattr(fake_github._Handler, "_act", watched)
    api = github.GitHub(REPOSITORY, token=TOKEN, api_url=hub.url, say=silent)
    (result,) = api.releases()
    api.download(result["assets"][0]["browser_download_url"].replace("127.0.0.1", "localhost"))
    api.download(result["assets"][0]["url"])  # both lead to the host with the bytes
    assert seen == [("127.0.0.1", True), *2 * [("localhost", False)], ("127.0.0.1", True), ("localhost", False)]


@pytest.mark.parametrize("token", [f"{TOKEN}\n", f"  {TOKEN}\r\n"])
def test_a_newline_at_the_end_of_the_token_is_taken_off(
    hub: Hub, dist: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", token)
    assert cli.main(arguments(dist)) == 0
    assert len(hub.releases) == 1


def test_a_token_that_is_none_is_never_printed(
    hub: Hub, dist: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", f"{TOKEN} and\nmore")
    assert cli.main(arguments(dist)) == PublishFailed.exit_code
    out, err = capsys.readouterr()
    assert TOKEN not in out + err
    assert err.startswith("error: the token in the environment has a character that no token has")
    assert hub.requests == 0


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://api.github.com/repos/x", True),
        ("https://uploads.github.com/x?name=y", True),
        ("https://api.github.com:443/x", True),
        ("https://api.github.com:8443/x", False),
        ("http://api.github.com/x", False),
        ("https://objects.githubusercontent.com/x", False),
        ("https://api.github.com.example.org/x", False),
    ],
)
def test_the_token_goes_to_one_scheme_host_and_port(url: str, shown: bool) -> None:
    bearer = github._Bearer(TOKEN, "https://api.github.com")
    request = requests.Request("GET", url, auth=bearer).prepare()
    assert ("Authorization" in request.headers) is shown


def test_no_token_goes_over_plain_http() -> None:
    with pytest.raises(PublishFailed, match=r"a token would go to http://api\.github\.com in plain text"):
        github.GitHub(REPOSITORY, token=TOKEN, api_url="http://api.github.com", say=silent)
    github.GitHub(REPOSITORY, token="", api_url="http://api.github.com", say=silent)


def test_pages_of_releases_are_small(hub: Hub) -> None:
    """Each release comes with all its assets: a page of 100 can be too large for GitHub to answer."""
    for number in range(12):
        hub.add_release(f"v1.0.{number}", draft=False)
    asked: list[str] = []
    api = client(hub)
    send = api._send
    api._send = lambda method, url, **options: asked.append(url) or send(method, url, **options)  # type: ignore
    assert len(list(api.releases())) == 12
    assert asked[0].endswith("/releases?per_page=10")
    assert len(asked) == 3, "the stand-in gives five a page, whatever is asked for"


class Clock:
    """The time of the stand-in for GitHub, as the module `time`."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def sleep(self, seconds: float) -> None:
        self.hub.clock += seconds

    def time(self) -> float:
        return self.hub.now()

    monotonic = time


def test_the_assets_of_a_release_pass_the_limits_of_github(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 content-creating requests a minute and 500 an hour, without headers that say how long to wait."""
    monkeypatch.setattr(github, "BACKOFF_SECONDS", 1.0)
    monkeypatch.setattr(github, "time", Clock(hub))
    release = hub.add_release("v1.0.0")
    said: list[str] = []
    api = client(hub, said.append)
    started = hub.now()
    hub.limits = {60: 80}
    for number in range(100):
        api.upload(release["upload_url"], f"{number}.zip", lambda: io.BytesIO(b"x"), "application/zip")
    assert hub.limited == 0, "a second between two of them stays below 80 a minute"
    hub.limits = {60: 80, 3600: 500}
    for number in range(100, 516):
        api.upload(release["upload_url"], f"{number}.zip", lambda: io.BytesIO(b"x"), "application/zip")
    assert len(release["assets"]) == 516
    minutes = (hub.now() - started) / 60
    assert 60 < minutes < 90, "the hour, and what waiting in steps adds"
    assert hub.limited == len(said) == 6
    assert said[-1].endswith("again in 1920 s")
