"""The site: package indexes as static pages (PEP 503) and the page to choose a wheel on.

The root index lists only universal wheels, because installers compare labels: if `2.8.3+rocm` and
`2.8.3+rocm62torch2.5` are in one index, they take the latter for `flash-attn==2.8.3` and replace the user's torch. So
each ROCm and torch has an index of its own.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup
from packaging.utils import canonicalize_name

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import advice_facts, names
from rocm_wheels.matrix.names import METADATA
from rocm_wheels.matrix.platforms import PLATFORMS
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.paths import ROOT
from rocm_wheels.publish import answers, hardware, products, which
from rocm_wheels.publish.catalogue import Catalogue, newest
from rocm_wheels.publish.home import Home
from rocm_wheels.publish.links import UNLABELLED, Link, UnlabelledWheel, Wheel, unlabelled_link
from rocm_wheels.publish.templates import TEMPLATES, render
from rocm_wheels.tables import version_key
from rocm_wheels.wheel import contents, rewrite
from rocm_wheels.wheel.contents import WheelFile

PROJECT = canonicalize_name(names.DISTRIBUTION)
FILES = "files"
SUMMARY = "metadata.json"
FORMAT = which.FORMAT
_PROJECT_PAGE = f"simple/{PROJECT}/index.html"
# Marker files in the directory of a site: that it is a site, the new site being written, the old parts being replaced.
_MARK, _SCRATCH, _OLD = ".flash_attn_site", ".site-new", ".site-old"
_PART = re.compile(
    rf"index\.html|which\.py|{re.escape(SUMMARY)}|simple|{FILES}|{UNLABELLED[:-1]}|rocm\d+\.\d+"
)  # entries at the top of a site


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A link of a page; `data` are its data- attributes."""

    text: str
    href: str
    data: Mapping[str, str] = field(default_factory=dict)


def build(
    found: Catalogue, out: Path, *, versions: Versions, home: Home, files: Mapping[str, WheelFile] | None = None
) -> None:
    """Writes the whole site into `out`, in place of an earlier one. The same wheels give the same bytes.

    The pages list every file that was ever public, except withdrawn files and backports. metadata.json and the page to
    choose on have the newest build of each wheel, of all directories. Files that are not part of a site, such as .git,
    .nojekyll or CNAME, are not changed. files: name -> wheel, if the wheels and their metadata become part of the site.
    A run that is killed, or a full disk, leaves a directory that the next run accepts and completes.
    """
    _claim(out)
    site = out / _SCRATCH
    for leftover in (site, out / _OLD):
        shutil.rmtree(leftover, ignore_errors=True)
    site.mkdir()
    try:
        if files is not None:
            _copy_files(files, site / FILES)
            found = replace(
                found,
                wheels=tuple(replace(wheel, url=_hosted(wheel, home)) for wheel in found.wheels),
                interfaces=tuple(replace(wheel, url=_hosted(wheel, home)) for wheel in found.interfaces),
                unlabelled=tuple(
                    replace(wheel, url=_hosted(wheel, home)) for wheel in _write_unlabelled(found.wheels, site / FILES)
                ),
            )
        everything: list[Link] = [*found.wheels, *found.interfaces, *found.unlabelled, *found.unverified]
        for directory in sorted({"", *(link.directory for link in everything)}):
            title = f"{names.DISTRIBUTION} for {directory[:-1]}" if directory else names.DISTRIBUTION
            _write_pages(_in_directory(found, directory), site / directory, title=title)
            listed = found if directory == "" else _in_directory(found, directory)
            _write_summary(listed.wheels, site / directory, home, versions)
        _write(site / "index.html", chooser(newest(found.wheels), versions=versions, home=home))
        _write(site / "which.py", which.standalone(home.url))
        _swap(site, out)
    finally:
        shutil.rmtree(site, ignore_errors=True)
        shutil.rmtree(out / _OLD, ignore_errors=True)


def _claim(out: Path) -> None:
    """Marks a directory as a site before anything in it changes. Raises DataError if it holds something else."""
    ours = (out / _MARK).is_file() or all((out / name).is_file() for name in (SUMMARY, "which.py", _PROJECT_PAGE))
    if out.exists() and not ours and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is neither empty nor an earlier site", remedy="Give --out a new directory.")
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).touch()


def _swap(site: Path, out: Path) -> None:
    """Replaces the old parts by the new parts, by renaming within the directory."""
    old = out / _OLD
    old.mkdir()
    fresh = {part.name for part in site.iterdir()}
    for part in sorted(out.iterdir()):
        if _PART.fullmatch(part.name) and part.name not in fresh:
            part.rename(old / part.name)
    for part in sorted(site.iterdir()):
        if (out / part.name).is_dir():
            (out / part.name).rename(old / part.name)
        part.replace(out / part.name)


def chooser(wheels: Sequence[Wheel], *, versions: Versions, home: Home) -> str:
    """The page to choose a wheel on. It sends no request to another address."""
    script = (TEMPLATES / "chooser.js").read_text(encoding="utf-8")
    style = (TEMPLATES / "chooser.css").read_text(encoding="utf-8")
    runs = hardware.load(ROOT / hardware.RUNS)
    owners, failures = hardware.by_wheel(runs), hardware.failures_by_wheel(runs)
    return render(
        "chooser.html.j2",
        wheels=wheels,
        home=home,
        axes=_axes(wheels, versions),
        known=Markup(_script_json(_answers(json.dumps(advice_facts.facts(versions))))),
        run=which.RUN,
        owners=owners,
        failures=failures,
        amd=sum(wheel.on_amd_gpu or wheel.sha256 in owners for wheel in wheels),
        command=which.PASTE_COMMAND,
        script=Markup(script),
        style=Markup(style),
        hashes={"script": _csp_hash(script), "style": _csp_hash(style)},
    )


def _in_directory(stock: Catalogue, directory: str) -> Catalogue:
    """The files in the index of one directory; "" is the root."""
    return replace(
        stock,
        wheels=tuple(wheel for wheel in stock.wheels if wheel.directory == directory),
        interfaces=tuple(wheel for wheel in stock.interfaces if wheel.directory == directory),
        unlabelled=tuple(wheel for wheel in stock.unlabelled if wheel.directory == directory),
        unverified=tuple(link for link in stock.unverified if link.directory == directory),
    )


def _write_pages(stock: Catalogue, directory: Path, *, title: str) -> None:
    """Writes simple/ with a page for each project. flash-attn has a page even if none of its wheels is listed."""
    bare = [link for link in stock.unverified if not names.is_interface(link.name)]
    projects: dict[str, list[Link]] = {
        PROJECT: [link for link in (*stock.wheels, *stock.unlabelled, *bare) if link.listed]
    }
    for link in (*stock.interfaces, *stock.unverified):
        if names.is_interface(link.name) and link.listed:
            projects.setdefault(canonicalize_name(names.parse_interface(link.name)[0]), []).append(link)
    root = [Anchor(text=project, href=f"{project}/") for project in projects]
    _write(directory / "simple" / "index.html", render("simple.html.j2", title=title, links=root))
    for project, links in projects.items():
        page = render("simple.html.j2", title=title, links=[_anchor(link) for link in links])
        _write(directory / "simple" / project / "index.html", page)


def _write_summary(wheels: Sequence[Wheel], directory: Path, home: Home, versions: Versions) -> None:
    """Writes metadata.json: the newest build of each wheel, and what can be built."""
    summary = {
        "format": FORMAT,
        "url": home.url,
        "repository": home.repository,
        "flash_attn": list(versions.flash_attn),
        "advice": advice_facts.facts(versions),
        "wheels": [wheel.summary() for wheel in newest(wheels)],
    }
    _write(directory / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")


def _hosted(link: Link, home: Home) -> str:
    return f"{home.url}{FILES}/{quote(link.name, safe='')}"


def _anchor(link: Link) -> Anchor:
    data = {}
    if link.metadata_sha256:
        # Not as data-dist-info-metadata, the name before PEP 714: pip 22.3 to 23.1 read it and then refuse wheels of
        # `flash-attn`, because METADATA spells the name flash_attn.
        data = {"core-metadata": f"sha256={link.metadata_sha256}"}
    if link.requires_python:
        data["requires-python"] = link.requires_python
    if link.yanked is not None:
        data["yanked"] = link.yanked
    return Anchor(text=link.name, href=f"{link.url}#sha256={link.sha256}", data=data)


def _axes(wheels: Sequence[Wheel], versions: Versions) -> dict[str, list[tuple[str, str]]]:
    """(value, text) of the choices on each axis: every known version, and the published versions."""
    known = [target for target in versions.targets.values() if not target.is_generic]
    gpus = [(target.name, text) for target in known for text in products.choices(target)]
    others = {target for wheel in wheels for target in wheel.targets if target not in versions.targets}
    cells = [wheel for wheel in wheels if wheel.torch]
    torches = {torch.rpartition(".")[0] for torch in versions.torch} | {wheel.torch for wheel in cells}
    return {
        "python": _choices({*versions.python, *(wheel.python for wheel in wheels)}),
        "torch": _choices(torches),
        "rocm": _choices({*versions.rocm, *(wheel.rocm for wheel in cells)}),
        "gpu": [*gpus, *((target, target) for target in sorted(others))],
        "backend": [(backend, backend) for backend in versions.backends],
        "platform": [(each, each.capitalize()) for each in PLATFORMS],
        "flash_attn": _choices({*versions.flash_attn, *(wheel.flash_attn for wheel in wheels)}),
    }


def _choices(values: set[str]) -> list[tuple[str, str]]:
    return [(version, version) for version in sorted(values, key=version_key)]


@functools.cache
def _answers(facts: str) -> dict[str, object]:
    """The table of answers for facts, as JSON. A site and its tests build pages from the same facts many times."""
    return answers.table(json.loads(facts))


def _script_json(value: object) -> str:
    """JSON for a <script> element: no `</script>` in a string ends the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _csp_hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"


def _copy_files(files: Mapping[str, WheelFile], out: Path) -> None:
    out.mkdir()
    for name, file in files.items():
        shutil.copyfile(file.path, out / name)
        (out / (name + METADATA)).write_bytes(file.metadata)


def _write_unlabelled(wheels: Sequence[Wheel], files: Path) -> Iterator[UnlabelledWheel]:
    """Writes the wheels without label, with their metadata, next to the universal wheels. Yields their links."""
    for wheel in wheels:
        if names.unlabelled(wheel.name):
            file = contents.read(rewrite.without_label(files / wheel.name, files))
            (files / (file.name + METADATA)).write_bytes(file.metadata)
            yield unlabelled_link(wheel, file.name, file.name, file.sha256, file.metadata)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
