"""Selects the combinations of all platforms that a run builds."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rocm_wheels.errors import DataError
from rocm_wheels.matrix.cells import AXES, Cell, Claim, Universal, product, universal
from rocm_wheels.matrix.release_plan import is_there, planned
from rocm_wheels.matrix.rows import cell_name, confirmed
from rocm_wheels.matrix.versions import Versions

Platforms = Mapping[str, Mapping[str, Sequence[str]] | bool]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The selected combinations and universal wheels, and (combination, reason) for each that is left out."""

    cells: tuple[Cell, ...]
    left_out: tuple[tuple[str, str], ...]
    universals: tuple[Universal, ...] = ()

    def reasons(self) -> list[str]:
        """A line for each reason, with the combinations that it applies to."""
        named: dict[str, list[str]] = {}
        for name, why in self.left_out:
            named.setdefault(why, []).append(name)
        lines = []
        for why, which in named.items():
            few = ", ".join(which) if len(which) <= 3 else f"{which[0]} to {which[-1]}, {len(which)} in all"
            lines.append(f"left out: {few}: {why}")
        return lines


def select(
    data: Versions,
    platforms: Platforms,
    *,
    only: str = "*",
    event: str = "push",
    has: Mapping[str, Sequence[str]] = MappingProxyType({}),
    requested: Sequence[str] | None = None,
) -> Matrix:
    """The combinations of all platforms that are on and whose backend is ready, in ascending order, and the universal
    wheels.

    Each flash-attn version of a platform with the ck backend has a universal wheel, and so has every other name of that
    version, such as 2.8.3.post2. only: as in `matches`. A pull request gets the oldest and the newest
    combination without an uncertain fact, and the universal wheel of the newest flash-attn. has: stem of a wheel in
    the release -> its GPU targets; a combination is left out if all its planned wheels are there, for every requested
    target. Raises DataError if the glob matches nothing.
    """
    universals: list[Universal] = []
    cells: list[Cell] = []
    left_out: list[tuple[str, str]] = []
    for platform, axes in platforms.items():
        if axes is False:
            left_out.append((platform, "switched off"))
            continue
        if axes is True:
            raise DataError(f"platform {platform!r} is on without a matrix", remedy="Give it its axes, or False.")
        possible, impossible = product(data, axes)
        if not possible:
            raise DataError(
                f"no combination of the platform {platform!r} exists: {impossible[0][1]}",
                remedy="Take versions that exist together (rocm_wheels/versions.toml), or switch it off: False.",
            )
        unavailable = [(" ".join(values[axis] for axis in AXES), why) for values, why in impossible]
        left_out += [(name, why) for name, why in unavailable if matches(name, only)]
        if "ck" in axes["backend"] and data.backends["ck"].ready:
            universals += [universal(data, name) for version in axes["flash_attn"] for name in _names(data, version)]
        for cell in possible:
            if data.backends[cell.backend].ready:
                cells.append(cell)
            else:
                left_out.append((cell_name(cell), f"the {cell.backend} backend is not ready (versions.toml)"))
    cells.sort()
    matching = [cell for cell in cells if matches(cell_name(cell), only)]
    universals = [each for each in dict.fromkeys(universals) if matches(cell_name(each), only)]
    if cells and not (matching or universals):
        raise DataError(
            f"no combination matches {only!r}",
            remedy=f"Write combinations as {cell_name(cells[0])!r}; `--list` shows all, '2.8.3 * 6.2 *' matches some.",
        )
    if event == "pull_request":
        sample = confirmed(data, matching, lambda cell: (cell.torch, cell.rocm))
        matching = list(dict.fromkeys((sample[0], sample[-1]))) if sample else []
        universals = [each for each in universals if each.flash_attn == data.flash_attn[-1]]

    def released(claim: Claim) -> bool:
        return bool(has) and all(is_there(wheel, has) for wheel in planned(data, [claim], requested))

    claims: list[Claim] = [*universals, *matching]
    left_out += [(cell_name(claim), "already released") for claim in claims if released(claim)]
    return Matrix(
        cells=tuple(cell for cell in matching if not released(cell)),
        left_out=tuple(left_out),
        universals=tuple(each for each in universals if not released(each)),
    )


def matches(name: str, only: str) -> bool:
    """Whether the name of a combination matches one of the globs in `only`, which stand between semicolons."""
    return any(fnmatch.fnmatchcase(name, glob.strip()) for glob in only.split(";"))


def _names(data: Versions, version: str) -> list[str]:
    """The version, and the other names of the same functions."""
    known = universal(data, version).flash_attn
    return [known, *(name for name, release in data.flash_attn_names.items() if known == release != name)]
