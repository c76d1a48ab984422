"""Publishes a directory of wheels as a GitHub release; run again after any failure, it ends the same."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rocm_wheels.errors import PublishFailed
from rocm_wheels.matrix import names
from rocm_wheels.publish import assets, catalogue, github, notes
from rocm_wheels.publish.assets import SUMS, Asset
from rocm_wheels.publish.catalogue import METADATA, YANKED
from rocm_wheels.publish.entry import Wheel
from rocm_wheels.publish.github import GitHub, Unanswered
from rocm_wheels.publish.templates import size

Say = Callable[[str], None]
_AGAIN = "Run the same command again: it goes on from what is there."


class Release:
    """The release of one tag; every method may be interrupted and repeated."""

    def __init__(self, api: GitHub, tag: str, say: Say) -> None:
        self.api = api
        self.tag = tag
        self.say = say
        self.fields = self._find_or_create()

    @property
    def draft(self) -> bool:
        return bool(self.fields["draft"])

    def listing(self) -> dict[str, dict[str, Any]]:
        """The assets by name, of any state, as GitHub has them now."""
        return {asset["name"]: asset for asset in self.api.assets(self.fields["id"])}

    def upload(self, wanted: Asset, there: Mapping[str, Any] | None) -> str:
        """Makes the asset be there, and says how; `there` is what the last listing had under its name."""
        if there is not None and wanted.is_there(there):
            return "already there"
        started = time.monotonic()
        for attempt in range(github.ATTEMPTS):
            there = self._send(wanted, there, attempt)
            if there is not None and wanted.is_there(there):
                return f"sent in {time.monotonic() - started:.1f} s"
        raise PublishFailed(f"{wanted.name} could not be sent in {github.ATTEMPTS} attempts", remedy=_AGAIN)

    def remove_unfinished(self) -> dict[str, dict[str, Any]]:
        """The listing, after uploads that never finished are deleted: they block their names."""
        listing = self.listing()
        for name, asset in list(listing.items()):
            if asset["state"] != "uploaded":
                self.say(f"  {name}: an unfinished upload is deleted")
                self.api.delete_asset(asset["id"])
                del listing[name]
        return listing

    def check(self, wanted: list[Asset], listing: Mapping[str, Mapping[str, Any]]) -> None:
        """PublishFailed if one of these would replace what others rely on."""
        for asset in wanted:
            there = listing.get(asset.name)
            if there is not None and not asset.is_there(there):
                self._may_replace(asset, there)

    def verify(self, wanted: list[Asset]) -> None:
        """PublishFailed unless every asset is there, with its size and its digest."""
        listing = self.listing()
        wrong = [
            asset.name
            for asset in wanted
            if asset.name not in listing
            or not asset.is_there(listing[asset.name])
            or self._digest(listing[asset.name]) != asset.sha256
        ]
        if wrong:
            raise PublishFailed(f"release {self.tag} does not hold what was sent: {', '.join(wrong)}", remedy=_AGAIN)

    def digests(self) -> dict[str, str]:
        """sha256 of every finished asset that others rely on."""
        return {name: self._digest(asset) for name, asset in self.listing().items() if not name.endswith(YANKED)}

    def update(self, **fields: Any) -> None:
        """Sets fields of the release; what already has its value is not sent."""
        if any(self.fields.get(name) != value for name, value in fields.items()):
            self.fields = self.api.update_release(self.fields["id"], **fields)

    def _send(self, wanted: Asset, there: Mapping[str, Any] | None, attempt: int) -> Mapping[str, Any] | None:
        """Replaces what is there, in one attempt; what is there after it."""
        if there is not None:
            self._may_replace(wanted, there)
            self.api.delete_asset(there["id"])
        try:
            there = self.api.upload(self.fields["upload_url"], wanted.name, wanted.open, wanted.content_type)
        except Unanswered as problem:
            wait = github.backoff(attempt)
            self.say(f"  {problem}; looking again in {wait:.0f} s")
            time.sleep(wait)
            return self.listing().get(wanted.name)
        if there["name"] != wanted.name:
            self.api.delete_asset(there["id"])
            raise PublishFailed(f"GitHub stored {wanted.name} as {there['name']}", remedy="Rename the file.")
        return there

    def _digest(self, asset: Mapping[str, Any]) -> str:
        return catalogue.asset_sha256(asset) or hashlib.sha256(self.api.download(asset["url"])).hexdigest()

    def _may_replace(self, wanted: Asset, there: Mapping[str, Any]) -> None:
        if wanted.final and not self.draft and there["state"] == "uploaded":
            raise PublishFailed(
                f"{wanted.name} is published with other content",
                remedy="A published file never changes: publish under a new tag, and yank the wheel if it is wrong.",
            )

    def _find_or_create(self) -> dict[str, Any]:
        for attempt in range(github.ATTEMPTS):
            if found := self.only():
                return found
            try:
                commit = {"target_commitish": os.environ["GITHUB_SHA"]} if os.environ.get("GITHUB_SHA") else {}
                return self.api.create_release(
                    tag_name=self.tag, name=self.tag, draft=True, prerelease=names.is_candidate(self.tag), **commit
                )
            except Unanswered as problem:
                wait = github.backoff(attempt)
                self.say(f"{problem}; looking again in {wait:.0f} s")
                time.sleep(wait)
        raise PublishFailed(f"no draft of {self.tag} could be made", remedy=_AGAIN)

    def only(self) -> dict[str, Any] | None:
        """The published release of the tag, else its oldest draft; a draft that was made twice is deleted."""
        found = [release for release in self.api.releases() if release["tag_name"] == self.tag]
        found.sort(key=lambda release: (release["draft"], release["id"]))
        for other in found[1:]:
            if other["draft"]:
                self.say(f"draft {other['id']} of {self.tag} is there a second time and is deleted")
                self.api.delete_release(other["id"])
        return found[0] if found else None


def publish(api: GitHub, tag: str, dist: Path, *, index_url: str, say: Say) -> str:
    """Makes the release of `tag` hold the wheels of `dist`, verified, with notes, and public; returns its URL.

    PublishFailed or DataError if something must not be published (nothing is sent then) or could not be.
    """
    wheels, wanted = assets.collect(dist)
    release = Release(api, tag, say)
    say(f"release {tag}: {'draft' if release.draft else 'public'}, {len(wanted)} assets to be there")
    listing = release.remove_unfinished()
    if not release.draft:
        wanted = _without_public_interfaces(wanted, listing, say)
    release.check(wanted, listing)
    assets.check_count([*listing, *(asset.name for asset in wanted)])
    for number, asset in enumerate(wanted, start=1):
        say(f"[{number}/{len(wanted)}] {asset.name} {size(asset.size)}")
        say(f"  {release.upload(asset, listing.get(asset.name))}")
    # Over all the release holds, not only over this directory: wheels may have been added to it later.
    sums = assets.sums(release.digests())
    say(f"{SUMS}\n  {release.upload(sums, release.listing().get(SUMS))}")
    release.verify([*wanted, sums])
    say(f"verified: {len(wanted) + 1} assets, by size and sha256")
    count = _write_notes(release, wanted, index_url)
    release.only()
    release.update(draft=False, prerelease=names.is_candidate(tag))
    say(f"published: {release.fields['html_url']}, {len(wheels)} wheels of {count} in it")
    return str(release.fields["html_url"])


def update_notes(api: GitHub, tag: str, *, index_url: str, say: Say) -> None:
    """Renders the notes anew over all that the release holds, yanks included."""
    release = _existing(api, tag, say)
    count = _write_notes(release, [], index_url)
    say(f"notes of {tag}: {count} wheels, {release.fields['html_url']}")


def dry_run(dist: Path, tag: str, *, index_url: str, repository: str, say: Say) -> None:
    """All checks of `publish` and what it would send; nothing is asked of GitHub."""
    wheels, wanted = assets.collect(dist)
    wanted.append(assets.sums({asset.name: asset.sha256 for asset in wanted}))
    for asset in wanted:
        say(f"{asset.sha256}  {size(asset.size):>10}  {asset.name}")
    notes.render(wheels, tag=tag, index_url=index_url, new="", repository=repository)
    total = size(sum(asset.size for asset in wanted))
    say(f"dry run: release {tag} would hold these {len(wanted)} assets, {total}; nothing was sent")


def yank(api: GitHub, tag: str, wheel: str, reason: str | None, *, say: Say) -> None:
    """Marks a published wheel as yanked, or with `reason` None takes the mark away. The index shows it when rebuilt."""
    release = _existing(api, tag, say)
    listing = release.listing()
    if wheel not in listing:
        raise PublishFailed(f"release {tag} holds no {wheel}", remedy="Give the whole file name of the wheel.")
    mark = listing.get(wheel + YANKED)
    if reason is not None:
        say(f"{wheel}: yanked ({reason}), {release.upload(assets.yank(wheel, reason), mark)}")
    elif mark is not None:
        api.delete_asset(mark["id"])
        say(f"{wheel}: no longer yanked")
    else:
        raise PublishFailed(f"{wheel} is not yanked")


def _existing(api: GitHub, tag: str, say: Say) -> Release:
    if all(release["tag_name"] != tag for release in api.releases()):
        raise PublishFailed(f"there is no release {tag}", remedy="See `gh release list`.")
    return Release(api, tag, say)


def _without_public_interfaces(wanted: list[Asset], listing: Mapping[str, Any], say: Say) -> list[Asset]:
    """What is wanted but for the wheels of flash-attn-3, and their metadata, that are public.

    The same sources give other bytes under another version of the build backend, which writes it into the wheel.
    """
    public = {name for name in listing if names.is_interface(name)}
    public |= {name + METADATA for name in public} & listing.keys()
    for asset in wanted:
        if asset.name in public:
            say(f"{asset.name}: the one that is public stays")
    return [asset for asset in wanted if asset.name not in public]


def _write_notes(release: Release, wanted: list[Asset], index_url: str) -> int:
    """Sets name and notes of the release; how many wheels it holds."""
    api, tag = release.api, release.tag
    everything = _everything(release, wanted)
    new = api.generated_notes(tag)
    page = notes.render(everything, tag=tag, index_url=index_url, new=new, repository=api.repository)
    release.update(name=tag, body=page)
    return len(everything)


def _everything(release: Release, wanted: list[Asset]) -> list[Wheel]:
    """All wheels of the release; what lies in this directory is not fetched again."""
    local = {asset.name: asset for asset in wanted}

    def fetch(asset: Mapping[str, Any]) -> bytes:
        known = local.get(asset["name"])
        if known is None:
            return release.api.download(asset["url"])
        with known.open() as file:
            return file.read()

    fields = {**release.fields, "assets": list(release.listing().values())}
    return catalogue.from_releases([fields], fetch)
