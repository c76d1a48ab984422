"""Wheels that can be installed from somewhere, as values: read from a directory or from GitHub releases."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from email.parser import HeaderParser
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.publish.entry import Interface, Wheel
from rocm_wheels.wheel.verdict import parse as parse_verdict

METADATA = ".metadata"
YANKED = ".yanked"
_FETCHES = 8
_FIELDS = {"tag_name", "id", "draft", "prerelease", "published_at", "assets"}  # of a release that are read

Fetch = Callable[[Mapping[str, Any]], bytes]


def from_directory(directory: Path) -> list[Wheel]:
    """The wheels of a directory; their URLs are their bare names.

    DataError if a wheel is none of ours, has no verdict beside it or did not pass, or the verdict is about other bytes.
    """
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory", remedy="Give the one that holds the wheels.")
    found = [path for path in sorted(directory.glob("*.whl")) if not names.is_interface(path.name)]
    wheels = [local_wheel(path) for path in found]
    if not wheels:
        raise DataError(f"{directory} holds no wheel", remedy="Build one: ./build_rocm.sh 2.8.3 3.11 2.5.1 6.2")
    return sorted(wheels)


def interfaces_in(directory: Path) -> list[Interface]:
    """The wheels of flash-attn-3 of a directory; their URLs are their bare names."""
    found = [path for path in sorted(directory.glob("*.whl")) if names.is_interface(path.name)]
    return [_interface(path.name, file_sha256(path), core_metadata(path), url=path.name) for path in found]


def local_wheel(path: Path) -> Wheel:
    """The wheel in a file, with the verdict beside it."""
    written = path.with_name(path.name + VERDICT)
    if not written.is_file():
        raise DataError(f"{path.name} has no verdict", remedy="`build` writes it beside the wheel: copy both.")
    verdict = parse_verdict(written.name, written.read_bytes())
    if not verdict["ok"]:
        raise DataError(f"{path.name} did not pass its tests", remedy=f"See {written.name}.")
    return _wheel(
        path.name, file_sha256(path), path.stat().st_size, core_metadata(path), verdict, url=path.name, release=""
    )


def from_releases(releases: Iterable[Mapping[str, Any]], fetch: Fetch) -> list[Wheel]:
    """The wheels of releases as GitHub's API describes them; `fetch` gives the bytes of an asset.

    Of wheels with the same name the one of the newest release counts, of those that are not yanked if there is one.
    Metadata, verdicts and yanks are assets beside each wheel. DataError if one is missing or not what its digest says.
    Other people's wheels are passed over.
    """
    with ThreadPoolExecutor(_FETCHES) as pool:
        return sorted(pool.map(lambda found: _released(fetch, *found), _newest(releases, names.is_wheel)))


def final(releases: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The releases that people are led to: neither drafts nor candidates."""
    return [release for release in releases if not release["draft"] and not release["prerelease"]]


def interfaces_of(releases: Iterable[Mapping[str, Any]], fetch: Fetch) -> list[Interface]:
    """The wheels of flash-attn-3 of releases; the rest as with `from_releases`."""
    with ThreadPoolExecutor(_FETCHES) as pool:
        found = pool.map(lambda found: _released_interface(fetch, *found), _newest(releases, names.is_interface))
        return sorted(found, key=lambda interface: interface.name)


def load_releases(text: str) -> list[dict[str, Any]]:
    """The releases in an answer of GitHub's API: one, a list, or a list of pages. DataError if it is none."""
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


def core_metadata(path: Path) -> bytes:
    """The METADATA file of a wheel (PEP 658). DataError if the file is not a wheel of its name."""
    stem = "-".join(path.name.split("-")[:2])
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(f"{stem}.dist-info/METADATA")
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise DataError(f"{path.name} is not a wheel of that name: {error}") from error


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def asset_sha256(asset: Mapping[str, Any]) -> str | None:
    """GitHub's own digest of an asset; None for assets from before it kept them."""
    algorithm, _, value = str(asset.get("digest") or "").partition(":")
    return value if algorithm == "sha256" else None


def _flat(content: object) -> Iterator[Any]:
    if isinstance(content, list):
        for entry in content:
            yield from _flat(entry)
    else:
        yield content


def _newest(releases: Iterable[Mapping[str, Any]], ours: Callable[[str], bool]) -> Iterable[tuple[Any, ...]]:
    """(tag, asset, the release's assets by name) of each wheel that is `ours`, by name the one that counts."""
    found = []
    for release in sorted(releases, key=lambda release: (release["published_at"] or "", release["id"])):
        there = {asset["name"]: asset for asset in release["assets"] if asset["state"] == "uploaded"}
        found += [(release["tag_name"], asset, there) for name, asset in there.items() if ours(name)]
    found.sort(key=lambda wheel: wheel[1]["name"] + YANKED not in wheel[2])  # yanked ones first, each part by age
    return {asset["name"]: (tag, asset, there) for tag, asset, there in found}.values()


def _beside(fetch: Fetch, tag: str, name: str, there: Mapping[str, Mapping[str, Any]], suffix: str) -> bytes:
    if name + suffix not in there:
        raise DataError(
            f"release {tag} has {name} without its {suffix}", remedy=f"Run `publish --tag {tag}` again with both."
        )
    other = there[name + suffix]
    content = fetch(other)
    known = asset_sha256(other)
    if known is not None and hashlib.sha256(content).hexdigest() != known:
        raise DataError(f"{name}{suffix} of release {tag} came with other bytes than its digest {known}")
    return content


def _released(fetch: Fetch, tag: str, asset: Mapping[str, Any], there: Mapping[str, Mapping[str, Any]]) -> Wheel:
    name = asset["name"]
    beside = partial(_beside, fetch, tag, name, there)
    verdict = parse_verdict(name + VERDICT, beside(VERDICT))
    return _wheel(
        name,
        asset_sha256(asset) or str(verdict["sha256"]),
        asset["size"],
        beside(METADATA),
        verdict,
        url=_address(asset["browser_download_url"], tag),
        release=tag,
        yanked=beside(YANKED).decode().strip() if name + YANKED in there else None,
    )


def _released_interface(
    fetch: Fetch, tag: str, asset: Mapping[str, Any], there: Mapping[str, Mapping[str, Any]]
) -> Interface:
    name = asset["name"]
    beside = partial(_beside, fetch, tag, name, there)
    return _interface(
        name,
        asset_sha256(asset) or hashlib.sha256(fetch(asset)).hexdigest(),
        beside(METADATA),
        url=_address(asset["browser_download_url"], tag),
        yanked=beside(YANKED).decode().strip() if name + YANKED in there else None,
    )


def _address(url: str, tag: str) -> str:
    """The URL of an asset once its release is public, with its file name escaped in full: a "+" in it is "%2B"."""
    base, _, name = url.rpartition("/")
    # That of a draft has "untagged-59c9e54950e6d2824cb8" in the place of the tag, until it is published.
    base = re.sub(r"(?<=/download/)untagged-[0-9a-f]+$", lambda _: quote(tag), base)
    return f"{base}/{quote(unquote(name), safe='')}"


def _wheel(
    name: str,
    sha256: str,
    size: int,
    metadata: bytes,
    verdict: Mapping[str, Any],
    *,
    url: str,
    release: str,
    yanked: str | None = None,
) -> Wheel:
    parsed = names.parse(name)
    headers = _headers(name, metadata)
    if verdict["sha256"] != sha256:
        where = f"{name} in release {release}" if release else name
        remedy = f"Run `publish --tag {release}` again with both." if release else "Build it again."
        raise DataError(f"the verdict beside {where} is about another file of that name", remedy=remedy)
    return Wheel(
        name=name,
        url=url,
        sha256=sha256,
        size=size,
        metadata_sha256=hashlib.sha256(metadata).hexdigest(),
        requires_python=headers["Requires-Python"] or "",
        yanked=yanked,
        release=release,
        flash_attn=parsed.flash_attn,
        python=parsed.python,
        torch=parsed.torch_minor,
        rocm=parsed.rocm,
        backend=parsed.backend,
        targets=tuple(verdict["targets"]),
        verdict=verdict,
    )


def _interface(name: str, sha256: str, metadata: bytes, *, url: str, yanked: str | None = None) -> Interface:
    rocm, torch, backend = names.parse_interface(name)
    return Interface(
        name=name,
        url=url,
        sha256=sha256,
        metadata_sha256=hashlib.sha256(metadata).hexdigest(),
        requires_python=_headers(name, metadata)["Requires-Python"] or "",
        yanked=yanked,
        torch=torch,
        rocm=rocm,
        backend=backend,
    )


def _headers(name: str, metadata: bytes) -> Message:
    headers = HeaderParser().parsestr(metadata.decode())
    if headers["Version"] != name.split("-")[1]:
        raise DataError(f"the metadata in {name} is of version {headers['Version']}")
    return headers
