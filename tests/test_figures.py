"""Figures in the docs follow from the data: none is typed, and a change of the data changes the pages."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_wheels.cli import matrix
from rocm_wheels.compile import units
from rocm_wheels.errors import DataError
from rocm_wheels.matrix.targets import universal
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.paths import ROOT
from rocm_wheels.publish import coverage, figures

PAGES = [path for pattern in figures.PAGES for path in sorted(ROOT.glob(pattern))]


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    from rocm_wheels.matrix import versions

    return figures.figures(versions.load(), coverage.matrix_of())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_range_of_versions_is_typed(page: Path, known: dict[str, str]) -> None:
    text = " ".join(figures.outside(page.read_text(encoding="utf-8")).split())
    for name in ("torch", "python", "rocm"):
        first, _, last = known[name].partition(" to ")
        typed = re.findall(rf"(?<![\w.]){re.escape(first)} (?:to|-|–) {re.escape(last)}(?![\d.])", text)
        assert not typed, f"write <!--={name}--><!--/-->, then python -m rocm_wheels coverage --readme"


def test_every_page_is_up_to_date(known: dict[str, str]) -> None:
    assert figures.fill(ROOT, {}, known) == {}


def test_a_change_of_the_data_changes_the_pages(data: Versions, tmp_path: Path) -> None:
    newest = list(data.torch)[-1]
    torch = {**data.torch, "2.99.0": replace(data.torch[newest], version="2.99.0")}
    matrix = {**coverage.matrix_of(), "python": ["3.11"]}
    known = figures.figures(replace(data, torch=torch), matrix)
    (tmp_path / "docs").mkdir()
    old, untouched = "torch <!--=torch-->2.5 to 2.6<!--/-->, <!--=wheels-->\n9<!--/--> jobs\n", "torch 2.5 to 2.6\n"
    (tmp_path / "README.md").write_text(old)
    (tmp_path / "docs/page.md").write_text(untouched)
    filled = figures.fill(tmp_path, {}, known)
    jobs = known["wheels"]
    assert filled == {
        tmp_path / "README.md": f"torch <!--=torch-->2.5 to 2.99<!--/-->, <!--=wheels-->{jobs}<!--/--> jobs\n"
    }
    assert int(jobs) < int(figures.figures(data, coverage.matrix_of())["wheels"])
    (tmp_path / "docs/page.md").write_text("<!--=tea-->5<!--/-->")
    with pytest.raises(DataError, match=r"page\.md: there is no figure 'tea'"):
        figures.fill(tmp_path, {}, known)


def test_kernels_are_counted_as_they_are_compiled(data: Versions, known: dict[str, str]) -> None:
    compiled = units.find(universal(data, None), backend="ck")
    for name in ("triton", "ck", "asm"):
        count = sum(len(unit.kernels) for unit in compiled if unit.compiler == name)
        assert known[f"kernels-{name}"] == str(count)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_a_fork_reads_what_its_release_costs(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--only", "2.8.3 3.1[12] 2.6.0 6.2 triton", "--target", "gfx1100", "--list"]
    assert matrix.main({"rocm": coverage.matrix_of()}, command) == 0
    told = re.search(r"\d+ jobs and [\d.]+ hours of runners", capsys.readouterr().err)
    page = (ROOT / "docs/releasing.md").read_text(encoding="utf-8")
    assert told
    assert told[0] in page
