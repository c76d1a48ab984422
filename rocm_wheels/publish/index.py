"""The site: package indexes as static pages (PEP 503), one per ROCm and torch, and the page to choose a wheel on."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

from markupsafe import Markup
from packaging.utils import canonicalize_name

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.publish import catalogue, which
from rocm_wheels.publish.catalogue import METADATA
from rocm_wheels.publish.entry import Interface, Link, Wheel
from rocm_wheels.publish.templates import TEMPLATES, render
from rocm_wheels.tables import key

PROJECT = canonicalize_name(names.DISTRIBUTION)
INTERFACE = canonicalize_name(names.INTERFACE)
FILES = "files"
SUMMARY = "metadata.json"
FORMAT = 1
_PART = re.compile(rf"index\.html|which\.py|{re.escape(SUMMARY)}|simple|{FILES}|rocm\d+\.\d+")  # of a site, at its top


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """An anchor of a page; `data` are its data- attributes."""

    text: str
    href: str
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where the site and its repository are, as absolute URLs."""

    url: str
    repository: str

    @property
    def name(self) -> str:
        """owner/name"""
        return "/".join(self.repository.split("/")[-2:])

    @classmethod
    def of(cls, *, repository: str | None, url: str | None) -> Home:
        """From owner/name, else GITHUB_REPOSITORY; the URL is that of GitHub Pages unless given."""
        name = repository or os.environ.get("GITHUB_REPOSITORY") or ""
        owner, slash, project = name.partition("/")
        if not (owner and slash and project) or "/" in project:
            raise DataError(
                f"the repository is {name!r}, not owner/name",
                remedy="Give --repo owner/name, or set GITHUB_REPOSITORY.",
            )
        pages = f"{owner.lower()}.github.io"
        given = url or f"https://{pages}/{'' if project.lower() == pages else f'{project}/'}"
        parts = urlsplit(given)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise DataError(
                f"{given!r} is not the URL of a site", remedy="Give one such as https://example.org/wheels/"
            )
        server = os.environ.get("GITHUB_SERVER_URL") or "https://github.com"
        return cls(url=given.rstrip("/") + "/", repository=f"{server}/{name}")


def build(
    wheels: Sequence[Wheel],
    out: Path,
    *,
    interfaces: Sequence[Interface] = (),
    versions: Versions,
    home: Home,
    files: Path | None = None,
) -> None:
    """Writes the whole site into `out`, in the place of an earlier one. The same wheels, the same bytes.

    What a site does not consist of, such as .git, .nojekyll or CNAME, is left alone.

    With `files`, the directory that the wheels lie in, wheels and their metadata become part of the site.
    """
    earlier = all((out / name).is_file() for name in (SUMMARY, "which.py", f"simple/{PROJECT}/index.html"))
    if out.exists() and not earlier and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is neither empty nor an earlier site", remedy="Give --out a new directory.")
    out.parent.mkdir(parents=True, exist_ok=True)
    wheels = sorted(wheels)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=out.parent) as scratch:
        site = Path(scratch) / "site"
        site.mkdir()
        if files is not None:
            _copy_files([*wheels, *interfaces], files, site / FILES)
            wheels = [replace(wheel, url=_hosted(wheel, home)) for wheel in wheels]
            interfaces = [replace(interface, url=_hosted(interface, home)) for interface in interfaces]
        _write_index(wheels, interfaces, site, home, versions, title=names.DISTRIBUTION)
        for directory in sorted({wheel.directory for wheel in wheels}):
            here = [wheel for wheel in wheels if wheel.directory == directory]
            beside = [interface for interface in interfaces if interface.directory == directory]
            title = f"{names.DISTRIBUTION} for {directory}"
            _write_index(here, beside, site / directory, home, versions, title=title)
        _write(site / "index.html", chooser(wheels, versions=versions, home=home))
        _write(site / "which.py", which.standalone(home.url))
        out.mkdir(exist_ok=True)
        for part in out.iterdir():
            if _PART.fullmatch(part.name):
                shutil.rmtree(part) if part.is_dir() else part.unlink()
        for part in site.iterdir():
            shutil.move(part, out)


def chooser(wheels: Sequence[Wheel], *, versions: Versions, home: Home) -> str:
    """The page to choose a wheel on; it asks nothing of any other address."""
    script = (TEMPLATES / "chooser.js").read_text(encoding="utf-8")
    style = (TEMPLATES / "chooser.css").read_text(encoding="utf-8")
    return render(
        "chooser.html.j2",
        wheels=wheels,
        home=home,
        axes=_axes(wheels, versions),
        known=Markup(_script_json(_known(versions))),
        amd=sum(wheel.on_amd_gpu for wheel in wheels),
        command=which.PASTE_COMMAND,
        script=Markup(script),
        style=Markup(style),
        hashes={"script": _csp_hash(script), "style": _csp_hash(style)},
    )


def _write_index(
    wheels: Sequence[Wheel],
    interfaces: Sequence[Interface],
    directory: Path,
    home: Home,
    versions: Versions,
    *,
    title: str,
) -> None:
    """simple/ with a page of each project, and metadata.json, of one set of wheels."""
    projects: dict[str, Sequence[Link]] = {PROJECT: wheels, **({INTERFACE: interfaces} if interfaces else {})}
    root = [Anchor(text=project, href=f"{project}/") for project in projects]
    _write(directory / "simple" / "index.html", render("simple.html.j2", title=title, links=root))
    for project, links in projects.items():
        page = render("simple.html.j2", title=title, links=[_anchor(link) for link in links])
        _write(directory / "simple" / project / "index.html", page)
    summary = {
        "format": FORMAT,
        "url": home.url,
        "repository": home.repository,
        "flash_attn": list(versions.flash_attn),
        **_known(versions),
        "wheels": [wheel.summary() for wheel in wheels],
    }
    _write(directory / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")


def _hosted(link: Link, home: Home) -> str:
    return f"{home.url}{FILES}/{quote(link.name, safe='')}"


def _anchor(link: Link) -> Anchor:
    metadata = f"sha256={link.metadata_sha256}"
    # The second name of the metadata is what pip and uv of 2023 read (PEP 714).
    data = {"core-metadata": metadata, "dist-info-metadata": metadata}
    if link.requires_python:
        data["requires-python"] = link.requires_python
    if link.yanked is not None:
        data["yanked"] = link.yanked
    return Anchor(text=link.name, href=f"{link.url}#sha256={link.sha256}", data=data)


def _axes(wheels: Sequence[Wheel], versions: Versions) -> dict[str, list[tuple[str, str]]]:
    """(value, text) of the choices of each axis: what exists, and what is published."""
    targets = {target: f"{entry.family} ({target})" for target, entry in versions.targets.items()}
    for wheel in wheels:
        targets |= {target: target for target in wheel.targets if target not in targets}
    torches = {torch.rpartition(".")[0] for torch in versions.torch} | {wheel.torch for wheel in wheels}
    return {
        "python": _choices({*versions.python, *(wheel.python for wheel in wheels)}),
        "torch": _choices(torches),
        "rocm": _choices({*versions.rocm, *(wheel.rocm for wheel in wheels)}),
        "gpu": list(targets.items()),
        "backend": [(backend, backend) for backend in versions.backends],
        "flash_attn": _choices({*versions.flash_attn, *(wheel.flash_attn for wheel in wheels)}),
    }


def _choices(found: set[str]) -> list[tuple[str, str]]:
    return [(version, version) for version in sorted(found, key=key)]


def _known(versions: Versions) -> dict[str, dict[str, object]]:
    """What can be built: torch minor -> full version, Pythons, and ROCm -> directory of PyTorch's index; GPU target ->
    backend -> the oldest ROCm; product -> its target."""
    return {
        "torch": {
            torch.rpartition(".")[0]: {"full": torch, "python": entry.python, "rocm": entry.rocm}
            for torch, entry in versions.torch.items()
        },
        "targets": {name: target.backends for name, target in versions.targets.items()},
        "products": {product: name for name, target in versions.targets.items() for product in target.products},
    }


def _script_json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _csp_hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"


def _copy_files(links: Sequence[Link], files: Path, out: Path) -> None:
    out.mkdir()
    for link in links:
        source = files / link.name
        shutil.copyfile(source, out / link.name)
        (out / (link.name + METADATA)).write_bytes(catalogue.core_metadata(source))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
