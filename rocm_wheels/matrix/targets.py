"""GPU targets: which ones a combination supports, and the messages about the others."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rocm_wheels.errors import BadTarget
from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.platforms import DEFAULT
from rocm_wheels.matrix.versions import GENERIC, Target, Versions
from rocm_wheels.tables import version_key

CUDA = re.compile(r"sm_[1-9]\d{1,2}")  # Triton compiles for these targets; they are never published
_GFX = re.compile(r"gfx([6-9]|1\d)\d[0-9a-f]")  # major version, minor version, stepping


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The targets of a combination's wheel, in the order of versions.toml, and the reason for each target it cannot
    have.
    """

    targets: tuple[str, ...]
    refused: Mapping[str, BadTarget]


def targets(versions: Versions, cell: Cell, requested: Iterable[str] | None) -> tuple[str, ...]:
    """The GPU targets to build. Raises BadTarget for the first requested target that cannot be built."""
    choice = fit(versions, cell, requested)
    for error in choice.refused.values():
        raise error
    return choice.targets


def fit(versions: Versions, cell: Cell, requested: Iterable[str] | None) -> Fit:
    """The targets of a combination's wheel: the default ones of its backend, or the requested ones. CUDA targets come
    last.

    Every wheel holds Triton kernels. So a ck wheel may have more targets than Composable Kernel supports, as long as it
    has one of Composable Kernel's. Raises BadTarget for a target that does not exist.
    """
    if requested is None:
        everything = versions.targets.values()
        served_by_default = (each for each in everything if each.default and each.serves(cell.backend, cell.rocm))
        return Fit(targets=tuple(target.name for target in served_by_default), refused={})
    names = known_targets(versions, requested)
    refused = {name: error for name in names if (error := _refusal(versions, cell, name)) is not None}
    kept = tuple(name for name in names if name not in refused)
    if not any(has_kernels(versions, name, cell.backend) for name in kept):
        refused = {name: _without_backend(versions, name, cell.backend) for name in kept} | refused
        kept = ()
    return Fit(targets=kept, refused=refused)


def universal(versions: Versions, requested: Iterable[str] | None, *, platform: str = DEFAULT) -> tuple[str, ...]:
    """The targets of the universal wheel of a platform: the requested ones, or all without those that a generic target
    stands for.

    Raises BadTarget for a target that does not exist, or that torch does not have on that platform.
    """
    there = served_on(versions, platform)
    if requested is None:
        return tuple(name for name in there if versions.targets[name].universal is None)
    built = known_targets(versions, requested)
    if platform == DEFAULT:
        return built
    if lacking := [name for name in built if name not in there]:
        raise BadTarget(
            f"AMD's torch for {platform.capitalize()} does not serve {', '.join(lacking)}",
            remedy=f"Name others: {', '.join(there)}.",
        )
    return built


def served_on(versions: Versions, platform: str) -> tuple[str, ...]:
    """The targets that torch for ROCm serves on a platform."""
    return tuple(target.name for target in versions.targets.values() if platform == DEFAULT or target.windows)


def known_targets(versions: Versions, requested: Iterable[str]) -> tuple[str, ...]:
    """The requested targets without feature suffixes or repetitions. BadTarget if one does not exist."""
    names = {_known(versions, entry) for entry in requested}
    gfx = [name for name in versions.targets if name in names]
    return (*gfx, *sorted(names - set(gfx), key=lambda name: int(name.removeprefix("sm_"))))


def without_kernels(versions: Versions, requested: Iterable[str]) -> tuple[str, ...]:
    """The requested targets that are GPUs for which no backend has kernels, such as gfx900."""
    return tuple(
        entry
        for entry in requested
        if _GFX.fullmatch(strip_features(entry)) and strip_features(entry) not in versions.targets
    )


def gpus_of(versions: Versions, names: Iterable[str]) -> tuple[str, ...]:
    """The targets of a wheel, and the GPUs that its generic targets stand for, in the order of versions.toml.

    Targets that versions.toml no longer lists come last.
    """
    named = tuple(names)
    gpus = [target.name for target in versions.targets.values() if {target.name, target.universal} & {*named}]
    return (*gpus, *(name for name in named if name not in gpus))


def served(versions: Versions, cell: Cell) -> list[Target]:
    """All targets that a wheel of the combination may have, by its backend or by the Triton kernels in each wheel."""
    return [
        target
        for target in versions.targets.values()
        if any(target.serves(backend, cell.rocm) for backend in (cell.backend, "triton"))
    ]


def has_kernels(versions: Versions, name: str, backend: str) -> bool:
    """Whether the backend has kernels for a known target, whatever the ROCm."""
    if name not in versions.targets:
        return backend == "triton"  # CUDA
    return backend in versions.targets[name].backends


def check_served(versions: Versions, names: Iterable[str], backend: str) -> None:
    """Raises BadTarget for the first target for which the backend has no kernels under any ROCm."""
    for name in names:
        if not has_kernels(versions, name, backend):
            raise _without_backend(versions, name, backend)


def strip_features(entry: str) -> str:
    """Removes feature suffixes: `gfx942:sramecc+:xnack-` -> `gfx942`. Our code objects work with any setting of the
    features.
    """
    return re.sub(r"(:(sramecc|xnack)[+-])+$", "", entry.strip().lower())


def _known(versions: Versions, entry: str) -> str:
    """The target that an entry names: a target with or without features, or a product."""
    name = strip_features(entry)
    if name in versions.targets or CUDA.fullmatch(name):
        return name
    if of_product := product_target(versions, name):
        return of_product
    known = _list(target for target in versions.targets.values() if not target.is_generic)
    if not _GFX.fullmatch(name):
        best = _closest(name, versions.targets)
        hint = f"Did you mean {best} ({versions.targets[best].family})? " if best else ""
        raise BadTarget(f"{entry!r} is not a known GPU", remedy=f"{hint}Known: {known}, and their products: mi300x.")
    near = _relative(versions, name)
    nearest_ = f"Nearest: {near.name} ({near.family}). " if near else ""
    raise BadTarget(
        f"no wheel has kernels for {name}",
        remedy=f"{nearest_}On a {name} Triton compiles them at their first call, if it can. Known: {known}.",
    )


def product_target(versions: Versions, name: str) -> str | None:
    """The target of a product as users type it: "MI300X", "Radeon RX 7900 XTX", "7900 xtx"; None for an unknown
    product.
    """
    plain = re.sub(r"[^a-z0-9]|radeon|instinct|amd|pro", "", name.lower())
    spellings = {plain, f"rx{plain}", f"mi{plain}"}
    return next((target.name for target in versions.targets.values() if spellings & set(target.products)), None)


def _relative(versions: Versions, name: str) -> Target | None:
    """The target of the same generation with the nearest number: gfx908 for gfx906; None if there is none."""
    number = int(name.removeprefix("gfx"), 16)
    same = [each for each in versions.targets.values() if not each.is_generic and _number(each) >> 8 == number >> 8]
    return min(same, key=lambda each: (_number(each) >> 4 != number >> 4, abs(_number(each) - number)), default=None)


def _closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to a misspelt name. Among equals: one with the same beginning, then the
    first.
    """

    def likeness(other: str) -> tuple[float, int]:
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False))
        return difflib.SequenceMatcher(None, name, other).ratio(), len(list(alike))

    best = max(known, key=likeness)
    return best if likeness(best)[0] >= 0.6 else None


def _refusal(versions: Versions, cell: Cell, name: str) -> BadTarget | None:
    """The reason why a wheel of the combination cannot have a known target; None if it can."""
    target = versions.targets.get(name)
    if target is None or target in served(versions, cell):
        return None
    long = f"{target.name} ({target.family})"
    since = target.backends.get(cell.backend, target.backends.get("triton"))
    if since is None:
        others = " or ".join(f"--backend {backend}" for backend in target.backends)
        return BadTarget(
            f"the {cell.backend} backend has no kernels for {long}",
            remedy=f"Use {others}, or one of {_list(served(versions, cell))}.",
        )
    fits = [rocm for rocm in versions.rocm if version_key(rocm) >= version_key(since)]
    torches = [name for name, torch in versions.torch.items() if any(rocm in torch.rocm for rocm in fits)]
    gpus = [other for other in served(versions, cell) if not other.is_generic]
    near = min(gpus, key=lambda other: abs(_number(other) - _number(target)))
    return BadTarget(
        f"{long} needs ROCm {since} or newer with the {cell.backend} backend, this combination has ROCm {cell.rocm}",
        remedy=f"Take ROCm {' or '.join(fits)} (torch {', '.join(torches)}),"
        f" or the nearest target of this combination: {near.name} ({near.family}).",
    )


def _without_backend(versions: Versions, name: str, backend: str) -> BadTarget:
    having = [target.name for target in versions.targets.values() if backend in target.backends]
    remedy = "" if backend == "triton" else " Or use --backend triton."
    return BadTarget(
        f"the {backend} backend has no kernels for {name}",
        remedy=f"Its targets are {', '.join(having)}.{remedy}",
    )


def _number(target: Target) -> int:
    """The number of a target: 1100 (hexadecimal) for gfx1100 and for gfx11-generic."""
    name = target.name.removeprefix("gfx")
    if target.is_generic:
        name = name.removesuffix(GENERIC).replace("-", "").ljust(4, "0")
    return int(name, 16)


def _list(known: Iterable[Target]) -> str:
    return ", ".join(target.name for target in known)
