"""Build numbers (PEP 427): a public name never gets other bytes, and unchanged contents get no new name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names
from rocm_wheels.wheel import contents, rewrite

REMEDY = "Make it with: python -m rocm_wheels published v1.2.3 --repo owner/name >published.json"


@dataclass(frozen=True, kw_only=True)
class PublicWheel:
    """A public wheel. contents: its digest, "" if unknown. final: whether its release is not a candidate. release: its
    tag.
    """

    name: str
    sha256: str
    contents: str
    final: bool
    targets: tuple[str, ...] = ()
    release: str = ""

    @property
    def stem(self) -> str:
        return names.stem(self.name)

    @property
    def build(self) -> int:
        return names.build_number(self.name)


def load(path: Path) -> list[PublicWheel]:
    """The wheels in a file that `published` has written. Raises DataError for another file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["wheels"]
        return [PublicWheel(**{**entry, "targets": tuple(entry["targets"])}) for entry in entries]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{path} is no list of public wheels: {error!r}",
            remedy=REMEDY,
        ) from error


def assign(wheel: Path, public: Iterable[PublicWheel]) -> Path:
    """Renames a wheel to the name under which it may be published, and returns its path.

    The name stays if no wheel of that name is public, or if the newest public build has these bytes or, in a final
    release, these contents. Otherwise the wheel gets the next build number.
    """
    builds = _builds(names.stem(wheel.name), public)
    if not builds:
        return wheel
    newest = max(builds)
    if newest:
        wheel = rewrite.numbered(wheel, newest)
    same = builds[newest]
    file = contents.read(wheel)
    if file.sha256 == same.sha256 or (same.final and file.contents == same.contents):
        return wheel
    return rewrite.numbered(wheel, newest + 1)


def next_build(stem: str, public: Iterable[PublicWheel]) -> int:
    """The build number of a wheel with new contents: one more than that of its newest public build, 0 without one."""
    return max(_builds(stem, public), default=-1) + 1


def _builds(stem: str, public: Iterable[PublicWheel]) -> dict[int, PublicWheel]:
    return {other.build: other for other in public if other.stem == stem}
