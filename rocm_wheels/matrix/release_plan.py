"""What a release holds, as one value: its wheels with their systems, GPU targets and build numbers, at one commit.

`create_matrix.py` makes the plan. The draft holds it as release.json before its first wheel, and everything that asks
whether a release is complete compares with it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rocm_wheels import schema
from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.matrix import names, versions
from rocm_wheels.matrix.cells import Claim, Universal, has_interfaces
from rocm_wheels.matrix.platforms import DEFAULT, PLATFORMS
from rocm_wheels.matrix.rows import published_targets, row_targets
from rocm_wheels.matrix.targets import gpus_of, served_on
from rocm_wheels.matrix.versions import Versions

FILE = "release.json"  # the asset of a release that holds its plan
_MAX_BYTES = 4 << 20
_TARGETS = schema.ListSchema(schema.text(40, r"[a-z0-9_-]+"), 100)
_WHEEL = schema.ObjectSchema(
    {
        "stem": schema.text(200, r"[A-Za-z0-9_.+-]+"),
        "targets": _TARGETS,
        "build": schema.number(whole=True),
        "unchanged_in": schema.text(40, r"[a-z0-9.]+", empty=True),
    }
)
_PLAN = schema.ObjectSchema(
    {
        "tag": schema.text(40, r"(v|nightly-)[a-z0-9.]+", empty=True),
        "commit": schema.text(50, r"[0-9a-f]{40}(-dirty)?", empty=True),
        "wheels": schema.ListSchema(_WHEEL, 1000),
    }
)


@dataclass(frozen=True, kw_only=True)
class PlannedWheel:
    """A wheel of a release.

    stem: its name without build number and tags, with the system unless that is Linux. targets: its GPU targets; an
    interface wheel has none. build: the build number if its contents are new. unchanged_in: tag of the earlier release
    that has the same contents, so that this release does not repeat the wheel.
    """

    stem: str
    targets: tuple[str, ...] = ()
    build: int = 0
    unchanged_in: str = ""


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """The wheels of a release and the commit that they are built from."""

    tag: str
    commit: str
    wheels: tuple[PlannedWheel, ...]

    @property
    def by_stem(self) -> dict[str, PlannedWheel]:
        return {wheel.stem: wheel for wheel in self.wheels}

    def build_of(self, stem: str) -> int:
        """The build number of a wheel, 0 if the release does not plan it."""
        planned = self.by_stem.get(stem)
        return planned.build if planned else 0

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def holds(self, filename: str) -> bool:
        """Whether a wheel of this file name is part of the release."""
        planned = self.by_stem.get(names.stem(filename))
        return planned is not None and (planned.build, planned.unchanged_in) == (names.build_number(filename), "")

    def missing(self, there: Mapping[str, Sequence[str]]) -> list[PlannedWheel]:
        """The wheels that a release lacks. there: stem -> GPU targets of the wheels that it holds."""
        return [wheel for wheel in self.wheels if not wheel.unchanged_in and not is_there(wheel, there)]

    def joined(self, more: ReleasePlan, *, public: bool) -> ReleasePlan:
        """This plan of a draft or of a public release, with the wheels of another run.

        Raises PublishFailed if both plans have a wheel for different GPU targets, unless the release is public and the
        new build serves more GPUs.
        """
        mine = self.by_stem
        for wheel in more.wheels:
            there = mine.get(wheel.stem, wheel)
            fuller = public and not lacking(wheel.targets, there.targets)
            if set(there.targets) != set(wheel.targets) and not fuller:
                raise PublishFailed(
                    f"{'release' if public else 'the draft of'} {self.tag} holds {wheel.stem} for "
                    f"{', '.join(there.targets)}, this run builds it for {', '.join(wheel.targets)}",
                    remedy="Take the same GPU targets, or another tag."
                    + ("" if public else f" To begin again: gh release delete {self.tag}"),
                )
            mine[wheel.stem] = wheel
        return replace(self, commit=more.commit, wheels=tuple(mine[stem] for stem in sorted(mine)))

    def unchanged(self, releases: Mapping[str, str]) -> ReleasePlan:
        """The plan after a comparison of contents. releases: stem -> tag of the release that has the same contents."""
        return replace(
            self,
            wheels=tuple(
                replace(each, unchanged_in=releases[each.stem]) if each.stem in releases else each
                for each in self.wheels
            ),
        )


def is_there(wheel: PlannedWheel, there: Mapping[str, Sequence[str]]) -> bool:
    """Whether a release has the wheel, for all its GPU targets. there: stem -> GPU targets."""
    return wheel.stem in there and set(wheel.targets) <= set(there[wheel.stem])


def lacking(targets: Iterable[str], other: Iterable[str]) -> list[str]:
    """The GPUs that `other` serves and `targets` does not. A GPU that versions.toml no longer lists does not count."""
    known = versions.load()
    gpus = [gpu for gpu in gpus_of(known, other) if gpu in known.targets and not known.targets[gpu].is_generic]
    return [gpu for gpu in gpus if gpu not in gpus_of(known, targets)]


def planned(
    data: Versions,
    claims: Sequence[Claim],
    requested: Sequence[str] | None = None,
    *,
    universal_targets: Sequence[str] | None = None,
) -> tuple[PlannedWheel, ...]:
    """The wheels for these combinations, with those of the interfaces. universal_targets: GPU targets of the universal
    wheels, if they differ from `requested`. Raises BadTarget if a wheel would have no GPU target.
    """
    wheels = []
    for claim in claims:
        if isinstance(claim, Universal):
            built = published_targets(data, requested if universal_targets is None else universal_targets)
            for system in PLATFORMS.values():
                serves = tuple(name for name in built if name in served_on(data, system.name))
                if serves:
                    wheels.append(_planned(names.wheel_name(claim, system.tag), serves))
        else:
            wheels.append(
                _planned(names.wheel_name(claim, PLATFORMS[DEFAULT].tag), row_targets(data, claim, requested))
            )
        beside = data.interfaces.values() if has_interfaces(data, claim) else ()
        wheels += [_planned(names.interface_wheel_name(each, claim), ()) for each in beside]
    by_stem = {wheel.stem: wheel for wheel in wheels}  # combinations that differ in Python share their interfaces
    return tuple(by_stem[stem] for stem in sorted(by_stem))


def _planned(filename: str, targets: Sequence[str]) -> PlannedWheel:
    return PlannedWheel(stem=names.stem(filename), targets=tuple(sorted(targets)), build=names.build_number(filename))


def of_files(tag: str, commit: str, files: Mapping[str, Collection[str]]) -> ReleasePlan:
    """The plan of exactly these wheels. files: file name -> GPU targets."""
    wheels = sorted((_planned(name, tuple(files[name])) for name in files), key=lambda wheel: wheel.stem)
    return ReleasePlan(tag=tag, commit=commit, wheels=tuple(wheels))


def parse(name: str, content: bytes) -> ReleasePlan:
    """The plan in a file of that name. Raises DataError if it is not one."""
    fields: Any = schema.load(name, content, _MAX_BYTES)
    if wrong := next(schema.problems(fields, _PLAN), None):
        raise DataError(f"{name} is no plan of a release: {wrong}", remedy="Make it with: ./create_matrix.py --plan")
    wheels = tuple(PlannedWheel(**{**each, "targets": tuple(each["targets"])}) for each in fields["wheels"])
    plan = ReleasePlan(**{**fields, "wheels": wheels})
    if len(plan.by_stem) != len(wheels):
        raise DataError(f"{name} is no plan of a release: it names a wheel twice")
    return plan
