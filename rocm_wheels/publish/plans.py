"""The plan of a release on GitHub: its asset release.json, written before the first wheel."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rocm_wheels.errors import PublishFailed
from rocm_wheels.matrix import names, release_plan
from rocm_wheels.matrix.release_plan import FILE, PlannedWheel, ReleasePlan, lacking
from rocm_wheels.publish import assets, catalogue, github, published, yanks
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.publish.directory import Directory
from rocm_wheels.publish.release import AGAIN, Listing, Release
from rocm_wheels.wheel import numbering
from rocm_wheels.wheel.numbering import PublicWheel


def of_directory(directory: Directory, tag: str, commit: str) -> ReleasePlan:
    """The plan of a release that holds exactly the wheels of a directory."""
    return release_plan.of_files(tag, commit, published.targets_of(directory))


def held(release: Release, listing: Listing) -> ReleasePlan | None:
    """The plan in the release; None for a draft without one."""
    fields = {**release.fields, "assets": list(listing.values())}
    return published.plan_of(release.api, fields, release.commit)


def start(release: Release, plan: ReleasePlan, public: Sequence[PublicWheel]) -> ReleasePlan:
    """Writes the plan of a run into the draft, before anything is built. Returns the joined plan.

    A wheel that the release lacks gets the next build number of its name. Raises PublishFailed if the plan contradicts
    the draft, or if a wheel would serve fewer GPUs than the public one of its name.
    """
    check_targets(plan, public)
    listing = release.without_leftovers()
    before = held(release, listing)
    own = {name: catalogue.asset_sha256(asset) for name, asset in listing.items() if name.endswith(".whl")}

    def build(wheel: PlannedWheel) -> PlannedWheel:
        old = before.by_stem.get(wheel.stem) if before is not None else None
        if old is not None and (old.unchanged_in or _stays(wheel, old, own, public, is_public=not release.draft)):
            return old
        numbers = [names.build_number(name) for name in own if not release.draft and names.stem(name) == wheel.stem]
        return replace(wheel, build=max(numbering.next_build(wheel.stem, public), max(numbers, default=-1) + 1))

    return write(release, replace(plan, wheels=tuple(map(build, plan.wheels))))


def _stays(
    wheel: PlannedWheel,
    old: PlannedWheel,
    own: Mapping[str, str | None],
    public: Sequence[PublicWheel],
    *,
    is_public: bool,
) -> bool:
    """Whether a wheel keeps its place in the plan: for the same GPUs, and no other release has taken its number.

    own: name -> sha256 of the wheels in the release. is_public: a public wheel for more GPUs stays too.
    """
    fits = set(wheel.targets) <= set(old.targets) if is_public else set(wheel.targets) == set(old.targets)
    taken = [each for each in public if each.stem == wheel.stem and each.build == old.build]
    return fits and all(own.get(each.name) == each.sha256 for each in taken)


def write(release: Release, plan: ReleasePlan) -> ReleasePlan:
    """Joins a plan with the one in the release, and writes it there unless nothing changed. Returns what is there.

    Raises PublishFailed if the plans contradict each other, or if an immutable release has another plan.
    """
    for attempt in range(github.ATTEMPTS):
        listing = release.without_leftovers()
        there = held(release, listing)
        joined = plan if there is None else there.joined(plan, public=not release.draft)
        if joined == there:
            return joined
        asset = assets.of_bytes(FILE, joined.as_json().encode(), final=False)
        if attempt:
            time.sleep(github.backoff(attempt))
            release.still_draft()
        release.say(f"{FILE}: {len(joined.wheels)} wheels, {release.upload(asset, listing.get(FILE))}")
    raise PublishFailed(f"{FILE} of {release.tag} changes while it is written", remedy=f"Stop other runs. {AGAIN}")


def check_targets(plan: ReleasePlan, public: Sequence[PublicWheel]) -> None:
    """Raises PublishFailed if a wheel of the plan would take the place of a public one that serves more GPUs."""
    marked = {**yanks.load(), **yanks.withdrawn()}
    for wheel in plan.wheels if not names.is_candidate(plan.tag) else ():
        for other in public:
            if other.stem != wheel.stem or not other.final or other.name in marked:
                continue
            if less := lacking(wheel.targets, other.targets):
                raise PublishFailed(
                    f"{wheel.stem} for {', '.join(wheel.targets)} would take the place of {other.name} of "
                    f"{other.release}, which also serves {', '.join(less)}",
                    remedy=f"Build it for these GPUs too, or publish a candidate: {plan.tag}rc1."
                    f" Or withdraw the other wheel: python -m rocm_wheels withdraw {other.name} --reason WHY",
                )


def drop_leftovers(release: Release, plan: ReleasePlan, listing: Listing, *, known: bool) -> Listing:
    """The listing of a draft without wheels that the plan does not name, which a killed run left. known: whether the
    draft had a plan before. Raises PublishFailed if it had none, because somebody else may have sent them.
    """
    leftovers = [name for name in listing if release.draft and _is_leftover(name, plan)]
    if leftovers and not known:
        raise PublishFailed(
            f"the draft of {release.tag} holds {leftovers[0]}, and no {FILE} says what it is for",
            remedy=f"Delete the draft and start again: gh release delete {release.tag}",
        )
    for name in leftovers:
        release.say(f"  {name}: not part of the release, it is deleted")
        release.api.delete_asset(listing[name]["id"])
    return {name: asset for name, asset in listing.items() if name not in leftovers}


def _is_leftover(name: str, plan: ReleasePlan) -> bool:
    wheel = names.owner(name)
    return (names.is_wheel(wheel) or names.is_interface(wheel)) and not plan.holds(wheel)


def check_complete(release: Release, own: ReleasePlan, found: Catalogue) -> None:
    """Raises PublishFailed for a draft that lacks wheels of its plan, or holds a name that became public elsewhere.

    own: the plan of this run. found: the wheels of the release.
    """
    plan = held(release, release.listing())
    plan = own if plan is None else plan.joined(own, public=not release.draft)
    elsewhere = published.public_digests(release.api, but=release.tag)
    wheels = (*found.wheels, *found.interfaces)
    if taken := [each.name for each in wheels if elsewhere.get(each.name, each.sha256) != each.sha256]:
        raise PublishFailed(
            f"{taken[0]} became public in another release meanwhile, with other content",
            remedy="Run all jobs again, not only the failed ones: the first job gives the next build numbers.",
        )
    if lacks := plan.missing(published.held_wheels(found, plan, release.commit, elsewhere)):
        problem = f"{release.tag} lacks {len(lacks)} of {len(plan.wheels)} wheels, such as {lacks[0].stem}"
        if not release.draft:
            release.say(f"note: {problem}")
            return
        raise PublishFailed(
            f"{problem}: it stays a draft",
            remedy=f"Build them: gh workflow run build.yml --ref {release.tag} -f tag={release.tag} -f dry-run=false\n"
            f"Or delete the draft and start again: gh release delete {release.tag}",
        )
