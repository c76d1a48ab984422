"""Publishes a directory of wheels as a GitHub release. Run again after any failure, it ends with the same result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.matrix import names
from rocm_wheels.matrix.release_plan import FILE
from rocm_wheels.publish import assets, catalogue, notes, plans, published, yanks
from rocm_wheels.publish.assets import SUMS, Asset
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.publish.directory import Directory
from rocm_wheels.publish.github import GitHub
from rocm_wheels.publish.links import Wheel
from rocm_wheels.publish.release import Listing, Release, Say
from rocm_wheels.publish.templates import size
from rocm_wheels.wheel import verdict
from rocm_wheels.wheel.numbering import PublicWheel


def publish(api: GitHub, tag: str, dist: Path, *, commit: str, index_url: str, say: Say) -> str:
    """Publishes the wheels of `dist` in the release of `tag`, checked and with notes. Returns its URL.

    A wheel whose contents are public in another release stays there and is not published again. If that is true for all
    of them, nothing is sent, no draft stays, and the result is "". Raises PublishFailed or DataError if something must
    not be published (nothing is sent then) or could not be published.
    """
    directory, uploads = assets.collect(dist, commit=commit)
    wheels = directory.wheels
    own, public = plans.of_directory(directory, tag, commit), published.public_wheels(api, but=tag)
    plans.check_targets(own, public)
    unchanged = _unchanged(directory, uploads, public, say)
    own = own.unchanged({names.stem(name): release for name, release in unchanged.items()})
    kept = set(unchanged)
    release = Release(api, tag, commit, say)
    listing = release.without_leftovers()
    if not release.draft:
        kept |= _public_packings(listing, uploads, say)
    by_name = {asset.name: asset for asset in uploads}
    for wheel in wheels:
        if wheel.name not in kept and release.foreign_wheel(by_name[wheel.name], wheel.verdict, listing):
            say(f"{wheel.name}: the same contents are there from another run and stay")
            kept.add(wheel.name)
    reports = {
        name: _with_reports(release, wheel, by_name[name], listing, say)
        for wheel in wheels
        if wheel.name not in kept and (name := wheel.name + names.VERDICT)
    }
    sent = [reports.get(asset.name, asset) for asset in uploads if names.owner(asset.name) not in kept]
    uploads = [asset for asset in sent if asset is not None]
    if not listing.keys() - {FILE} and not any(asset.name.endswith(".whl") for asset in uploads):
        release.drop_empty_draft()
        say(f"nothing is new since the last release: {tag} needs no wheels, and no release")
        return ""
    say(f"release {tag}: {'draft' if release.draft else 'public'}, {len(uploads)} assets to be there")
    release.check(uploads, listing)
    assets.check_count([*listing, *by_name, FILE])
    known = plans.held(release, listing) is not None
    listing = plans.drop_leftovers(release, plans.write(release, own), release.listing(), known=known)
    try:
        for number, asset in enumerate(uploads, start=1):
            say(f"[{number}/{len(uploads)}] {asset.name} {size(asset.size)}")
            say(f"  {release.upload(asset, listing.get(asset.name))}")
    except PublishFailed:
        # Another run may have published the release meanwhile: its sums must cover the files added so far.
        with suppress(PublishFailed):
            if not release.still_draft():
                release.write_sums([])
        raise
    # Over everything in the release, not only this directory, because wheels may have been added later.
    say(f"{SUMS}\n  {release.write_sums(uploads)}")
    say(f"verified: {len(uploads) + 1} assets, by size and sha256")
    stock = _wheels_of(release, uploads)
    _write_notes(release, stock, index_url)
    release.check_only()
    plans.check_complete(release, own, stock)
    release.publish()
    release.write_sums(uploads)  # another run may have added files between the check and the publication
    say(f"published: {release.fields['html_url']}, {len(wheels)} wheels of {len(stock.wheels)} in it")
    return str(release.fields["html_url"])


def update_notes(api: GitHub, tag: str, *, index_url: str, say: Say) -> None:
    """Renders the notes again for everything in the release, with yanks."""
    commit = api.tag_commit(tag)
    if commit is None or all(release["tag_name"] != tag for release in api.releases()):
        raise PublishFailed(f"there is no release {tag}", remedy="See `gh release list`.")
    release = Release(api, tag, commit, say)
    stock = _wheels_of(release, [])
    _write_notes(release, stock, index_url)
    say(f"notes of {tag}: {len(stock.wheels)} wheels, {release.fields['html_url']}")


def dry_run(dist: Path, tag: str, *, index_url: str, repository: str, say: Say) -> None:
    """All checks of `publish`, and a line for each wheel that would be sent; makes no request to GitHub."""
    directory, uploads = assets.collect(dist)
    wheels = directory.wheels
    commits = sorted({wheel.verdict.commit for wheel in wheels})
    if len(commits) > 1:
        raise PublishFailed(
            f"the wheels are of several commits: {', '.join(each or 'unknown' for each in commits)}",
            remedy="Build them all from the commit of the release.",
        )
    plan = plans.of_directory(directory, tag, (commits or [""])[0])
    uploads.append(assets.of_bytes(FILE, plan.as_json().encode(), final=False))
    uploads.append(assets.sums({asset.name: asset.sha256 for asset in uploads}))
    for name, group in groupby(
        sorted(uploads, key=lambda asset: names.owner(asset.name)), lambda asset: names.owner(asset.name)
    ):
        own, *beside = sorted(group, key=lambda asset: asset.name != name)
        parts = f" with {', '.join(sorted(asset.name.removeprefix(name) for asset in beside))}" if beside else ""
        say(f"{own.sha256}  {size(sum(asset.size for asset in (own, *beside))):>10}  {name}{parts}")
    notes.render(wheels, tag=tag, index_url=index_url, new="", repository=repository)
    total = size(sum(asset.size for asset in uploads))
    say(f"dry run: release {tag} would hold these {len(uploads)} assets, {total}; nothing was sent")


def _unchanged(
    directory: Directory, uploads: Sequence[Asset], public: Sequence[PublicWheel], say: Say
) -> dict[str, str]:
    """Wheel -> tag of the final release that already has its contents. Raises PublishFailed for a public name with
    other contents.
    """
    known = {wheel.name: wheel for wheel in public}
    kept = {}
    for asset in uploads:
        if (file := directory.files.get(asset.name)) is None or (other := known.get(asset.name)) is None:
            continue
        if file.sha256 == other.sha256 and not other.final:
            continue
        if file.sha256 == other.sha256 or (other.final and file.contents == other.contents):
            say(f"{asset.name}: unchanged, it stays in the release that has it")
            kept[asset.name] = other.release
        else:
            raise PublishFailed(
                f"{asset.name} is published with other content",
                remedy="Build with --published, which gives changed contents the next build number.",
            )
    return kept


def _public_packings(listing: Listing, uploads: Sequence[Asset], say: Say) -> set[str]:
    """The interface wheels and the crate that are public in this release. Packed again at the same commit, they differ
    only in the version of the build backend or of cargo.
    """
    packed = {asset.name for asset in uploads if names.is_interface(asset.name) or asset.name.endswith(".crate")}
    for name in sorted(packed & listing.keys()):
        say(f"{name}: the one that is public stays")
    return packed & listing.keys()


def _with_reports(release: Release, wheel: Wheel, own: Asset, listing: Listing, say: Say) -> Asset | None:
    """The test report `own` of the wheel, with the GPU reports in the release; None if the release has all of it.

    Raises PublishFailed if a GPU failed the wheel and has not passed it since: only that GPU can answer.
    """
    there = listing.get(own.name)
    if there is None or there["state"] != "uploaded" or own.is_there(there):
        return own
    try:
        earlier = verdict.parse(own.name, release.api.download(there["url"]))
    except DataError:
        return own
    if earlier.sha256 != wheel.sha256:
        return own
    merged = wheel.verdict.with_reports_of(earlier)
    if failed := [gpu for gpu, report in merged.gpu_reports.items() if not report.ok]:
        raise PublishFailed(
            f"the verdict of {wheel.name} in release {release.tag} says that it failed on {', '.join(failed)}",
            remedy=f"Test it there, on that GPU: python -m rocm_wheels verify --require-gpu {wheel.name}",
        )
    if merged == earlier:
        if earlier != wheel.verdict:
            say(f"{wheel.name}: its verdict in the release has more results and stays")
        return None
    if release.immutable:
        say(f"{wheel.name}: its verdict in the release stays: the release is immutable")
        return None
    return own if merged == wheel.verdict else assets.of_bytes(own.name, merged.as_json().encode(), final=False)


def _write_notes(release: Release, stock: Catalogue, index_url: str) -> None:
    """Sets name and notes of the release. Raises PublishFailed if its wheels are of several commits."""
    api, tag = release.api, release.tag
    if others := [wheel for wheel in stock.wheels if wheel.verdict.commit != release.commit]:
        raise PublishFailed(
            f"release {tag} is of commit {release.commit} and holds {others[0].name} of {others[0].verdict.commit}",
            remedy=f"Delete the draft and start again: gh release delete {tag}",
        )
    page = notes.render(
        stock.wheels,
        tag=tag,
        index_url=index_url,
        new=api.generated_notes(tag, release.commit),
        repository=api.repository,
    )
    release.update(name=tag, body=page)


def _wheels_of(release: Release, uploads: Sequence[Asset]) -> Catalogue:
    """All wheels of the release. Files that are in this directory are not downloaded again."""
    local = {asset.name: asset for asset in uploads}

    def fetch(asset: Mapping[str, Any]) -> bytes:
        known = local.get(asset["name"])
        if known is None or not known.is_there(asset):
            return release.api.download(asset["url"])
        with known.open() as file:
            return file.read()

    fields = {**release.fields, "assets": list(release.listing().values())}
    stock = catalogue.from_releases([fields], fetch, yanks.load(), yanks.withdrawn())
    if stock.problems:
        raise PublishFailed(
            "\n".join(stock.problems), remedy="Download the wheel, run `verify` on it, and publish both again."
        )
    return stock
