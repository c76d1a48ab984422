"""The wheels of GitHub releases, as values."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from packaging.version import InvalidVersion, Version

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names, release_plan
from rocm_wheels.matrix.names import METADATA, VERDICT
from rocm_wheels.matrix.release_plan import FILE, ReleasePlan, lacking
from rocm_wheels.publish.links import (
    InterfaceWheel,
    Link,
    UnlabelledWheel,
    Wheel,
    bare_link,
    interface_link,
    unlabelled_link,
    wheel_link,
)
from rocm_wheels.wheel import verdict
from rocm_wheels.wheel.verdict import Verdict

_FETCHES = 8
_FIELDS = {"tag_name", "id", "draft", "prerelease", "published_at", "assets"}  # fields of a release that are read

Fetch = Callable[[Mapping[str, Any]], bytes]


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Everything that was ever public.

    unverified: wheels without a test report of success. They stay listed, because lock files name them, unless uv would
    prefer them to a verified wheel. problems: what is wrong with the releases.
    """

    wheels: tuple[Wheel, ...] = ()
    interfaces: tuple[InterfaceWheel, ...] = ()
    unlabelled: tuple[UnlabelledWheel, ...] = ()
    unverified: tuple[Link, ...] = ()
    problems: tuple[str, ...] = ()


def final(releases: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The releases without drafts and candidates."""
    return [release for release in releases if not release["draft"] and not release["prerelease"]]


def from_releases(
    releases: Iterable[Mapping[str, Any]],
    fetch: Fetch,
    yanked: Mapping[str, str],
    withdrawn: Mapping[str, str] | None = None,
) -> Catalogue:
    """The wheels of releases as GitHub's API describes them.

    fetch: returns the bytes of an asset; metadata and test reports are assets next to each wheel. If one of them is
    missing or does not match, only that wheel is a problem. Wheels of other people are skipped. yanked, withdrawn: file
    name -> reason.
    """
    problems: list[str] = []
    entries = _by_name(releases, problems)
    with ThreadPoolExecutor(_FETCHES) as pool:
        links = list(pool.map(lambda entry: _released(fetch, entry, yanked, problems), entries))
    links = _without_newer_builds([_withdrawn(link, withdrawn or {}) for link in links])
    links = _without_smaller_builds(links)
    wheels = [link for link in links if isinstance(link, Wheel)]
    interfaces = [link for link in links if isinstance(link, InterfaceWheel)]
    others = [link for link in links if not isinstance(link, (Wheel, InterfaceWheel))]
    released = {entry.asset["name"]: entry for entry in entries}
    unlabelled = [_unlabelled(fetch, released[wheel.name], wheel, problems) for wheel in wheels]
    return Catalogue(
        wheels=tuple(sorted(wheels)),
        interfaces=tuple(sorted(interfaces, key=lambda link: link.name)),
        unlabelled=tuple(sorted((link for link in unlabelled if link), key=lambda link: link.name)),
        unverified=tuple(sorted(others, key=lambda link: link.name)),
        problems=tuple(sorted(problems)),
    )


def plan_of(release: Mapping[str, Any], fetch: Fetch) -> ReleasePlan | None:
    """The plan in a release as GitHub's API describes it; None if it has none. Raises DataError for another file."""
    for asset in release["assets"]:
        if asset["name"] == FILE and asset["state"] == "uploaded":
            return release_plan.parse(f"{FILE} of {release['tag_name']}", fetch(asset))
    return None


def newest(wheels: Iterable[Wheel]) -> list[Wheel]:
    """One build of each wheel: of the newest release, and a yanked build only if all builds are yanked."""
    builds: dict[str, Wheel] = {}
    for wheel in sorted(wheels, key=lambda wheel: (wheel.yanked is None, release_key(wheel.release), wheel.build)):
        builds[names.stem(wheel.name)] = wheel
    return sorted(builds.values())


def release_key(tag: str) -> Version:
    """Sort key of a release's tag, by version; a tag that is not a version sorts first."""
    try:
        return Version(tag.removeprefix("v"))
    except InvalidVersion:
        return Version("0.dev0")


def load_releases(text: str) -> list[dict[str, Any]]:
    """The releases in an answer of GitHub's API: one, a list, or a list of pages. Raises DataError if there are
    none.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"the releases are not JSON: {error}") from error
    releases = list(_flat(content))
    if not all(isinstance(release, dict) and release.keys() >= _FIELDS for release in releases):
        raise DataError(
            "this JSON is not a list of GitHub releases",
            remedy="Make it with: gh api --paginate --slurp repos/OWNER/NAME/releases",
        )
    return releases


def asset_sha256(asset: Mapping[str, Any]) -> str | None:
    """GitHub's digest of an asset; None for an asset from before GitHub computed digests."""
    algorithm, _, value = str(asset.get("digest") or "").partition(":")
    return value if algorithm == "sha256" else None


def checked_verdict(name: str, sha256: str, content: bytes) -> Verdict:
    """The test report of a wheel. Raises DataError if there is none, if it is about other bytes, or if the wheel did
    not pass.
    """
    report = verdict.parse(name + VERDICT, content)
    if (report.wheel, report.sha256) != (name, sha256):
        raise DataError(f"the verdict beside {name} is about another file of that name")
    if not report.ok:
        raise DataError(f"{name} did not pass its tests")
    return report


@dataclass(frozen=True, kw_only=True)
class _Released:
    tag: str
    asset: Mapping[str, Any]
    there: Mapping[str, Mapping[str, Any]]  # assets of the release, by name


def _by_name(releases: Iterable[Mapping[str, Any]], problems: list[str]) -> list[_Released]:
    """Our wheels, by name. If several releases have a name, the newest release counts; other bytes under it are a
    problem.
    """
    entries: dict[str, _Released] = {}
    for release in sorted(releases, key=lambda release: (release_key(release["tag_name"]), release["id"])):
        there = {asset["name"]: asset for asset in release["assets"] if asset["state"] == "uploaded"}
        for name, asset in there.items():
            if not (names.is_wheel(name) or names.is_interface(name)):
                continue
            other = entries.get(name)
            if other is not None and asset_sha256(other.asset) != asset_sha256(asset):
                problems.append(f"{name} has other bytes in release {other.tag} than in {release['tag_name']}")
            entries[name] = _Released(tag=release["tag_name"], asset=asset, there=there)
    return list(entries.values())


def _released(fetch: Fetch, entry: _Released, yanked: Mapping[str, str], problems: list[str]) -> Link:
    """The wheel; if it is invalid, a plain link, and the reason is appended to `problems`."""
    name = entry.asset["name"]
    common = {"url": _address(entry.asset["browser_download_url"], entry.tag), "release": entry.tag}
    reason = yanked.get(name)
    sha256 = asset_sha256(entry.asset)
    metadata = b""
    try:
        metadata = _beside(fetch, entry, METADATA)
        if names.is_interface(name):
            return interface_link(name, sha256 or _sha256(fetch(entry.asset)), metadata, yanked=reason, **common)
        content = _beside(fetch, entry, VERDICT)
        sha256 = sha256 or _sha256(fetch(entry.asset))
        report = checked_verdict(name, sha256, content)
        return wheel_link(name, sha256, entry.asset["size"], metadata, report, yanked=reason, **common)
    except DataError as error:
        problems.append(f"release {entry.tag}: {error.message}")
        sha256 = sha256 or _sha256(fetch(entry.asset))
        return bare_link(
            name, sha256, metadata, yanked=reason or "it is not known whether it passed its tests", **common
        )


def _unlabelled(fetch: Fetch, entry: _Released, wheel: Wheel, problems: list[str]) -> UnlabelledWheel | None:
    """The wheel without label in the release of a universal wheel, with the same marks; None if the release does not
    have it.
    """
    name = names.unlabelled(wheel.name)
    if name is None or name not in entry.there:
        return None
    asset = entry.there[name]
    try:
        metadata = _beside(fetch, replace(entry, asset=asset), METADATA)
        sha256 = asset_sha256(asset) or _sha256(fetch(asset))
        return unlabelled_link(wheel, name, _address(asset["browser_download_url"], entry.tag), sha256, metadata)
    except DataError as error:
        problems.append(f"release {entry.tag}: {error.message}")
        return None


def _beside(fetch: Fetch, entry: _Released, suffix: str) -> bytes:
    name = entry.asset["name"] + suffix
    if name not in entry.there:
        raise DataError(f"{entry.asset['name']} is there without its {suffix}")
    content = fetch(entry.there[name])
    known = asset_sha256(entry.there[name])
    if known is not None and _sha256(content) != known:
        raise DataError(f"{name} came with other bytes than its digest {known}")
    return content


def _withdrawn(link: Link, reasons: Mapping[str, str]) -> Link:
    """The link, unlisted if its name is withdrawn."""
    reason = reasons.get(link.name)
    return link if reason is None else replace(link, yanked=reason, listed=False)


def _without_newer_builds(links: Sequence[Link]) -> list[Link]:
    """The links. A build number above the one of the newest release is unlisted: it is a backport or an unverified
    wheel.

    Installers take the highest build number, and uv takes it for an exact pin even if it is yanked. Wheels that a
    maintainer has yanked stay listed.
    """
    newest_builds: dict[str, Link] = {}
    for link in sorted(links, key=lambda link: (release_key(link.release), link.build)):
        if link.yanked is None:
            newest_builds[names.stem(link.name)] = link
    listing = []
    for link in links:
        top = newest_builds.get(names.stem(link.name))
        bare = not isinstance(link, (Wheel, InterfaceWheel))
        if top is not None and link.build > top.build and (link.yanked is None or bare):
            link = replace(link, listed=False, yanked=link.yanked or f"{top.name} of release {top.release} is newer")
        listing.append(link)
    return listing


def _without_smaller_builds(links: Sequence[Link]) -> list[Link]:
    """The links. A build that lacks a GPU of a build with a lower number is unlisted, because installers prefer it."""
    wheels = [link for link in links if isinstance(link, Wheel) and link.listed and link.yanked is None]
    stems: dict[str, list[Wheel]] = {}
    for wheel in wheels:
        stems.setdefault(names.stem(wheel.name), []).append(wheel)
    reasons = {}
    for wheel in wheels:
        for other in stems[names.stem(wheel.name)]:
            if other.build < wheel.build and (less := lacking(wheel.targets, other.targets)):
                reasons[wheel.name] = f"{other.name} of release {other.release} also serves {', '.join(less)}"
    return [replace(link, listed=False, yanked=reasons[link.name]) if link.name in reasons else link for link in links]


def _flat(content: object) -> Iterator[Any]:
    if isinstance(content, list):
        for entry in content:
            yield from _flat(entry)
    else:
        yield content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _address(url: str, tag: str) -> str:
    """The URL of an asset once its release is public. The file name is percent-encoded: "+" becomes "%2B"."""
    base, _, name = url.rpartition("/")
    # Until it is published, a draft has "untagged-59c9e54950e6d2824cb8" in place of the tag.
    base = re.sub(r"(?<=/download/)untagged-[0-9a-f]+$", lambda _: quote(tag), base)
    return f"{base}/{quote(unquote(name), safe='')}"
