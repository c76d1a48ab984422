"""The pages for users: how many, how long, and that links inside the repository lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from rocm_wheels.paths import ROOT

DOCS = ROOT / "docs"
# A script writes this page whole, from the doctor's table: a reference, in which nobody reads on.
REFERENCE = "troubleshooting.md"
PAGES = sorted(path for path in DOCS.glob("*.md") if path.name != REFERENCE)
MOST_PAGES, MOST_LINES = 12, 1550
LINKING = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *DOCS.rglob("*.md"),
    *ROOT.glob("docker/*/README.md"),
    *(ROOT / f"{name}/README.md" for name in ("candle-flash-rocm", "libflash_attn_rocm", "amdgpu_simulator")),
]
_CODE = re.compile(r"^(```.*?^```|(?:    |\t).*?)$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    made: set[str] = set()
    for heading in _HEADING.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        base = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        made.add(next(name for number in range(100) if (name := f"{base}-{number}" if number else base) not in made))
    return made


def test_users_have_a_few_short_pages() -> None:
    assert len(PAGES) <= MOST_PAGES, [page.name for page in PAGES]
    lines = {page.name: page.read_text(encoding="utf-8").count("\n") for page in PAGES}
    assert sum(lines.values()) < MOST_LINES, lines


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_a_file_and_to_a_heading(page: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith(("mailto:", "<")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_a_page_is_reached_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in (*PAGES, DOCS / REFERENCE) if f"docs/{page.name}" not in text]


def test_the_page_of_gpus_is_up_to_date(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("generate_speed", DOCS / "generate_speed.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr("sys.argv", ["generate_speed.py", "--check"])
    assert script.main() == 0, capsys.readouterr().err
