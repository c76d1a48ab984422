"""Publishes a directory of wheels as a GitHub release. Run again after any failure, it ends the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rocm_wheels.errors import PublishFailed
from rocm_wheels.matrix import names
from rocm_wheels.publish import assets, catalogue, notes, published, yanks
from rocm_wheels.publish.assets import SUMS, Asset
from rocm_wheels.publish.catalogue import METADATA
from rocm_wheels.publish.github import GitHub
from rocm_wheels.publish.links import Wheel
from rocm_wheels.publish.release import Listing, Release, Say
from rocm_wheels.publish.templates import size
from rocm_wheels.wheel import contents
from rocm_wheels.wheel.numbering import PublicWheel


def publish(api: GitHub, tag: str, dist: Path, *, commit: str, index_url: str, say: Say) -> str:
    """Makes the release of `tag` hold the wheels of `dist`, verified, with notes, and public. Returns its URL.

    A wheel whose contents are public in another release stays there and is not published again. If that holds for
    all of them, nothing is sent, no draft stays and the result is "". PublishFailed or DataError if something must not
    be published (nothing is sent then) or could not be.
    """
    wheels, wanted = assets.collect(dist, commit=commit)
    release = Release(api, tag, commit, say)
    kept = _unchanged(dist, wheels, wanted, published.public_wheels(api, but=tag), say)
    listing = release.without_leftovers()
    if not release.draft:
        kept |= _public_interfaces(listing, wanted, say)
    by_name = {asset.name: asset for asset in wanted}
    for wheel in wheels:
        if wheel.name not in kept and release.foreign_wheel(by_name[wheel.name], wheel.verdict, listing):
            say(f"{wheel.name}: the same contents are there from another run and stay")
            kept.add(wheel.name)
    wanted = [asset for asset in wanted if _owner(asset.name) not in kept]
    if not listing and not any(asset.name.endswith(".whl") for asset in wanted):
        release.drop_empty_draft()
        say(f"nothing is new since the last release: {tag} needs no wheels, and no release")
        return ""
    say(f"release {tag}: {'draft' if release.draft else 'public'}, {len(wanted)} assets to be there")
    release.check(wanted, listing)
    assets.check_count([*listing, *by_name])
    for number, asset in enumerate(wanted, start=1):
        say(f"[{number}/{len(wanted)}] {asset.name} {size(asset.size)}")
        say(f"  {release.upload(asset, listing.get(asset.name))}")
    # Over everything in the release, not only over this directory: wheels may have been added to it later.
    listing = release.verify(wanted)
    sums = assets.sums(_digests(listing))
    say(f"{SUMS}\n  {release.upload(sums, listing.get(SUMS))}")
    release.verify([*wanted, sums])
    say(f"verified: {len(wanted) + 1} assets, by size and sha256")
    count = _write_notes(release, wanted, index_url)
    release.only()
    release.publish()
    say(f"published: {release.fields['html_url']}, {len(wheels)} wheels of {count} in it")
    return str(release.fields["html_url"])


def update_notes(api: GitHub, tag: str, *, index_url: str, say: Say) -> None:
    """Renders the notes again over everything in the release, yanks included."""
    commit = api.tag_commit(tag)
    if commit is None or all(release["tag_name"] != tag for release in api.releases()):
        raise PublishFailed(f"there is no release {tag}", remedy="See `gh release list`.")
    release = Release(api, tag, commit, say)
    count = _write_notes(release, [], index_url)
    say(f"notes of {tag}: {count} wheels, {release.fields['html_url']}")


def dry_run(dist: Path, tag: str, *, index_url: str, repository: str, say: Say) -> None:
    """All checks of `publish` and what it would send, a line for each wheel; nothing is asked of GitHub."""
    wheels, wanted = assets.collect(dist)
    commits = sorted({wheel.verdict.commit for wheel in wheels})
    if len(commits) > 1:
        raise PublishFailed(
            f"the wheels are of several commits: {', '.join(each or 'unknown' for each in commits)}",
            remedy="Build them all from the commit of the release.",
        )
    wanted.append(assets.sums({asset.name: asset.sha256 for asset in wanted}))
    for name, group in groupby(sorted(wanted, key=lambda asset: _owner(asset.name)), lambda asset: _owner(asset.name)):
        own, *beside = sorted(group, key=lambda asset: asset.name != name)
        parts = f" with {', '.join(sorted(asset.name.removeprefix(name) for asset in beside))}" if beside else ""
        say(f"{own.sha256}  {size(sum(asset.size for asset in (own, *beside))):>10}  {name}{parts}")
    notes.render(wheels, tag=tag, index_url=index_url, new="", repository=repository)
    total = size(sum(asset.size for asset in wanted))
    say(f"dry run: release {tag} would hold these {len(wanted)} assets, {total}; nothing was sent")


def _unchanged(
    dist: Path, wheels: Sequence[Wheel], wanted: Sequence[Asset], public: Sequence[PublicWheel], say: Say
) -> set[str]:
    """The wheels whose contents a final release has already. PublishFailed for a public name with other contents."""
    digests = {wheel.name: wheel.verdict.contents for wheel in wheels}
    known = {wheel.name: wheel for wheel in public}
    kept = set()
    for asset in wanted:
        if not asset.name.endswith(".whl") or (other := known.get(asset.name)) is None:
            continue
        if asset.sha256 == other.sha256 and not other.final:
            continue
        digest = digests.get(asset.name) or contents.digest(dist / asset.name)
        if asset.sha256 == other.sha256 or (other.final and digest == other.contents):
            say(f"{asset.name}: unchanged, it stays in the release that has it")
            kept.add(asset.name)
        else:
            raise PublishFailed(
                f"{asset.name} is published with other content",
                remedy="Build with --published, which gives changed contents the next build number.",
            )
    return kept


def _public_interfaces(listing: Listing, wanted: Sequence[Asset], say: Say) -> set[str]:
    """The wheels of interfaces that are public in this release: built again with another Python they are the same
    but for the version of the build backend."""
    kept = {asset.name for asset in wanted if names.is_interface(asset.name) and asset.name in listing}
    for name in sorted(kept):
        say(f"{name}: the one that is public stays")
    return kept


def _owner(name: str) -> str:
    """The wheel that an asset belongs to."""
    for suffix in (METADATA, names.VERDICT):
        name = name.removesuffix(suffix)
    return names.labelled(name)


def _digests(listing: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {name: catalogue.asset_sha256(asset) or "" for name, asset in listing.items()}


def _write_notes(release: Release, wanted: Sequence[Asset], index_url: str) -> int:
    """Sets name and notes of the release. Returns how many wheels it holds. PublishFailed for a mixture of commits."""
    api, tag = release.api, release.tag
    wheels = _wheels_of(release, wanted)
    if others := [wheel for wheel in wheels if wheel.verdict.commit != release.commit]:
        raise PublishFailed(
            f"release {tag} is of commit {release.commit} and holds {others[0].name} of {others[0].verdict.commit}",
            remedy=f"Delete the draft and start again: gh release delete {tag}",
        )
    page = notes.render(
        wheels, tag=tag, index_url=index_url, new=api.generated_notes(tag, release.commit), repository=api.repository
    )
    release.update(name=tag, body=page)
    return len(wheels)


def _wheels_of(release: Release, wanted: Sequence[Asset]) -> list[Wheel]:
    """All wheels of the release. What lies in this directory is not fetched again."""
    local = {asset.name: asset for asset in wanted}

    def fetch(asset: Mapping[str, Any]) -> bytes:
        known = local.get(asset["name"])
        if known is None:
            return release.api.download(asset["url"])
        with known.open() as file:
            return file.read()

    fields = {**release.fields, "assets": list(release.listing().values())}
    found = catalogue.from_releases([fields], fetch, yanks.load(), yanks.withdrawn())
    if found.problems:
        raise PublishFailed(
            "\n".join(found.problems), remedy="Download the wheel, run `verify` on it, and publish both again."
        )
    return list(found.wheels)
