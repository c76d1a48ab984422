"""Lists what GitHub already has, so that a run builds only missing wheels and numbers them correctly."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names, release_plan
from rocm_wheels.matrix.release_plan import ReleasePlan
from rocm_wheels.wheel.numbering import REMEDY, PublicWheel

if TYPE_CHECKING:
    from rocm_wheels.publish.catalogue import Catalogue
    from rocm_wheels.publish.directory import Directory
    from rocm_wheels.publish.github import GitHub


def there(path: Path) -> dict[str, list[str]]:
    """Stem -> GPU targets of the wheels in a release, from a list that `published` has written. Raises DataError for
    another file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {str(stem): [str(target) for target in targets] for stem, targets in content["there"].items()}
    except OSError as error:
        raise DataError(f"--missing {path}: {error.strerror}", remedy=REMEDY) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} does not describe a release: {error!r}",
            remedy=REMEDY,
        ) from error


def check_open(path: Path) -> None:
    """Raises DataError if the list belongs to an immutable release, because it takes no more files: a wheel built
    for it could not be published.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("immutable"):
        raise DataError(
            f"release {content['tag']} is immutable and lacks some of these wheels",
            remedy="Build them for a new tag; the index joins all releases.",
        )


def listing(api: GitHub, tag: str, commit: str) -> dict[str, Any]:
    """The wheels that the release of a tag holds of its plan, and the public wheels that give build numbers.

    Those are the wheels of all other releases, and the wheels of the tag that a fuller build of the plan replaces.
    """
    public = public_wheels(api, but=tag)
    held: dict[str, Sequence[str]] = {}
    immutable = False
    for release in api.releases():
        if release["tag_name"] != tag:
            continue
        immutable |= not release["draft"] and bool(release.get("immutable"))
        fields = {**release, "assets": list(api.assets(release["id"]))}
        stock = wheels_in(api, fields)
        plan = plan_of(api, fields, commit)
        held |= held_wheels(stock, plan, commit, digests(public))
        if plan is not None:
            held |= {each.stem: each.targets for each in plan.wheels if each.unchanged_in}
            public += [wheel for wheel in own_public(release, stock) if wheel.build < plan.build_of(wheel.stem)]
    return {
        "tag": tag,
        "commit": commit,
        "immutable": immutable,
        "there": {stem: list(held[stem]) for stem in sorted(held)},
        "wheels": [vars(wheel) for wheel in sorted(public, key=lambda wheel: wheel.name)],
    }


def wheels_in(api: GitHub, fields: Mapping[str, Any]) -> Catalogue:
    """The wheels of one release, also of a draft."""
    from rocm_wheels.publish import catalogue

    return catalogue.from_releases([fields], lambda asset: api.download(asset["url"]), {})


def plan_of(api: GitHub, fields: Mapping[str, Any], commit: str) -> ReleasePlan | None:
    """The plan of a release as GitHub's API describes it, with its wheels. None for a draft of that commit without a
    plan. Raises DataError if its file is not a plan.

    A public release without the file holds what it has.
    """
    from rocm_wheels.publish import catalogue

    plan = catalogue.plan_of(fields, lambda asset: api.download(asset["url"]))
    if plan is not None or fields["draft"]:
        return plan if plan is None or plan.commit == commit else None
    return release_plan.of_files(fields["tag_name"], commit, targets_of(wheels_in(api, fields)))


def targets_of(found: Catalogue | Directory) -> dict[str, tuple[str, ...]]:
    """Name -> GPU targets of the wheels; none for a wheel without kernels."""
    wheels = {wheel.name: wheel.verdict.targets for wheel in found.wheels}
    return {**wheels, **{each.name: () for each in found.interfaces}}


def held_wheels(
    found: Catalogue, plan: ReleasePlan | None, commit: str, elsewhere: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Stem -> GPU targets of the wheels that a release holds of its plan.

    A wheel counts with a test report of success for these bytes and this commit, and unless another release has other
    bytes under its name. elsewhere: name -> sha256 of the wheels of other releases.
    """
    targets = {wheel.name: wheel.verdict.targets for wheel in found.wheels if wheel.verdict.commit == commit}
    targets |= {each.name: () for each in found.interfaces}
    shas = {each.name: each.sha256 for each in (*found.wheels, *found.interfaces)}
    return {
        names.stem(name): each
        for name, each in targets.items()
        if elsewhere.get(name, shas[name]) == shas[name] and (plan is None or plan.holds(name))
    }


def digests(public: Sequence[PublicWheel]) -> dict[str, str]:
    """Name -> sha256."""
    return {wheel.name: wheel.sha256 for wheel in public}


def public_digests(api: GitHub, *, but: str) -> dict[str, str]:
    """Name -> sha256 of the wheels in all public releases except the release of that tag and the nightly ones, as
    GitHub lists them now.
    """
    from rocm_wheels.publish.catalogue import asset_sha256

    return {
        asset["name"]: digest
        for release in api.releases()
        if not release["draft"] and release["tag_name"] != but and not names.is_nightly(release["tag_name"])
        for asset in release["assets"]
        if (names.is_wheel(asset["name"]) or names.is_interface(asset["name"])) and (digest := asset_sha256(asset))
    }


def public_wheels(api: GitHub, *, but: str) -> list[PublicWheel]:
    """The wheels of all public releases except the release of that tag and the nightly ones."""
    from rocm_wheels.publish import catalogue

    releases: list[Mapping[str, Any]] = [
        release
        for release in api.releases()
        if not release["draft"] and release["tag_name"] != but and not names.is_nightly(release["tag_name"])
    ]
    finals = {release["tag_name"] for release in catalogue.final(releases)}
    stock = catalogue.from_releases(releases, lambda asset: api.download(asset["browser_download_url"]), {})
    return _public(stock, finals)


def own_public(release: Mapping[str, Any], found: Catalogue) -> list[PublicWheel]:
    """The wheels of a release if it is public. A new build of one of them needs the next number."""
    return [] if release["draft"] else _public(found, finals=())


def _public(stock: Catalogue, finals: Collection[str]) -> list[PublicWheel]:
    tested: dict[str, str] = {}
    for wheel in stock.wheels:
        tested.update(wheel.verdict.beside)
    contents = {wheel.name: wheel.verdict.contents for wheel in stock.wheels} | tested
    targets = {wheel.name: wheel.verdict.targets for wheel in stock.wheels}
    return [
        PublicWheel(
            name=link.name,
            sha256=link.sha256,
            contents=contents.get(link.name, ""),
            final=link.release in finals,
            targets=targets.get(link.name, ()),
            release=link.release,
        )
        for link in (*stock.wheels, *stock.interfaces, *stock.unverified)
    ]
