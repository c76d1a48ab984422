from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fake_github
import pytest
from fake_github import REPOSITORY, TOKEN, Hub
from publishing import arguments, publish, silent

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


def test_waits_as_long_as_github_asks(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(
        [
            (429, {"Retry-After": "7"}, "no"),
            (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1030"}, "no"),
            (403, {}, "You have exceeded a secondary rate limit. Please wait a few minutes before you try again."),
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
    assert waits[:3] == [7.0, 31.0, 60.0]
    assert 0 < waits[3] < 1


def test_the_token_is_shown_to_the_api_alone(hub: Hub, dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, dist)
    seen: list[tuple[str, bool]] = []
    act = fake_github._Handler._act

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        seen.append((self.headers["Host"].partition(":")[0], "Authorization" in self.headers))
        return act(self, *args, **options)

    monkeypatch.setattr(fake_github._Handler, "_act", watched)
    api = github.GitHub(REPOSITORY, token=TOKEN, api_url=hub.url, say=silent)
    (found,) = api.releases()
    api.download(found["assets"][0]["browser_download_url"].replace("127.0.0.1", "localhost"))
    assert seen == [("127.0.0.1", True), ("localhost", False)]
