"""The versions that a wheel supports: one combination (`Cell`) or all of them (`Universal`), and the combinations that
exist.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rocm_wheels.errors import DataError, ImpossibleCell, RocmWheelsError, UnknownVersion
from rocm_wheels.matrix.versions import Backend, Torch, Versions
from rocm_wheels.tables import version_key

AXES = ("flash_attn", "python", "torch", "rocm", "backend")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of versions, as versions.toml spells them: "2.8.3", "3.11", "2.5.1", "6.2", "ck" or "triton"."""

    flash_attn: str
    python: str
    torch: str
    rocm: str
    backend: str

    @property
    def torch_minor(self) -> str:
        return ".".join(self.torch.split(".")[:2])

    @property
    def python_tag(self) -> str:
        return "cp" + self.python.replace(".", "")

    @property
    def abi_tag(self) -> str:
        return self.python_tag

    def __str__(self) -> str:
        return f"{self.flash_attn} {self.python} {self.torch} {self.rocm}"

    def __lt__(self, other: Cell) -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[object, ...]:
        versions = (self.flash_attn, self.python, self.torch, self.rocm)
        return *map(version_key, versions), self.backend


@dataclass(frozen=True, kw_only=True)
class Universal:
    """The versions that the universal wheel supports: every ROCm, torch from the oldest one on, Python from `python`
    on.

    python: the oldest Python, "3.10". The launcher uses Python's limited API, so newer versions install the wheel too,
    except free-threaded builds.
    """

    flash_attn: str
    python: str
    backend: str = "ck"

    @property
    def python_tag(self) -> str:
        return "cp" + self.python.replace(".", "")

    @property
    def abi_tag(self) -> str:
        return "abi3"

    def __str__(self) -> str:
        return self.flash_attn


Claim = Cell | Universal


def universal(versions: Versions, flash_attn: str) -> Universal:
    """The `Universal` of a flash-attn version: "2.8.3", "2.8.3.post2" or "2.8". Raises UnknownVersion for an unknown
    version.
    """
    return Universal(flash_attn=_flash_attn(versions, flash_attn), python=versions.python[0])


def resolve(versions: Versions, *, flash_attn: str, python: str, torch: str, rocm: str, backend: str) -> Cell:
    """The combination that these spellings mean: torch "2.5" is the newest 2.5.x, rocm "6.2.4" is 6.2 if torch has 6.2,
    python "311" and "cp311" are 3.11.

    Raises UnknownVersion if versions.toml does not list a version, ImpossibleCell if they do not exist in combination.
    """
    try:
        cell = Cell(
            flash_attn=_flash_attn(versions, flash_attn),
            python=_python(versions, python),
            torch=_newest("torch", torch, list(versions.torch)),
            rocm=_rocm(versions, rocm),
            backend=known_backend(versions, backend).name,
        )
    except UnknownVersion as error:
        known = (list(versions.flash_attn_names), versions.python, versions.torch, versions.rocm)
        spellings = (flash_attn, python, torch, rocm)
        everything = {*itertools.chain(*known)}
        if any(value in everything and value not in own for value, own in zip(spellings, known, strict=True)):
            remedy = f"{error.remedy}\nThe order is: flash-attn python torch rocm."
            raise UnknownVersion(error.message, remedy=remedy) from None
        raise
    reasons = list(_reasons(versions, cell))
    if reasons:
        near = nearest(versions, cell)
        raise ImpossibleCell("; ".join(reasons), remedy=f"Nearest combination that exists: {near}")
    built = versions.torch[cell.torch].rocm[cell.rocm].removeprefix("rocm")
    if rocm.removeprefix("rocm") not in (cell.rocm, built):
        raise ImpossibleCell(
            f"torch {cell.torch} is built for ROCm {built}, not {rocm}",
            remedy=f"Leave the patch release out: {cell}",
        )
    return cell


def known_backend(versions: Versions, name: str) -> Backend:
    """The backend with this name, whether it is ready or not. Raises UnknownVersion if there is none."""
    if name not in versions.backends:
        known = ", ".join(versions.backends)
        raise UnknownVersion(f"backend {name!r} is not known", remedy=f"Known backends: {known}.")
    return versions.backends[name]


def exists(versions: Versions, cell: Cell) -> bool:
    """Whether torch has wheels for the Python and the ROCm of the combination."""
    return not any(_reasons(versions, cell))


def has_interfaces(versions: Versions, cell: Claim) -> bool:
    """Whether wheels of the interfaces (FA3, FA4) accompany the wheel: only for the newest flash-attn, because their
    labels name none.
    """
    return cell.flash_attn == versions.flash_attn[-1]


def nearest(versions: Versions, wanted: Cell) -> Cell:
    """The existing combination with the fewest changed versions; the torch version changes last."""
    torches, pythons, rocms = (
        {name: abs(place - list(names).index(own)) for place, name in enumerate(names)}
        for names, own in (
            (versions.torch, wanted.torch), (versions.python, wanted.python), (versions.rocm, wanted.rocm)
        )
    )  # fmt: skip

    def distance(cell: Cell) -> tuple[int, ...]:
        steps = torches[cell.torch], pythons[cell.python], rocms[cell.rocm]
        return sum(step > 0 for step in steps), *steps

    closest = (
        replace(
            wanted,
            torch=torch,
            python=min(release.python, key=pythons.__getitem__),
            rocm=min(release.rocm, key=rocms.__getitem__),
        )
        for torch, release in versions.torch.items()
    )
    return min(closest, key=distance)


def product(
    versions: Versions, matrix: Mapping[str, Sequence[str]]
) -> tuple[list[Cell], list[tuple[dict[str, str], str]]]:
    """All combinations of a matrix (axis -> spellings), and the combinations left out, each with its reason.

    Raises UnknownVersion for an unknown version, DataError for an axis that is missing, unknown, empty or not a list of
    texts.
    """
    for axis in [*AXES, *matrix]:
        if axis not in matrix or axis not in AXES:
            state = "unknown" if axis in matrix else "missing"
            raise DataError(f"matrix: axis {axis!r} is {state}", remedy=f"The axes are {', '.join(AXES)}.")
    for axis in AXES:
        values = matrix[axis]
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
            raise DataError(
                f"matrix: {axis}: {values!r} is not a list of texts",
                remedy='Quote each version, ["3.10"]: Python reads a bare 3.10 as the number 3.1.',
            )
        if not values:
            raise DataError(f"matrix: {axis} is empty", remedy="Name one at least, or switch the platform off: False.")
    cells: dict[tuple[object, ...], Cell] = {}
    spellings: dict[tuple[object, ...], dict[str, str]] = {}
    left_out: list[tuple[dict[str, str], str]] = []
    for values in itertools.product(*(matrix[axis] for axis in AXES)):
        combination = dict(zip(AXES, values, strict=True))
        try:
            cell = resolve(versions, **combination)
        except ImpossibleCell as error:
            left_out.append((combination, error.message))
            continue
        name = (cell.flash_attn, cell.python, cell.torch_minor, cell.rocm, cell.backend)
        first = cells.get(name)
        if first == cell:
            left_out.append((combination, "the matrix names it twice"))
        elif first is None or first < cell:
            cells[name] = cell
            if first is not None:
                left_out.append((spellings[name], f"torch {cell.torch} gives a wheel of the same name"))
            spellings[name] = combination
        else:
            left_out.append((combination, f"torch {first.torch} gives a wheel of the same name"))
    return list(cells.values()), left_out


def torches_with(versions: Versions, has: Callable[[Torch], bool]) -> str:
    """The torch versions for which `has` is true, as text for a message."""
    return ", ".join(name for name, torch in versions.torch.items() if has(torch)) or "no torch"


def _reasons(versions: Versions, cell: Cell) -> list[str]:
    torch = versions.torch[cell.torch]
    reasons = []
    if cell.python not in torch.python:
        others = torches_with(versions, lambda other: cell.python in other.python)
        reasons.append(
            f"torch {cell.torch} serves no Python {cell.python} here, only {', '.join(torch.python)}"
            f" (Python {cell.python} has torch {others})"
        )
    if cell.rocm not in torch.rocm:
        others = torches_with(versions, lambda other: cell.rocm in other.rocm)
        reasons.append(
            f"torch {cell.torch} has no wheels for ROCm {cell.rocm}, only for {', '.join(torch.rocm)}"
            f" (ROCm {cell.rocm} has torch {others})"
        )
    return reasons


def _flash_attn(versions: Versions, value: str) -> str:
    """The known flash-attn version that `value` names; "2.8" names the newest release of 2.8.x."""
    plain = value.lower().removeprefix("v").partition("+")[0]
    if plain in versions.flash_attn_names or plain in versions.flash_attn_unreleased:
        return plain
    if plain.count(".") == 1:
        return _newest("flash-attn", value, versions.flash_attn)
    raise _unknown("flash-attn", value, list(versions.flash_attn_names))


def _newest(what: str, value: str, known: Sequence[str]) -> str:
    """The known version that `value` names: itself, or the newest patch release of a "major.minor". A leading "v" and a
    label are ignored, as in v2.5.1 and 2.6.0+rocm6.2.4.
    """
    plain = value.removeprefix("v").partition("+")[0]
    if plain in known:
        return plain
    series = [version for version in known if version.rpartition(".")[0] == plain and plain.count(".") == 1]
    if series:
        return max(series, key=version_key)
    raise _unknown(what, value, known)


def _python(versions: Versions, value: str) -> str:
    """The known Python that `value` names: 3.11, 3.11.4, python3.11, or as in a wheel name, 311 or cp311."""
    plain = value.lower().removeprefix("python")
    for known in versions.python:
        bare = known.replace(".", "")
        if plain in (known, bare, f"cp{bare}") or re.fullmatch(rf"{re.escape(known)}\.\d+", plain):
            return known
    raise _unknown("Python", value, versions.python, why=" (a wheel serves all patch releases of one minor)")


def _rocm(versions: Versions, value: str) -> str:
    bare = value.removeprefix("rocm")
    minor = ".".join(bare.split(".")[:2])
    if bare.count(".") <= 2 and minor in versions.rocm:
        return minor
    raise _unknown("ROCm", value, list(versions.rocm))


def _unknown(what: str, value: str, known: Sequence[str], *, why: str = "") -> RocmWheelsError:
    near = _nearest_version(value, known)
    match = re.fullmatch(r"\D{0,6}(\d+\.\d+(\.\d+)?)", value)
    if match and version_key(match[1]) > max(map(version_key, known)):
        return UnknownVersion(
            f"{what} {value!r} is newer than this checkout knows",
            remedy=f"Newest known: {max(known, key=version_key)}. `git pull` may bring it; CONTRIBUTING.md "
            "says how to add it to rocm_wheels/versions.toml.",
        )
    return UnknownVersion(f"{what} {value!r} is not known{why}", remedy=f"Nearest: {near}. Known: {', '.join(known)}.")


def _nearest_version(value: str, known: Sequence[str]) -> str:
    """The known version with the smallest distance, major component first; the newest if `value` is not a version."""
    numbers = re.search(r"\d+(\.\d+)*(\.post\d+)?", value)  # of 2.8.3rc1 or flash_attn==2.8.3 too
    if numbers is None:
        return max(known, key=version_key)
    key = version_key(numbers[0])

    def distance(version: str) -> tuple[int, ...]:
        pairs = itertools.zip_longest(version_key(version), key, fillvalue=0)
        return tuple(abs(ours - theirs) for ours, theirs in pairs)

    return min(reversed(known), key=distance)
