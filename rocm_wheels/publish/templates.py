"""Jinja templates: everything is escaped, and an undefined name is an error."""

from __future__ import annotations

import re
from typing import Any

import jinja2
from markupsafe import Markup, escape

from rocm_wheels.paths import ROOT

TEMPLATES = ROOT / "templates"
# Characters that start markup in GitHub's Markdown; HTML is escaped before.
_GITHUB = {"@": "@&#8203;", "$": "<span>$</span>"}  # a backslash does not stop a mention or a formula
_MARKDOWN = re.compile(r"([\\`*_\[\]|~#!])")


def render(template: str, **values: Any) -> str:
    """Renders a template of templates/."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(size=size, error=error, md=markdown)
    return environment.get_template(template).render(**values)


def size(count: float) -> str:
    """A size for users: "34.2 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def markdown(text: object) -> Markup:
    """Escapes text for one line or table cell of GitHub's Markdown: it mentions nobody and holds no formula."""
    # HTML is escaped after Markdown, so that its own "#" stays as it is ("&#39;").
    plain = str(escape(_MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))))
    for mark, harmless in _GITHUB.items():
        plain = plain.replace(mark, harmless)
    return Markup(plain)
