"""A stand-in for GitHub's releases on loopback, with the faults and the refusals of the real service.

Refusals by GitHub's documentation (November 2026): an immutable release takes no assets, keeps its tag, and its tag
cannot be used again; `make_latest` is a string, and no pre-release is the latest; content-creating requests are limited
to 80 a minute and 500 an hour; the bytes of an asset come from another host, which refuses a request with a token.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, quote, unquote, urlsplit

from rocm_wheels.publish import github

REPOSITORY = "owner/name"
TOKEN = "secret-token-of-the-tests"
PAGE = 5  # entries per page, whatever the request asks for
FAULTS = (
    *("error", "late error", "no answer", "late silence", "dropped", "late drop"),
    *("truncated", "rate limit", "slow down", "starter"),
)


@dataclass
class Hub:
    """State and faults. rate: the share of requests with a fault. on_request: may kill the client at a given moment of
    a request.
    """

    seed: int = 0
    rate: float = 0.0
    on_request: Callable[[int, str], None] = lambda number, moment: None  # noqa: ARG005
    releases: dict[int, dict[str, Any]] = field(default_factory=dict)
    content: dict[int, bytes] = field(default_factory=dict)
    stored: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    digests: bool = True
    lag: float = 0.0  # seconds that listings lag behind
    clock: float = 0.0  # seconds that the server's clock is ahead of the client's clock
    corrupt: bool = False  # the next upload is stored with other bytes of the same size
    tags: dict[str, str] = field(default_factory=dict)  # tag -> commit; "tag:..." is the object of an annotated tag
    settings: dict[str, Any] = field(default_factory=dict)  # path below the repository -> answer or status code
    planned: list[str] = field(default_factory=list)  # faults of the next uploads, the last one first
    immutable: bool = False  # whether a release that is made public becomes immutable
    burned: set[str] = field(default_factory=set)  # tags of immutable releases that were deleted
    latest: int = 0  # id of the release that GitHub shows as the latest
    limits: dict[int, int] = field(default_factory=dict)  # seconds -> content-creating requests; {60: 80, 3600: 500}
    limited: int = 0  # requests that these limits refused
    created: list[float] = field(default_factory=list)  # times of content-creating requests
    url: str = ""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.lock = threading.Lock()
        self.next_id = 100
        self.history: list[tuple[float, list[dict[str, Any]]]] = []

    def now(self) -> float:
        return time.time() + self.clock

    def record(self) -> None:
        """Schedules a change that listings show after `lag` seconds."""
        if self.lag:
            self.history.append((self.now(), copy.deepcopy(list(self.releases.values()))))

    def listed(self) -> list[dict[str, Any]]:
        """The releases as listings show them."""
        if not self.lag:
            return list(self.releases.values())
        before = self.now() - self.lag
        return next((releases for at, releases in reversed(self.history) if at <= before), [])

    def over_limit(self) -> bool:
        """Counts a content-creating request. Whether it is one too many."""
        now = self.now()
        over = any(sum(now - at < seconds for at in self.created) >= most for seconds, most in self.limits.items())
        if over:
            self.limited += 1
        else:
            self.created.append(now)
        return over

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def draw(self, upload: bool) -> str:
        """The fault of the next request, "" for none."""
        if upload and self.planned:
            fault = self.planned.pop()
            self.faults[fault] += 1
            return fault
        if self.random.random() >= self.rate:
            return ""
        fault = self.random.choice(FAULTS if upload else FAULTS[:-1])
        self.faults[fault] += 1
        return fault

    def add_release(self, tag: str, **fields: Any) -> dict[str, Any]:
        number = self.new_id()
        release = {
            "id": number,
            "tag_name": tag,
            "name": tag,
            "body": "",
            "draft": True,
            "prerelease": False,
            "target_commitish": "main",
            "immutable": False,
            "assets": [],
        }
        release |= fields
        release["published_at"] = None if release["draft"] else f"2026-01-{number - 99:02}"
        if not release["draft"]:
            self.tags.setdefault(tag, str(release["target_commitish"]))
        release["upload_url"] = f"{self.url}/upload/{number}/assets{{?name,label}}"
        release["html_url"] = f"{self.url}/{REPOSITORY}/releases/{tag}"
        self.releases[number] = release
        return release

    def add_asset(self, release: dict[str, Any], asked: str, content: bytes, state: str = "uploaded") -> dict[str, Any]:
        """Adds an asset under the name that GitHub gives it. Raises KeyError if the name is taken."""
        name = re.sub(r"[^A-Za-z0-9._+-]", ".", asked)
        if any(asset["name"] == name for asset in release["assets"]):
            raise KeyError(name)
        number = self.new_id()
        done = state == "uploaded"
        asset = {
            "id": number,
            "name": name,
            "state": state,
            "size": len(content) if done else 0,
            "digest": f"sha256:{hashlib.sha256(content).hexdigest()}" if done and self.digests else None,
            "url": f"{self.url}/repos/{REPOSITORY}/releases/assets/{number}",
        }
        self.address(release, asset)
        release["assets"].append(asset)
        self.content[number] = content
        self.stored[name] += done
        return asset

    def address(self, release: dict[str, Any], asset: dict[str, Any]) -> None:
        """The asset's address. Until the release is public, it has a number in place of the tag."""
        tag = f"untagged-{release['id']:020x}" if release["draft"] else release["tag_name"]
        name = quote(asset["name"], safe="")
        asset["browser_download_url"] = f"{self.url}/{REPOSITORY}/releases/download/{tag}/{name}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.hub.now() if timestamp is None else timestamp)

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _serve(self) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        upload = path.startswith("/upload/")
        with hub.lock:
            hub.requests += 1
            number = hub.requests
            fault = hub.draw(upload)
        hub.on_request(number, "before")
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length // 2)
        hub.on_request(number, "mid")
        body += self.rfile.read(length - len(body))
        if len(body) < length or fault == "dropped" or self._asleep(fault, "no answer"):
            self.close_connection = True
            return
        if fault == "error":
            self._answer(503, {"message": "try again"})
            return
        if fault in ("rate limit", "slow down"):
            limited = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(hub.now()) - 1)}
            headers = limited if fault == "rate limit" else {"Retry-After": "0"}
            self._answer(403 if fault == "rate limit" else 429, {"message": "rate limit"}, headers)
            return
        with hub.lock:
            status, content, headers = self._act(path, body, starter=fault == "starter")
            if self.command != "GET":
                hub.record()
        hub.on_request(number, "after")
        if fault in ("late error", "starter"):
            self._answer(502, {"message": "bad gateway"})
        elif fault == "late drop" or self._asleep(fault, "late silence"):
            self.close_connection = True
        else:
            self._answer(status, content, headers, cut=fault == "truncated")
        hub.on_request(number, "answered")

    def _asleep(self, fault: str, kind: str) -> bool:
        """Sleeps longer than the client waits."""
        if fault == kind:
            time.sleep(0.4)
        return fault == kind

    def _answer(
        self, status: int, content: object, headers: dict[str, str] | None = None, *, cut: bool = False
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode() if content is not None else b""
        try:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            self.wfile.flush()
        except OSError:  # the client is dead or has given up
            self.close_connection = True
        self.close_connection = self.close_connection or cut

    def _act(self, path: str, body: bytes, *, starter: bool) -> tuple[int, object, dict[str, str]]:
        hub = self.hub
        anonymous = "Authorization" not in self.headers
        if "/download/" in path and self.command == "GET":
            tag, name = path.split("/")[-2:]
            public = [
                release for release in hub.releases.values() if not release["draft"] and release["tag_name"] == tag
            ]
            result = [asset for release in public for asset in release["assets"] if asset["name"] == name]
            return self._elsewhere(result[0]["id"]) if result else (404, {"message": "Not Found"}, {})
        if path.startswith("/objects/"):
            if not anonymous:
                return 400, {"message": "Only one auth mechanism allowed"}, {}
            return 200, hub.content[int(path.rpartition("/")[2])], {}
        if not self.headers["User-Agent"]:
            return 403, {"message": "Request forbidden by administrative rules."}, {}
        if not anonymous and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, {"message": "Bad credentials"}, {}
        if anonymous and self.command != "GET":
            return 403, {"message": "Resource not accessible"}, {}
        if self.command in ("POST", "PATCH") and not path.endswith("/generate-notes") and hub.over_limit():
            return 403, {"message": "You have exceeded a secondary rate limit. Please wait a few minutes."}, {}
        if path.startswith("/upload/"):
            return self._upload(hub.releases[int(path.split("/")[2])], body, starter=starter)
        path = path.removeprefix(f"/repos/{REPOSITORY}")
        if path in hub.settings and self.command == "GET":
            answer = hub.settings[path]
            return (answer, {"message": "no"}, {}) if isinstance(answer, int) else (200, answer, {})
        if match := re.fullmatch(r"/git/ref/tags/(.+)", path):
            commit = hub.tags.get(match[1], "")
            kind, _, sha = commit.rpartition(":")
            named = {"ref": f"refs/tags/{match[1]}", "object": {"sha": sha, "type": kind or "commit"}}
            return (200, named, {}) if commit else (404, {"message": "Not Found"}, {})
        if match := re.fullmatch(r"/git/tags/(.+)", path):
            return 200, {"object": {"sha": hub.tags[f"object {match[1]}"], "type": "commit"}}, {}
        given = json.loads(body) if body else {}
        if match := re.fullmatch(r"/releases/assets/(\d+)", path):
            return self._asset(int(match[1]), given)
        if match := re.fullmatch(r"/releases/(\d+)/assets", path):
            listed = [release for release in hub.listed() if release["id"] == int(match[1])]
            return self._page([asset for release in listed for asset in release["assets"]])
        if match := re.fullmatch(r"/releases/(\d+)", path):
            return self._release(int(match[1]), given)
        if path == "/releases/generate-notes":
            return 200, {"name": "", "body": "* Faster <kernels>"}, {}
        if path == "/releases" and self.command == "POST":
            if given["tag_name"] in hub.burned:
                error = {"code": "custom", "message": "tag_name was used by an immutable release"}
                return 422, {"message": "Validation Failed", "errors": [error]}, {}
            fields = {name: given[name] for name in ("name", "draft", "prerelease", "target_commitish")}
            return 201, hub.add_release(given["tag_name"], **fields), {}
        if path == "/releases":
            return self._page([r for r in hub.listed() if not (anonymous and r["draft"])])
        return 404, {"message": "Not Found"}, {}

    def _elsewhere(self, number: int) -> tuple[int, object, dict[str, str]]:
        """Leads to the bytes of an asset on another host."""
        return 302, None, {"Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/objects/{number}"}

    def _page(self, entries: list[dict[str, Any]]) -> tuple[int, object, dict[str, str]]:
        address = urlsplit(self.path)
        page = int(parse_qs(address.query).get("page", ["1"])[0])
        headers = {}
        if len(entries) > page * PAGE:
            headers["Link"] = f'<{self.hub.url}{address.path}?page={page + 1}>; rel="next"'
        return 200, entries[(page - 1) * PAGE : page * PAGE], headers

    def _upload(self, release: dict[str, Any], body: bytes, *, starter: bool) -> tuple[int, object, dict[str, str]]:
        name = parse_qs(urlsplit(self.path).query)["name"][0]
        if release["immutable"] and not release["draft"]:
            return 422, {"message": "Cannot upload assets to an immutable release."}, {}
        if not body or not self.headers["Content-Type"]:
            return 400, {"message": "Bad Content-Length or Content-Type"}, {}
        if self.hub.corrupt:
            self.hub.corrupt, body = False, bytes(len(body))
        try:
            asset = self.hub.add_asset(release, name, body, "starter" if starter else "uploaded")
        except KeyError:
            errors = [{"resource": "ReleaseAsset", "code": "already_exists", "field": "name"}]
            return 422, {"message": "Validation Failed", "errors": errors}, {}
        return 201, asset, {}

    def _asset(self, number: int, given: dict[str, Any]) -> tuple[int, object, dict[str, str]]:
        for release in self.hub.releases.values():
            for asset in release["assets"]:
                fixed = release["immutable"] and not release["draft"]
                if asset["id"] == number and self.command != "GET" and fixed:
                    return 422, {"message": "Cannot modify assets of an immutable release."}, {}
                if asset["id"] == number and self.command == "PATCH":
                    if any(other["name"] == given["name"] for other in release["assets"]):
                        return 422, {"message": "Validation Failed", "errors": [{"code": "already_exists"}]}, {}
                    asset["name"] = given["name"]
                    self.hub.address(release, asset)
                    return 200, asset, {}
                if asset["id"] == number and self.command == "DELETE":
                    release["assets"].remove(asset)
                    return 204, None, {}
                if asset["id"] == number:
                    whole = self.headers["Accept"] == "application/octet-stream"
                    return self._elsewhere(number) if whole else (200, asset, {})
        return 404, {"message": "Not Found"}, {}

    def _release(self, number: int, given: dict[str, Any]) -> tuple[int, object, dict[str, str]]:
        if number not in self.hub.releases:
            return 404, {"message": "Not Found"}, {}
        hub, release = self.hub, self.hub.releases[number]
        fixed = release["immutable"] and not release["draft"]
        if self.command == "DELETE":
            if fixed:
                hub.burned.add(release["tag_name"])
            del hub.releases[number]
            return 204, None, {}
        latest = given.pop("make_latest", "true" if given.get("draft") is False else None)
        changes = {name for name, value in given.items() if release.get(name) != value}
        if fixed and changes - {"name", "body", "prerelease"}:
            return 422, {"message": f"Cannot change {sorted(changes)} of an immutable release."}, {}
        stays_draft = given.get("draft", release["draft"])
        if latest not in (None, "true", "false", "legacy"):
            return 422, {"message": "Invalid request. make_latest is not a member of [true, false, legacy]"}, {}
        release.update(given)
        for asset in release["assets"]:
            hub.address(release, asset)
        if given.get("draft") is False:
            release["published_at"] = f"2026-01-{number - 99:02}"
            release["immutable"] = release["immutable"] or hub.immutable
            hub.tags.setdefault(release["tag_name"], release["target_commitish"])
        if latest == "true" and not stays_draft and not release["prerelease"]:
            hub.latest = number
        return 200, release, {}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignores broken connections, because clients are killed in the middle of a request."""


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serves the hub at a free address while the block runs. This process waits as short for it as a test can."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with _Server(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        with mock.patch.object(github, "BACKOFF_SECONDS", min(github.BACKOFF_SECONDS, 0.01)):
            yield hub
        server.shutdown()


def seed(*parts: object) -> int:
    """The seed of a name: the same number in every run."""
    return zlib.crc32(repr(parts).encode())
