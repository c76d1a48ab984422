from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fake_github
import pytest
import wheelhouse
from uv import find_uv_bin

from rocm_wheels import catalogue, cli, github, index, release, versions
from rocm_wheels.errors import DataError
from rocm_wheels.index import Home

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
HOME = Home(url="https://example.org/wheels/", repository="https://github.com/owner/name")
CELLS = [
    *(f"2.8.3 {python} 2.5.1 6.2" for python in ("3.10", "3.11", "3.12", "3.13", "3.14")),
    *(f"2.8.3 {python} 2.5.1 6.1" for python in ("3.10", "3.12")),
    *(f"2.8.3 {python} 2.10.0 7.1" for python in ("3.10", "3.14")),
    *(f"2.7.4 {python} 2.5.1 6.2" for python in ("3.10", "3.11", "3.12", "3.13", "3.14")),
    "2.7.4 3.12 2.9.1 6.4",
    "2.8.3 3.12 2.9.1 6.4",
]
YANKED = "2.8.3 3.12 2.9.1 6.4"
WITH_INTERFACE = ["2.8.3 3.11 2.5.1 6.2", "2.8.3 3.10 2.10.0 7.1"]  # flash-attn-3 is the same for every Python
# (flash-attn wanted or "", Python, torch, ROCm, label expected): the newest, ck before triton, never another cell.
SITUATIONS = [
    ("", "3.10", "2.5", "6.2", "2.8.3+rocm62torch2.5"),
    ("", "3.11", "2.5", "6.2", "2.8.3+rocm62torch2.5"),
    ("", "3.12", "2.5", "6.2", "2.8.3+rocm62torch2.5"),
    ("", "3.10", "2.5", "6.1", "2.8.3+rocm61torch2.5"),
    ("", "3.12", "2.5", "6.1", "2.8.3+rocm61torch2.5"),
    ("", "3.14", "2.10", "7.1", "2.8.3+rocm71torch2.10"),
    ("2.8.3+rocm62torch2.5triton", "3.11", "2.5", "6.2", "2.8.3+rocm62torch2.5triton"),
    ("2.8.3+rocm61torch2.5triton", "3.10", "2.5", "6.1", "2.8.3+rocm61torch2.5triton"),
    ("2.8.3+rocm71torch2.10triton", "3.10", "2.10", "7.1", "2.8.3+rocm71torch2.10triton"),
    ("2.7.4", "3.12", "2.5", "6.2", "2.7.4+rocm62torch2.5"),
    ("2.7.4+rocm62torch2.5triton", "3.10", "2.5", "6.2", "2.7.4+rocm62torch2.5triton"),
    ("", "3.12", "2.9", "6.4", "2.7.4+rocm64torch2.9"),  # the newest one is yanked
]


@dataclass(frozen=True)
class Site:
    """A site behind an address; `asked` are the paths that were asked for."""

    url: str
    root: Path
    asked: list[str]

    def simple(self, rocm: str, torch: str) -> str:
        return f"{self.url}rocm{rocm}/torch{torch}/simple/"


class _Handler(http.server.SimpleHTTPRequestHandler):
    asked: list[str]

    def log_message(self, *_: object) -> None:
        self.asked.append(unquote(self.path))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """An empty directory behind an address."""
    root = tmp_path_factory.mktemp("www")
    asked: list[str] = []
    handler = functools.partial(type("Handler", (_Handler,), {"asked": asked}), directory=root)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield Site(url=f"http://127.0.0.1:{server.server_address[1]}/", root=root, asked=asked)
        server.shutdown()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    for text in CELLS:
        for backend in ("ck", "triton"):
            wheelhouse.write(directory, wheelhouse.cell(text, backend))
    for text in WITH_INTERFACE:
        for backend in ("ck", "triton"):
            wheelhouse.write_interface(directory, wheelhouse.cell(text, backend))
    return directory


@pytest.fixture(scope="module")
def site(serve: Site, dist: Path) -> Site:
    """All the cells, and beside them an ordinary index with what flash_attn needs."""
    yanked = wheelhouse.cell(YANKED)
    wheels = [
        replace(wheel, yanked="wrong gradients <b>")
        if (wheel.torch, wheel.flash_attn) == ("2.9", yanked.flash_attn)
        else wheel
        for wheel in catalogue.from_directory(dist)
    ]
    out = serve.root / "wheels"
    home = replace(HOME, url=f"{serve.url}wheels/")
    interfaces = catalogue.interfaces_in(dist)
    index.build(wheels, out, interfaces=interfaces, versions=versions.load(), home=home, files=dist)
    for name, version in (("einops", "0.8.2"), ("torch", "2.5.1"), ("torch", "2.5.2")):
        _pure_wheel(serve.root / "ordinary" / name, name, version)
    return Site(url=home.url, root=out, asked=serve.asked)


def _pure_wheel(directory: Path, name: str, version: str) -> Path:
    """A tiny wheel and its place in an index page."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    path = directory / f"{name}-{version}-py3-none-any.whl"
    hip = "6.2.41133-dd7f95766" if "rocm" in version else None
    files = {
        f"{name}/__init__.py": "",
        f"{name}/version.py": f"__version__ = '{version}'\nhip: Optional[str] = {hip!r}\ncuda = None\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    links = "".join(f'<a href="{each.name}">{each.name}</a>' for each in sorted(directory.glob("*.whl")))
    (directory / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return path


def clean_environment(cache: Path) -> dict[str, str]:
    """No setting of this machine's user: neither another index nor a cached wheel."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_", "VIRTUAL_ENV"))}
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {
        **kept,
        **own,
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(cache),
        "NO_PROXY": "127.0.0.1",
        "UV_LINK_MODE": "copy",
    }


def call(command: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=clean_environment(cache), capture_output=True, text=True, timeout=60, check=False
    )


def pip(cache: Path, *arguments: str, python: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    return call([sys.executable, "-m", "pip", "--python", str(python), "install", *arguments], cache)


def uv(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call([find_uv_bin(), "pip", "install", *arguments], cache)


def for_python(python: str, target: Path) -> list[str]:
    """pip's options for a Python that need not be here."""
    options = ["--python-version", python, "--platform", wheelhouse.PLATFORM, "--implementation", "cp"]
    return [*options, "--only-binary", ":all:", "--target", str(target), "--ignore-installed"]


@pytest.mark.parametrize(("wanted", "python", "torch", "rocm", "label"), SITUATIONS)
def test_pip_takes_the_right_wheel_and_dry_runs_download_none(
    site: Site, tmp_path: Path, wanted: str, python: str, torch: str, rocm: str, label: str
) -> None:
    site.asked.clear()
    requirement = f"flash_attn=={wanted}" if wanted else "flash_attn"
    options = ["--dry-run", "--no-deps", "--quiet", "--report", "-", *for_python(python, tmp_path / "target")]
    done = pip(tmp_path, *options, "--index-url", site.simple(rocm, torch), requirement)
    assert done.returncode == 0, done.stderr
    (item,) = json.loads(done.stdout)["install"]
    tag = f"cp{python.replace('.', '')}"
    name = f"flash_attn-{label}-{tag}-{tag}-{wheelhouse.PLATFORM}.whl"
    assert unquote(item["download_info"]["url"]).rpartition("/")[2] == name
    assert item["download_info"]["archive_info"]["hashes"]["sha256"] == catalogue.file_sha256(
        site.root / "files" / name
    )
    assert item["is_yanked"] is False
    assert [path for path in site.asked if ".whl" in path] == [f"/wheels/files/{name}.metadata"]


@pytest.mark.parametrize(("wanted", "python", "torch", "rocm", "label"), SITUATIONS)
def test_uv_takes_the_right_wheel_and_dry_runs_download_none(
    site: Site, tmp_path: Path, wanted: str, python: str, torch: str, rocm: str, label: str
) -> None:
    requirement = f"flash_attn=={wanted}" if wanted else "flash_attn"
    target = tmp_path / "target"
    options = ["--no-deps", "--python", sys.executable, "--python-version", python, "--target", str(target)]
    options += ["--index-url", site.simple(rocm, torch), requirement]
    site.asked.clear()
    dry = uv(tmp_path / "cache", "--dry-run", *options)
    assert f"+ flash-attn=={label}" in dry.stderr
    assert [path for path in site.asked if path.endswith(".whl")] == []
    done = uv(tmp_path / "cache", *options)
    assert done.returncode == 0, done.stderr
    tag = f"cp{python.replace('.', '')}"
    name = f"flash_attn-{label}-{tag}-{tag}-{wheelhouse.PLATFORM}.whl"
    assert [path for path in site.asked if path.endswith(".whl")] == [f"/wheels/files/{name}"]
    assert f"label = '{label}'" in (target / "flash_attn" / "__init__.py").read_text()


@pytest.fixture
def consumer(tmp_path: Path) -> Path:
    """The Python of an environment that has torch for ROCm, and nothing else."""
    torch = _pure_wheel(tmp_path / "torch", "torch", "2.5.1+rocm6.2")
    made = call([find_uv_bin(), "venv", "--no-project", "--python", sys.executable, str(tmp_path / "env")], tmp_path)
    assert made.returncode == 0, made.stderr
    python = tmp_path / "env" / "bin" / "python"
    assert uv(tmp_path / "cache", "--python", str(python), "--no-index", str(torch)).returncode == 0
    return python


def installed(python: Path) -> dict[str, str]:
    code = "import importlib.metadata as m; print({d.name.lower(): d.version for d in m.distributions()})"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = eval(done.stdout)
    return found


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_line_that_which_prints_installs(
    site: Site, serve: Site, consumer: Path, tmp_path: Path, installer: str
) -> None:
    """From a clean environment: the site's own which.py, its line, and an import; torch is left as it is."""
    with (site.root / "which.py").open() as script:
        found = subprocess.run(
            [consumer, "-", "--gpu", "gfx942"], stdin=script, capture_output=True, text=True, check=False
        )
    assert found.returncode == 0, found.stderr
    assert (
        found.stdout
        == f'pip install "flash_attn==2.8.3+rocm62torch2.5" --extra-index-url {site.simple("6.2", "2.5")}\n'
    )
    arguments = [*shlex.split(found.stdout)[2:], "--index-url", f"{serve.url}ordinary/"]
    run = (
        functools.partial(pip, tmp_path, python=consumer)
        if installer == "pip"
        else functools.partial(uv, tmp_path / "cache", "--python", str(consumer))
    )
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert installed(consumer) == {"flash_attn": "2.8.3+rocm62torch2.5", "torch": "2.5.1+rocm6.2", "einops": "0.8.2"}
    label = subprocess.run(
        [consumer, "-I", "-c", "import flash_attn; print(flash_attn.label)"], capture_output=True, text=True, check=True
    )
    assert label.stdout == "2.8.3+rocm62torch2.5\n"


@pytest.mark.parametrize("page", ["simple/flash-attn/", "rocm6.2/torch2.5/simple/flash-attn/"])
def test_find_links(site: Site, consumer: Path, tmp_path: Path, page: str) -> None:
    options = ["--no-index", "--no-deps", "--find-links", f"{site.url}{page}"]
    done = pip(tmp_path, *options, "flash_attn==2.8.3+rocm62torch2.5triton", python=consumer)
    assert done.returncode == 0, done.stderr
    assert installed(consumer)["flash_attn"] == "2.8.3+rocm62torch2.5triton"


@pytest.mark.parametrize(("installer", "words"), [("pip", "DO NOT MATCH THE HASHES"), ("uv", "Hash mismatch")])
def test_other_bytes_than_the_index_says_are_refused(serve: Site, tmp_path: Path, installer: str, words: str) -> None:
    cell = wheelhouse.cell(f"2.8.3 {HERE} 2.5.1 6.2")
    wheelhouse.write(tmp_path / "dist", cell)
    out = serve.root / f"broken-{installer}"
    home = replace(HOME, url=f"{serve.url}{out.name}/")
    wheels = catalogue.from_directory(tmp_path / "dist")
    index.build(wheels, out, versions=versions.load(), home=home, files=tmp_path / "dist")
    wheelhouse.write(out / "files", cell, payload="changed = 1\n")
    target = tmp_path / "target"
    url = f"{home.url}rocm6.2/torch2.5/simple/"
    arguments = ["--no-deps", "--target", str(target), "--index-url", url, "flash_attn"]
    done = pip(tmp_path, *arguments) if installer == "pip" else uv(tmp_path, "--python", sys.executable, *arguments)
    assert words in done.stderr
    assert done.returncode != 0
    assert not (target / "flash_attn").exists()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none is not a directory\nGive the one that holds the wheels"):
        catalogue.from_directory(tmp_path / "none")


def test_a_wheel_that_failed_its_tests_is_not_indexed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """which.py says of every wheel of a site that it passed."""
    wheel = wheelhouse.write(tmp_path / "dist", wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), ok=False)
    command = ["index", "--repo", "owner/name", "--dir", str(tmp_path / "dist"), "--out", str(tmp_path / "site")]
    assert cli.main(command) == DataError.exit_code
    assert f"{wheel.name} did not pass its tests\nSee {wheel.name}.verdict.json." in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_a_yanked_wheel_that_is_pinned_installs_with_its_reason(site: Site, tmp_path: Path) -> None:
    options = ["--no-deps", *for_python("3.12", tmp_path / "target")]
    done = pip(tmp_path, *options, "--index-url", site.simple("6.4", "2.9"), "flash_attn==2.8.3+rocm64torch2.9")
    assert done.returncode == 0, done.stderr
    assert "wrong gradients <b>" in done.stderr


def test_a_python_without_a_wheel_gets_none(site: Site, tmp_path: Path) -> None:
    options = ["--dry-run", "--no-deps", *for_python("3.13", tmp_path / "target")]
    done = pip(tmp_path, *options, "--index-url", site.simple("6.1", "2.5"), "flash_attn")
    assert done.returncode != 0
    assert "No matching distribution found for flash_attn" in done.stderr


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


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_flash_attn_3_brings_the_flash_attn_of_its_label(
    site: Site, serve: Site, consumer: Path, tmp_path: Path, installer: str
) -> None:
    arguments = ["--index-url", f"{serve.url}ordinary/", "--extra-index-url", site.simple("6.2", "2.5"), "flash-attn-3"]
    if installer == "pip":
        done = pip(tmp_path, *arguments, python=consumer)
    else:
        done = uv(tmp_path / "cache", "--python", str(consumer), *arguments)
    assert done.returncode == 0, done.stderr
    found = installed(consumer)
    assert found["flash_attn"] == "2.8.3+rocm62torch2.5"
    assert {name.replace("-", "_"): found[name] for name in found}["flash_attn_3"] == "3.0.0+rocm62torch2.5"
    code = "import flash_attn_interface; print(flash_attn_interface.label)"
    label = subprocess.run([consumer, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert label.stdout == "2.8.3+rocm62torch2.5\n"


def test_page_of_one_cell(site: Site) -> None:
    found = anchors(site.root / "rocm6.4" / "torch2.9" / "simple" / "flash-attn" / "index.html")
    assert len(found) == 4
    first = found[0]
    assert first["href"] is not None
    assert re.fullmatch(
        rf"{site.url}files/flash_attn-2\.8\.3%2Brocm64torch2\.9-cp312-cp312-manylinux_2_17_x86_64\.whl#sha256=[0-9a-f]{{64}}",
        first["href"],
    )
    metadata = (
        site.root / "files" / unquote(first["href"].rpartition("/")[2].partition("#")[0] + ".metadata")
    ).read_bytes()
    assert (
        first["data-core-metadata"]
        == f"sha256={hashlib.sha256(metadata).hexdigest()}"
        == first["data-dist-info-metadata"]
    )
    assert first["data-requires-python"] == ">=3.10"
    assert [anchor.get("data-yanked") for anchor in found] == ["wrong gradients <b>"] * 2 + [None] * 2
    assert roots(site.root / "rocm6.4" / "torch2.9") == ["flash-attn/"]
    assert roots(site.root) == roots(site.root / "rocm6.2" / "torch2.5") == ["flash-attn/", "flash-attn-3/"]
    assert len(anchors(site.root / "simple" / "flash-attn" / "index.html")) == 2 * len(CELLS)


def test_the_same_wheels_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    wheels = catalogue.from_directory(dist)
    trees = []
    for order in (wheels, wheels[::-1]):
        out = tmp_path / "site"
        index.build(order, out, versions=versions.load(), home=HOME, files=dist)
        trees.append({str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert trees[0] == trees[1]
    assert {"index.html", "metadata.json", "which.py", "rocm7.1/torch2.10/metadata.json"} <= set(trees[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site"]


def test_what_is_no_part_of_a_site_stays(dist: Path, tmp_path: Path) -> None:
    """A branch of pages, checked out, with a domain of its own."""
    out = tmp_path / "site"
    wheels = catalogue.from_directory(dist)
    index.build(wheels, out, versions=versions.load(), home=HOME)
    (out / ".git").mkdir()
    kept = [out / name for name in (".git/HEAD", ".nojekyll", "CNAME", "rocm.txt")]
    for path in kept:
        path.write_text("mine")
    later = [wheel for wheel in wheels if wheel.rocm != "7.1"]
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
            index.build([], out, versions=versions.load(), home=HOME)
    assert (tmp_path / "metadata.json").read_text() == "x"


def test_from_a_release_as_from_the_directory(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published, yanked, listed as JSON, indexed: what the index links is what the release serves."""
    for path in dist.glob("*torch2.10*"):
        (tmp_path / "some" / path.name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, tmp_path / "some" / path.name)
    with fake_github.serve(fake_github.Hub()) as hub:
        api = github.GitHub(fake_github.REPOSITORY, token=fake_github.TOKEN, api_url=hub.url, say=lambda line: None)  # noqa: ARG005
        said: list[str] = []
        release.publish(api, "v1", tmp_path / "some", index_url=HOME.url, say=said.append)
        for name, reason in (
            ("flash_attn-2.8.3+rocm71torch2.10-cp310-cp310-manylinux_2_17_x86_64.whl", "bad"),
            ("flash_attn_3-3.0.0+rocm71torch2.10triton-py3-none-any.whl", "bad too"),
        ):
            release.yank(api, "v1", name, reason, say=said.append)
        hub.add_release("v2")  # a draft is not to be indexed
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
        found = anchors(pages / "flash-attn" / "index.html")
        assert [anchor.get("data-yanked") for anchor in found] == ["bad", None, None, None]
        beside = anchors(pages / "flash-attn-3" / "index.html")
        assert [anchor.get("data-yanked") for anchor in beside] == [None, "bad too"]
        for anchor in [*found, *beside]:
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


def test_a_release_that_lacks_a_part_is_not_indexed(dist: Path) -> None:
    path = next(dist.glob("*.whl"))
    asset = {
        "name": path.name,
        "state": "uploaded",
        "size": 1,
        "digest": None,
        "browser_download_url": f"https://x/{path.name}",
    }
    content: dict[str, Any] = {"tag_name": "v1", "id": 1, "published_at": "2026-01-01", "assets": [asset]}
    with pytest.raises(
        DataError, match=r"release v1 has flash_attn.* without its \.verdict\.json\nRun `publish --tag v1`"
    ):
        catalogue.from_releases([content], lambda _: b"")
    beside = {**asset, "name": f"{path.name}.verdict.json", "digest": f"sha256:{'0' * 64}"}
    content["assets"] = [asset, beside]
    with pytest.raises(DataError, match="came with other bytes than its digest 0000"):
        catalogue.from_releases([content], lambda _: b"{}")


def test_the_newest_release_counts(tmp_path: Path) -> None:
    """Of a wheel that was released again, as of all others."""
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
    with fake_github.serve(fake_github.Hub()) as hub:
        api = github.GitHub(fake_github.REPOSITORY, token=fake_github.TOKEN, api_url=hub.url, say=print)
        for tag in ("v1", "v2"):
            wheelhouse.write(tmp_path / tag, cell, payload=f"tag = {tag!r}\n")
            release.publish(api, tag, tmp_path / tag, index_url=HOME.url, say=print)
        listed = list(hub.releases.values())
        for order in (listed, listed[::-1]):
            (wheel,) = catalogue.from_releases(order, lambda asset: api.download(asset["url"]))
            assert wheel.release == "v2"
            assert wheel.sha256 == catalogue.file_sha256(tmp_path / "v2" / wheel.name)


def test_candidates_yanked_wheels_and_those_of_others_give_way(tmp_path: Path) -> None:
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")

    def counts() -> tuple[str, str | None, int]:
        final = catalogue.final(hub.releases.values())
        (wheel,) = catalogue.from_releases(final, fetch)
        return wheel.release, wheel.yanked, len(catalogue.interfaces_of(final, fetch))

    def fetch(asset: Mapping[str, Any]) -> bytes:
        return api.download(asset["browser_download_url"])

    with fake_github.serve(fake_github.Hub()) as hub:
        api = github.GitHub(fake_github.REPOSITORY, token=fake_github.TOKEN, api_url=hub.url, say=print)
        for tag in ("v1.0.0", "v1.1.0", "v1.2.0rc1"):
            name = wheelhouse.write(tmp_path / tag, cell, payload=f"tag = {tag!r}\n").name
            release.publish(api, tag, tmp_path / tag, index_url=HOME.url, say=print)
        tools = hub.add_release("tools-1", draft=False)
        for other in ("tools-0.1-py3-none-any.whl", "flash_attn-2.8.3-py3-none-any.whl", "flash_attn_3-3.0.0.whl"):
            hub.add_asset(tools, other, b"x")
        assert counts() == ("v1.1.0", None, 0)
        release.yank(api, "v1.1.0", name, "bad", say=print)
        assert counts() == ("v1.0.0", None, 0)
        release.yank(api, "v1.0.0", name, "bad too", say=print)
        assert counts() == ("v1.1.0", "bad", 0)


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
