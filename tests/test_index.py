from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fake_github
import pytest
import sites
import wheelhouse
from publishing import publish_as
from sites import CELLS, HOME

from rocm_wheels import cli
from rocm_wheels.errors import DataError
from rocm_wheels.matrix import cells, versions
from rocm_wheels.publish import assets, directory, github, index, notes, yanks
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.publish.home import Home
from rocm_wheels.publish.links import bare_link


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sites.wheels(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def site(dist: Path) -> Path:
    return sites.build(dist, dist.parent / "site", HOME)


def test_a_wheel_that_failed_its_tests_is_not_indexed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """which.py says of every wheel of a site that it passed."""
    wheel = wheelhouse.write(tmp_path / "dist", wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), ok=False)
    command = ["index", "--repo", "owner/name", "--dir", str(tmp_path / "dist"), "--out", str(tmp_path / "site")]
    assert cli.main(command) == DataError.exit_code
    assert f"{wheel.name} did not pass its tests\nSee {wheel.name}.verdict.json." in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))


def anchors(page: Path) -> list[dict[str, str | None]]:
    parser = _Anchors()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.found


def roots(directory: Path) -> list[str | None]:
    return [anchor["href"] for anchor in anchors(directory / "simple" / "index.html")]


def test_page_of_one_cell(site: Path) -> None:
    result = anchors(site / "rocm6.4" / "torch2.9" / "simple" / "flash-attn" / "index.html")
    assert len(result) == 4
    first = result[0]
    assert first["href"] is not None
    assert re.fullmatch(
        rf"{HOME.url}files/flash_attn-2\.8\.3%2Brocm64torch2\.9-cp312-cp312-manylinux_2_17_x86_64\.whl#sha256=[0-9a-f]{{64}}",
        first["href"],
    )
    metadata = (site / "files" / unquote(first["href"].rpartition("/")[2].partition("#")[0] + ".metadata")).read_bytes()
    assert first["data-core-metadata"] == f"sha256={hashlib.sha256(metadata).hexdigest()}"
    assert "data-dist-info-metadata" not in first  # pip 22.3 to 23.1 would refuse the wheel
    assert first["data-requires-python"] == ">=3.10"
    assert [anchor.get("data-yanked") for anchor in result] == ["wrong gradients <b>"] * 2 + [None] * 2
    assert roots(site / "rocm6.4" / "torch2.9") == ["flash-attn/"]
    assert roots(site / "rocm6.2" / "torch2.5") == ["flash-attn/", "flash-attn-3/"]


def test_the_index_at_the_root_lists_no_wheel_of_a_combination(site: Path) -> None:
    """Its label would take precedence over the universal wheel's label, and replace the user's torch."""
    assert roots(site) == ["flash-attn/"]
    assert anchors(site / "simple" / "flash-attn" / "index.html") == []
    listed = [anchors(page) for page in site.glob("rocm*/torch*/simple/flash-attn/index.html")]
    assert sum(map(len, listed)) == 2 * len(CELLS)
    assert len(json.loads((site / "metadata.json").read_text())["wheels"]) == 2 * len(CELLS)


def test_the_same_wheels_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    local = directory.read(dist)
    trees = []
    for _ in range(2):
        out = tmp_path / "site"
        index.build(Catalogue(wheels=local.wheels), out, versions=versions.load(), home=HOME, files=local.files)
        trees.append({str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert trees[0] == trees[1]
    assert {"index.html", "metadata.json", "which.py", "rocm7.1/torch2.10/metadata.json"} <= set(trees[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site"]


def test_files_that_are_not_part_of_the_site_are_kept(dist: Path, tmp_path: Path) -> None:
    """A checked-out branch of GitHub Pages, with a domain of its own."""
    out = tmp_path / "site"
    wheels = directory.read(dist).wheels
    index.build(Catalogue(wheels=wheels), out, versions=versions.load(), home=HOME)
    (out / ".git").mkdir()
    kept = [out / name for name in (".git/HEAD", ".nojekyll", "CNAME", "rocm.txt")]
    for path in kept:
        path.write_text("mine")
    later = Catalogue(wheels=tuple(wheel for wheel in wheels if wheel.rocm != "7.1"))
    index.build(later, out, versions=versions.load(), home=HOME)
    assert [path.read_text() for path in kept] == ["mine"] * len(kept)
    fresh = tmp_path / "fresh"
    index.build(later, fresh, versions=versions.load(), home=HOME)
    trees = [
        {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file() and path not in kept}
        for site in (out, fresh)
    ]
    assert trees[0] == trees[1]


def test_a_directory_of_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text("x")
    for out in (tmp_path, tmp_path / "metadata.json"):
        with pytest.raises(DataError, match="is neither empty nor an earlier site"):
            index.build(Catalogue(), out, versions=versions.load(), home=HOME)
    assert (tmp_path / "metadata.json").read_text() == "x"


def test_from_a_release_as_from_the_directory(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published, yanked, listed as JSON, indexed: every link of the index is an asset of the release."""
    for path in dist.glob("*torch2.10*"):
        (tmp_path / "some" / path.name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, tmp_path / "some" / path.name)
    with fake_github.serve(fake_github.Hub()) as hub:
        api = github.GitHub(fake_github.REPOSITORY, token=fake_github.TOKEN, api_url=hub.url, say=lambda line: None)  # noqa: ARG005
        said: list[str] = []
        publish_as(api, "v1", tmp_path / "some", said.append)
        marks = {
            "flash_attn-2.8.3+rocm71torch2.10-cp310-cp310-manylinux_2_17_x86_64.whl": "bad",
            "flash_attn_3-3.0.0+rocm71torch2.10triton-py3-none-any.whl": "bad too",
        }
        monkeypatch.setattr(yanks, "load", lambda: marks)
        hub.add_release("v2")  # a draft must not be indexed
        listing = tmp_path / "releases.json"
        listing.write_text(json.dumps([list(hub.releases.values())]))
        monkeypatch.setenv("GITHUB_API_URL", hub.url)
        monkeypatch.delenv("GITHUB_TOKEN", raising=False)
        monkeypatch.delenv("GH_TOKEN", raising=False)
        out = tmp_path / "site"
        command = ["index", "--repo", fake_github.REPOSITORY, "--out", str(out)]
        assert cli.main([*command, "--release-json", str(listing)]) == 0
        assert "4 wheels, for https://owner.github.io/name/" in capsys.readouterr().out
        pages = out / "rocm7.1" / "torch2.10" / "simple"
        result = anchors(pages / "flash-attn" / "index.html")
        assert [anchor.get("data-yanked") for anchor in result] == ["bad", None, None, None]
        beside = anchors(pages / "flash-attn-3" / "index.html")
        assert [anchor.get("data-yanked") for anchor in beside] == [None, "bad too"]
        for anchor in [*result, *beside]:
            url, _, digest = (anchor["href"] or "").partition("#sha256=")
            assert "%2B" in url
            assert hashlib.sha256(api.download(url)).hexdigest() == digest
            metadata = api.download(f"{url}.metadata")
            assert anchor["data-core-metadata"] == f"sha256={hashlib.sha256(metadata).hexdigest()}"
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert cli.main(command) == 0  # asks GitHub itself
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
        listing.write_text(json.dumps([{"tag_name": "v1"}]))
        assert cli.main([*command, "--release-json", str(listing)]) == DataError.exit_code
        assert "this JSON is not a list of GitHub releases\nMake it with: gh api" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("repository", "url"),
    [("Owner/Name", "https://owner.github.io/Name/"), ("Owner/owner.github.io", "https://owner.github.io/")],
)
def test_the_site_of_a_repository_is_its_github_pages(repository: str, url: str) -> None:
    home = Home.of(repository=repository, url=None)
    assert (home.url, home.name) == (url, repository)


@pytest.mark.parametrize("url", ["example.org/x", "file:///x", "https://example.org/?x"])
def test_the_address_of_the_site_is_checked(url: str) -> None:
    with pytest.raises(DataError, match="is not the URL of a site"):
        Home.of(repository="owner/name", url=url)


def tree(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


class FullError(OSError):
    """Simulates a full disk, or SIGKILL: no later code works normally."""


@pytest.fixture(scope="module")
def earlier_and_fresh(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A site before some wheels were published, and the files of the site with them."""
    root, wheels = tmp_path_factory.mktemp("swap"), directory.read(dist).wheels
    index.build(Catalogue(wheels=wheels), root / "fresh", versions=versions.load(), home=HOME)
    earlier = Catalogue(wheels=tuple(wheel for wheel in wheels if wheel.rocm != "7.1"))
    index.build(earlier, root / "earlier", versions=versions.load(), home=HOME)
    return root / "earlier", tree(root / "fresh")


@pytest.mark.parametrize(
    "point", [pytest.param(each, marks=pytest.mark.long if each % 2 else ()) for each in range(40)]
)
def test_killed_at_any_point_of_its_swap_it_starts_again_and_ends_the_same(
    dist: Path, earlier_and_fresh: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    point: int,
) -> None:  # fmt: skip
    wheels, out = directory.read(dist).wheels, tmp_path / "site"
    shutil.copytree(earlier_and_fresh[0], out)
    (out / "CNAME").write_text("mine")
    left = [point]

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if left[0] == 0:
                raise FullError(28, "No space left on device")
            left[0] -= 1
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("mkdir", "touch", "rename", "replace", "write_text"):
            patch.setattr(Path, name, dying(getattr(Path, name)))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
        with contextlib.suppress(FullError):
            index.build(Catalogue(wheels=wheels), out, versions=versions.load(), home=HOME)
    index.build(Catalogue(wheels=wheels), out, versions=versions.load(), home=HOME)
    assert {**earlier_and_fresh[1], "CNAME": b"mine"} == tree(out)
    assert [path.name for path in out.iterdir() if path.name.startswith(".site")] == []


def test_a_full_disk_is_two_lines(tmp_path: Path, dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    command = ["index", "--repo", "owner/name", "--dir", str(dist), "--out", str(blocked / "site")]
    assert cli.main(command) > 0
    assert len(capsys.readouterr().err) < 400


def test_a_wheel_that_was_public_stays_listed(tmp_path: Path) -> None:
    """In the pages of the index, for lock files. The page to choose on and metadata.json have the newest build."""
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
    for build in (0, 1):
        wheelhouse.write(tmp_path / "dist", cell, build=build, payload=f"build = {build}\n")
    wheels = tuple(replace(wheel, release=f"v1.{wheel.build}.0") for wheel in directory.read(tmp_path / "dist").wheels)
    bare = bare_link(
        "flash_attn-2.8.3+rocm71torch2.10-cp310-cp310-manylinux_2_17_x86_64.whl",
        "0" * 64, b"", url="https://x/y.whl", release="v1.0.0", yanked="it is not known whether it passed its tests",
    )  # fmt: skip
    index.build(Catalogue(wheels=wheels, unverified=(bare,)), tmp_path / "site", versions=versions.load(), home=HOME)
    listed = anchors(tmp_path / "site/rocm6.2/torch2.5/simple/flash-attn/index.html")
    assert [anchor.get("data-yanked") for anchor in listed] == [None, None]
    (unverified,) = anchors(tmp_path / "site/rocm7.1/torch2.10/simple/flash-attn/index.html")
    assert unverified.get("data-yanked") == bare.yanked
    assert "data-core-metadata" not in unverified
    summary = json.loads((tmp_path / "site/metadata.json").read_text())["wheels"]
    assert [wheel["release"] for wheel in summary] == ["v1.1.0"]


def test_the_universal_wheel_is_in_the_index_at_the_root(tmp_path: Path) -> None:
    """For every ROCm and torch, simple/ lists it, it is first in the summary, and no other index lists it."""
    dist, out = tmp_path / "dist", tmp_path / "site"
    claim = cells.universal(versions.load(), wheelhouse.NEWEST)
    path, fa3 = wheelhouse.write_with_fa3(dist, claim)
    wheelhouse.write(dist, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    assert path.name.startswith(f"flash_attn-{wheelhouse.NEWEST}+rocm-cp310-abi3-")
    assert [asset.name for asset in assets.collect(dist)[1]][1] == fa3.name
    local = directory.read(dist)
    result = Catalogue(wheels=local.wheels, interfaces=local.interfaces)
    index.build(result, out, versions=versions.load(), home=HOME, files=local.files)
    (listed,) = anchors(out / "simple/flash-attn/index.html")
    assert f"/{quote(path.name)}#" in (listed["href"] or "")
    assert len(anchors(out / "simple/flash-attn-3/index.html")) == 1
    assert len(anchors(out / "rocm6.2/torch2.5/simple/flash-attn/index.html")) == 1
    summary = json.loads((out / "metadata.json").read_text())["wheels"]
    assert [(wheel["torch"], wheel["rocm"], wheel["python"], wheel["index"]) for wheel in summary] == [
        ("", "", "3.10", "simple/"),
        ("2.5", "6.2", "3.11", "rocm6.2/torch2.5/simple/"),
    ]
    page = notes.render(local.wheels, tag="v1.0.0", index_url=HOME.url, new="", repository="owner/name")
    assert f'pip install "flash_attn=={wheelhouse.NEWEST}+rocm" --extra-index-url {HOME.url}simple/' in page
    assert page.index("### Every ROCm from 6.1 on, every torch from 2.5 on") < page.index("### ROCm 6.2, torch 2.5")
