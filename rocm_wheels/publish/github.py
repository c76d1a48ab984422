"""A client of GitHub's REST API: retries, rate limits, pages. It never prints the token."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import IO, Any
from urllib.parse import quote, urlsplit

import requests

from rocm_wheels.errors import PublishFailed

ATTEMPTS = 8
BACKOFF_SECONDS = 1.0  # doubled at each attempt, up to the maximum
LONGEST_BACKOFF_SECONDS = 60.0
LONGEST_WAIT_SECONDS = 3900.0  # rate limits last at most an hour
HOUR_SECONDS = 3600.0  # the longest period of a secondary limit
TIMEOUT_SECONDS = (15.0, 300.0)  # timeout to connect, and between two bytes of the answer
PER_PAGE = 100
RELEASES_PER_PAGE = 10  # each comes with its assets, up to 1000
_TOKEN = re.compile(r"[!-~]+")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

Body = Callable[[], IO[bytes]]


class Unanswered(Exception):  # noqa: N818 - an outcome, not a failure: the request may have been carried out
    """A non-idempotent request may or may not have been executed."""


class GitHub:
    """One repository. say: receives a line for each request that is repeated."""

    def __init__(self, repository: str, *, token: str, api_url: str, say: Callable[[str], None]) -> None:
        self.repository = repository
        self.say = say
        self._url = f"{api_url.rstrip('/')}/repos/{repository}"
        self._session = requests.Session()
        # An object instead of a header, because requests prefers a machine's .netrc to a header.
        self._session.auth = _Bearer(token, api_url) if token else None
        self._written = -BACKOFF_SECONDS  # monotonic time of the last request that changes something
        self._session.headers.update(
            {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28", "User-Agent": "rocm_wheels"}
        )

    @classmethod
    def from_environment(cls, *, repository: str | None, say: Callable[[str], None], writes: bool) -> GitHub:
        """From GITHUB_TOKEN or GH_TOKEN, GITHUB_REPOSITORY and GITHUB_API_URL. Raises PublishFailed if a variable is
        missing.
        """
        token = (os.environ.get("GITHUB_TOKEN") or os.environ.get("GH_TOKEN") or "").strip()
        if token and not _TOKEN.fullmatch(token):
            raise PublishFailed(
                "the token in the environment has a character that no token has, such as a space",
                remedy="Set GITHUB_TOKEN to the token alone, as with GH_TOKEN=$(gh auth token).",
            )
        if writes and not token:
            raise PublishFailed(
                "there is no token in the environment",
                remedy="Set GITHUB_TOKEN, or GH_TOKEN=$(gh auth token), with contents: write.",
            )
        name = repository or os.environ.get("GITHUB_REPOSITORY") or ""
        if name.count("/") != 1 or name.startswith("/") or name.endswith("/"):
            raise PublishFailed(
                f"the repository is {name!r}, not owner/name",
                remedy="Set GITHUB_REPOSITORY=owner/name, or give --repo to a verb that has it.",
            )
        api_url = os.environ.get("GITHUB_API_URL") or "https://api.github.com"
        return cls(name, token=token, api_url=api_url, say=say)

    def get(self, path: str) -> Any:
        """The object at a path below the repository; None for a 404."""
        response = self._send("GET", f"{self._url}{path}", gone=True, is_json=True)
        return None if response.status_code == 404 else response.json()

    def releases(self) -> Iterator[dict[str, Any]]:
        """All releases, with drafts if the token may see them."""
        return self._pages("/releases", RELEASES_PER_PAGE)

    def release(self, release: int) -> dict[str, Any]:
        """The current state of one release."""
        return self._json("GET", f"{self._url}/releases/{release}")

    def tag_commit(self, tag: str) -> str | None:
        """The commit of a tag; None if there is no such tag."""
        response = self._send("GET", f"{self._url}/git/ref/tags/{quote(tag)}", gone=True, is_json=True)
        if response.status_code == 404:
            return None
        named = response.json()["object"]
        while named["type"] == "tag":  # an annotated tag is an object of its own
            named = self._json("GET", f"{self._url}/git/tags/{named['sha']}")["object"]
        return str(named["sha"])

    def assets(self, release: int) -> Iterator[dict[str, Any]]:
        """All assets of a release, in any state."""
        return self._pages(f"/releases/{release}/assets")

    def labels(self) -> list[str]:
        """The names of the labels of the repository's issues."""
        return [str(label["name"]) for label in self._pages("/labels")]

    def asset(self, asset: int) -> dict[str, Any] | None:
        """The current state of one asset, which a listing may show only seconds later; None if it was deleted."""
        state: dict[str, Any] | None = self.get(f"/releases/assets/{asset}")
        return state

    def create_release(self, **fields: Any) -> dict[str, Any]:
        """Creates a release. Raises Unanswered if the release may or may not exist now."""
        return self._json("POST", f"{self._url}/releases", json=fields, repeat=False)

    def update_release(self, release: int, **fields: Any) -> dict[str, Any]:
        return self._json("PATCH", f"{self._url}/releases/{release}", json=fields)

    def delete_release(self, release: int) -> None:
        self._send("DELETE", f"{self._url}/releases/{release}", gone=True)

    def delete_asset(self, asset: int) -> None:
        self._send("DELETE", f"{self._url}/releases/assets/{asset}", gone=True)

    def rename_asset(self, asset: int, name: str) -> dict[str, Any]:
        return self._json("PATCH", f"{self._url}/releases/assets/{asset}", json={"name": name})

    def generated_notes(self, tag: str, commit: str) -> str:
        """GitHub's list of the changes since the previous release. The request changes nothing."""
        request = {"tag_name": tag, "target_commitish": commit}
        return str(self._json("POST", f"{self._url}/releases/generate-notes", json=request)["body"])

    def upload(self, upload_url: str, name: str, body: Body, content_type: str) -> dict[str, Any]:
        """Uploads an asset. Raises Unanswered if the asset may or may not exist now, or if its name is taken."""
        # In a query a bare "+" is a space, which GitHub stores as ".". So the name is percent-encoded.
        url = f"{upload_url.partition('{')[0]}?name={quote(name, safe='')}"
        return self._json("POST", url, body=body, headers={"Content-Type": content_type}, repeat=False)

    def download(self, url: str) -> bytes:
        """The bytes at an asset's `url` (also for drafts) or `browser_download_url`."""
        response = self._send("GET", url, headers={"Accept": "application/octet-stream"})
        return response.content

    def _pages(self, path: str, per_page: int = PER_PAGE) -> Iterator[dict[str, Any]]:
        url: str | None = f"{self._url}{path}?per_page={per_page}"
        seen: set[int] = set()
        while url is not None:
            response = self._send("GET", url, is_json=True)
            for entry in response.json():
                # An entry that is added or deleted between two pages moves other entries across the boundary.
                if entry["id"] not in seen:
                    seen.add(entry["id"])
                    yield entry
            url = response.links.get("next", {}).get("url")

    def _json(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        content: dict[str, Any] = self._send(method, url, is_json=True, **options).json()
        return content

    def _send(
        self,
        method: str,
        url: str,
        *,
        json: Mapping[str, Any] | None = None,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        repeat: bool = True,
        gone: bool = False,
        is_json: bool = False,
    ) -> requests.Response:
        """One request. It is repeated if that is harmless and may help. gone: whether a 404 is an answer too."""
        path, refusals = urlsplit(url).path, 0
        for attempt in range(ATTEMPTS):
            wait = backoff(attempt)
            try:
                response = self._once(method, url, json, body, headers)
                if response.ok and is_json and response.content:
                    response.json()
            except (requests.ConnectionError, requests.Timeout) as error:
                problem, refused = f"no answer ({type(error).__name__})", False
            except (requests.exceptions.ChunkedEncodingError, requests.exceptions.JSONDecodeError):
                problem, refused = "a truncated answer", False
            else:
                if response.ok or (gone and response.status_code == 404):
                    return response
                limit = _rate_limit(response, refusals)
                if limit is not None:
                    refusals += 1
                    problem, wait = f"asked to wait ({response.status_code})", limit
                    refused = response.status_code != 503
                elif response.status_code >= 500 or response.status_code == 408:
                    problem, refused = f"status {response.status_code}", False
                elif _taken(response) and not repeat:
                    raise Unanswered(f"{method} {path}: the name is taken")
                else:
                    raise _failure(method, path, response)
            # A request refused by a rate limit was not executed: even a POST can be sent again.
            if not repeat and not refused:
                raise Unanswered(f"{method} {path}: {problem}")
            if wait > LONGEST_WAIT_SECONDS:
                raise PublishFailed(f"{method} {path}: {problem}, to be asked again in {wait:.0f} s")
            self.say(f"{method} {path}: {problem}; again in {wait:.0f} s")
            time.sleep(wait)
        raise PublishFailed(
            f"{method} {path}: {problem}, {ATTEMPTS} times", remedy="Run it again: it goes on from what is there."
        )

    def _once(
        self,
        method: str,
        url: str,
        json: Mapping[str, Any] | None,
        body: Body | None,
        headers: Mapping[str, str] | None,
    ) -> requests.Response:
        if method != "GET":
            # GitHub asks for a second between requests that change something. Without it a release runs into the limit
            # of 80 content-creating requests a minute.
            time.sleep(max(0.0, self._written + BACKOFF_SECONDS - time.monotonic()))
            self._written = time.monotonic()
        options: dict[str, Any] = {"json": json, "headers": headers, "timeout": TIMEOUT_SECONDS}
        if body is None:
            return self._session.request(method, url, **options)
        with body() as data:
            return self._session.request(method, url, data=data, **options)


class _Bearer(requests.auth.AuthBase):
    """Sends the token only to the API's own origin (scheme, host, port), because an asset's URL may lead anywhere."""

    def __init__(self, token: str, api_url: str) -> None:
        scheme, host, port = _origin(api_url)
        if scheme != "https" and host not in _LOOPBACK:
            raise PublishFailed(
                f"a token would go to {scheme}://{host} in plain text",
                remedy="Set GITHUB_API_URL to an https address, or unset the token.",
            )
        self._token = token
        self._origins = {(scheme, host, port), (scheme, f"uploads.{host.removeprefix('api.')}", port)}

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if _origin(request.url or "") in self._origins:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def _origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port of an address."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def settle() -> None:
    """Waits until a listing shows earlier changes: GitHub's listings lag behind by seconds."""
    time.sleep(3 * BACKOFF_SECONDS)


def backoff(attempt: int) -> float:
    """Seconds before the next attempt: doubled each time, with jitter so that jobs do not retry at the same moment."""
    return min(BACKOFF_SECONDS * 2.0**attempt, LONGEST_BACKOFF_SECONDS) * random.uniform(0.75, 1.25)


def _rate_limit(response: requests.Response, refusals: int = 0) -> float | None:
    """Seconds to wait if the answer is a primary or a secondary rate limit, else None.

    refusals: earlier answers of that kind to the same request.
    """
    after: str = response.headers.get("Retry-After", "")
    if response.status_code not in (403, 429, 503):
        return None
    if after.isdigit():
        return float(after)
    if response.headers.get("X-RateLimit-Remaining") == "0":
        reset: str = response.headers.get("X-RateLimit-Reset", "")
        return max(0.0, float(reset) - _now(response)) + 1 if reset.isdigit() else LONGEST_BACKOFF_SECONDS
    # A secondary limit may come without either header: GitHub asks for a minute, and for longer each time that it comes
    # again. Any other 403 is about the token.
    limited = response.status_code == 429 or "rate limit" in _errors(response)[0].lower()
    return min(LONGEST_BACKOFF_SECONDS * 2.0**refusals, HOUR_SECONDS) if limited else None


def _now(response: requests.Response) -> float:
    """GitHub's time in seconds since 1970, because the clock of this machine may be wrong."""
    try:
        return parsedate_to_datetime(response.headers["Date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return time.time()


def _errors(response: requests.Response) -> tuple[str, list[Any]]:
    try:
        content = response.json()
    except ValueError:
        return response.reason or "", []
    return (str(content.get("message", "")), content.get("errors") or []) if isinstance(content, dict) else ("", [])


def _taken(response: requests.Response) -> bool:
    codes = [error.get("code") for error in _errors(response)[1] if isinstance(error, dict)]
    return response.status_code == 422 and "already_exists" in codes


def _failure(method: str, path: str, response: requests.Response) -> PublishFailed:
    message, errors = _errors(response)
    details = "; ".join(
        str(error.get("message") or error) if isinstance(error, dict) else str(error) for error in errors
    )
    remedies = {
        401: "The token is not valid or has expired.",
        403: "The token needs contents: write on this repository.",
        404: "The repository or release does not exist, or the token may not see it.",
    }
    return PublishFailed(
        ": ".join(part for part in (f"{method} {path}", f"{response.status_code} {message}".strip(), details) if part),
        remedy=remedies.get(response.status_code, ""),
    )
