"""Release notes, rendered from the wheels and their test reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from rocm_wheels.errors import PublishFailed
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.names import is_candidate
from rocm_wheels.paths import ROOT
from rocm_wheels.publish import hardware, which
from rocm_wheels.publish.assets import SUMS
from rocm_wheels.publish.links import Wheel
from rocm_wheels.publish.templates import render as render_template
from rocm_wheels.tables import version_key

MAX_CHARACTERS = 125_000  # limit of GitHub for the text of a release


def render(wheels: Sequence[Wheel], *, tag: str, index_url: str, new: str, repository: str) -> str:
    """The notes of a release as Markdown; `new` is Markdown too. Raises PublishFailed if there are no wheels, or if the
    notes are too long for GitHub.
    """
    if not wheels:
        raise PublishFailed(f"release {tag} holds no wheel", remedy=f"Publish some: `publish --tag {tag}`.")
    grouped = sorted(wheels, key=_newest_first)
    groups = [(title, sorted(group)) for title, group in groupby(grouped, _title)]
    example = next((wheel for wheel in sorted(wheels) if wheel.yanked is None), None)
    runs = hardware.load(ROOT / hardware.RUNS)
    owners, failures = hardware.by_wheel(runs), hardware.failures_by_wheel(runs)
    text = render_template(
        "release_notes.md.j2",
        tag=tag,
        index_url=index_url.rstrip("/"),
        new=_without_html(new),
        repository=repository,
        groups=groups,
        wheels=wheels,
        example=example,
        interfaces=_interfaces(example),
        candidate=is_candidate(tag),
        owners=owners,
        failures=failures,
        ran_on_amd=[wheel for wheel in wheels if wheel.on_amd_gpu or wheel.sha256 in owners],
        beside_pypis_torch=sum(wheel.beside_pypis_torch for wheel in wheels),
        sums=SUMS,
        run=which.RUN,
    )
    if len(text) > MAX_CHARACTERS:
        raise PublishFailed(
            f"the notes of {tag} have {len(text)} characters, GitHub takes {MAX_CHARACTERS}",
            remedy="Publish the wheels under two tags; the index joins all releases.",
        )
    return text


def _without_html(new: str) -> str:
    """Markdown whose HTML is text. GitHub's list of changes has titles of pull requests, and a `<!--` in one of them
    would hide what follows. The comment with which GitHub begins its list goes.
    """
    return re.sub(r"\A\s*<!-- Release notes generated .*?-->", "", new, flags=re.DOTALL).strip().replace("<", "&lt;")


def _interfaces(example: Wheel | None) -> list[tuple[str, str]]:
    """(module, requirement) of the interface wheels that accompany the wheel of the example."""
    data = versions.load()
    if example is None or example.flash_attn != data.flash_attn[-1]:
        return []
    label = example.version.partition("+")[2]
    return [
        (each.module, f"{each.name.replace('_', '-')}=={each.version}+{label}") for each in data.interfaces.values()
    ]


def _newest_first(wheel: Wheel) -> tuple[object, ...]:
    """The universal wheel, then the other wheels by ROCm and torch."""
    return tuple([-part for part in version_key(version)] if version else [] for version in (wheel.rocm, wheel.torch))


def _title(wheel: Wheel) -> str:
    if wheel.torch:
        return f"ROCm {wheel.rocm}, torch {wheel.torch}"
    known = versions.load()
    rocm, torch = next(iter(known.rocm)), next(iter(known.torch)).rpartition(".")[0]
    return f"Every ROCm from {rocm} on, every torch from {torch} on"
