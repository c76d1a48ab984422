"""The address of the site with the package indexes, and the repository that it belongs to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from rocm_wheels.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Home:
    """Absolute URLs of the site and its repository."""

    url: str
    repository: str

    @property
    def name(self) -> str:
        """owner/name"""
        return "/".join(self.repository.split("/")[-2:])

    @classmethod
    def of(cls, *, repository: str | None, url: str | None) -> Home:
        """From owner/name, else GITHUB_REPOSITORY. Without a URL, the site is the repository's GitHub Pages."""
        name = repository or os.environ.get("GITHUB_REPOSITORY") or ""
        owner, slash, project = name.partition("/")
        if not (owner and slash and project) or "/" in project:
            raise DataError(
                f"the repository is {name!r}, not owner/name",
                remedy="Give --repo owner/name, or set GITHUB_REPOSITORY.",
            )
        pages = f"{owner.lower()}.github.io"
        site = url or f"https://{pages}/{'' if project.lower() == pages else f'{project}/'}"
        parts = urlsplit(site)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise DataError(f"{site!r} is not the URL of a site", remedy="Give one such as https://example.org/wheels/")
        server = os.environ.get("GITHUB_SERVER_URL") or "https://github.com"
        return cls(url=site.rstrip("/") + "/", repository=f"{server}/{name}")
