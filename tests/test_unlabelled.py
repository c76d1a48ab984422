"""The universal wheel without its label: made from the wheel, published with it, listed in an index of its own."""

from __future__ import annotations

import errno
import os
import subprocess
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_github
import packaging
import pypi
import pytest
import wheelhouse
from installing import Site, install, installed, served, with_torch
from publishing import publish_as
from sites import HOME

from rocm_wheels import cli
from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names, versions
from rocm_wheels.matrix.cells import universal
from rocm_wheels.publish import catalogue, directory, github, index
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.wheel import contents, rewrite
from rocm_wheels.wheel.contents import Contents

TAGS = f"cp310-abi3-{wheelhouse.PLATFORM}"
TORCH = "2.9.1+rocm6.4"
# The check with which TransformerEngine 2.15 to 2.18 decides whether to use flash-attn 2.
TRANSFORMER_ENGINE = """
from importlib.metadata import version
from packaging.version import Version
print(Version("2.1.1") <= Version(version("flash-attn")) <= Version("2.8.3"))
"""


def write(directory: Path, version: str = "2.8.3", build: int = 0) -> Path:
    return wheelhouse.write(directory, universal(versions.load(), version), build=build)


@pytest.mark.parametrize("build", [0, 2])
def test_the_unlabelled_wheel_differs_only_in_metadata_and_record(tmp_path: Path, build: int) -> None:
    wheel = write(tmp_path, build=build)
    (tmp_path / "out").mkdir()
    made = rewrite.without_label(wheel, tmp_path / "out")
    assert made.name == wheel.name.replace("+rocm", "") == names.unlabelled(wheel.name)
    assert names.labelled(made.name) == wheel.name
    with Contents(made) as opened:
        assert opened.record_errors() == []
        assert contents.headers(made.name, opened.metadata())["Version"] == "2.8.3"
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(made) as after:
        members = [{name.replace("+rocm", ""): each.read(name) for name in each.namelist()} for each in (before, after)]
        dates = [[entry.date_time for entry in each.infolist()] for each in (before, after)]
    changed = {name.rpartition("/")[2] for name in members[0] if members[0][name] != members[1][name]}
    assert changed == {"METADATA", "RECORD"}
    assert members[0].keys() == members[1].keys()
    assert dates[0] == dates[1]


def test_every_zlib_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write(tmp_path)
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(rewrite.without_label(wheel, tmp_path / name).read_bytes())
        monkeypatch.setattr(zlib, "compressobj", lambda *_: pytest.fail("it compresses"))
    assert made[0] == made[1]


def test_names_of_other_wheels() -> None:
    for name in (f"flash_attn-2.8.3-{TAGS}.whl", "flash_attn-2.8.3+rocm62torch2.5-cp311-cp311-linux_x86_64.whl"):
        assert names.unlabelled(name) is None
    for name in ("einops-0.8.2-py3-none-any.whl", "SHA256SUMS", f"flash_attn-2.8.3+rocm-{TAGS}.whl", "gfx942.zip"):
        assert names.labelled(name) == name


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel, out = write(tmp_path), tmp_path / "out"
    assert cli.main(["unlabelled", str(wheel), "--output", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}/flash_attn-2.8.3-{TAGS}.whl\n"
    windows = wheelhouse.write(tmp_path, universal(versions.load(), "2.8.3"), platform="win_amd64")
    assert cli.main(["unlabelled", *map(str, (wheel, windows)), "--output", str(out)]) == 0  # as a glob names both
    assert capsys.readouterr().out.splitlines()[1] == f"{out}/flash_attn-2.8.3-cp310-abi3-win_amd64.whl"
    cell = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    for other in (cell, tmp_path / f"flash_attn-2.7.4+rocm-{TAGS}.whl"):
        assert cli.main(["unlabelled", str(other), "--output", str(out)]) == DataError.exit_code
        assert f"{other} is not a universal wheel\nGive one: " in capsys.readouterr().err


@pytest.mark.parametrize("rewritten", ["numbered", "without_label"])
def test_a_full_disk_leaves_no_part_of_a_wheel(rewritten: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, out = write(tmp_path / "dist"), tmp_path / "out"
    out.mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    before = sorted(path.name for path in wheel.parent.iterdir())
    with pytest.raises(OSError, match="No space left"):
        rewrite.numbered(wheel, 2) if rewritten == "numbered" else rewrite.without_label(wheel, out)
    assert [*out.iterdir()] == []
    assert sorted(path.name for path in wheel.parent.iterdir()) == before


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root, dist = tmp_path_factory.mktemp("www"), tmp_path_factory.mktemp("dist")
    for version in ("2.7.4.post1", "2.8.3", "2.8.3.post2"):
        write(dist, version)
    pypi.write(root / "pypi", (*pypi.FLASH_ATTN, "2.8.4"))
    with served(root) as behind:
        home = replace(HOME, url=f"{behind.url}wheels/")
        local = directory.read(dist)
        site = Catalogue(wheels=local.wheels)
        index.build(site, root / "wheels", versions=versions.load(), home=home, files=local.files)
        yield Site(url=behind.url, root=root, asked=behind.asked)


@pytest.mark.parametrize(("directory", "taken"), [("unlabelled/", True), ("", False)])
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_transformer_engine_accepts_the_unlabelled_wheel(
    site: Site, tmp_path: Path, installer: str, directory: str, taken: bool
) -> None:
    python = with_torch(tmp_path, TORCH)
    site.asked.clear()
    simple = ["--extra-index-url", f"{site.url}wheels/{directory}simple/", "--index-url", f"{site.url}pypi/"]
    done = install(installer, python, tmp_path, "flash-attn==2.8.3", *simple)
    assert done.returncode == 0, done.stderr
    assert installed(python) == {"torch": TORCH, "einops": "0.8.2", "flash_attn": "2.8.3" if taken else "2.8.3+rocm"}
    assert [path for path in site.asked if path.endswith(".tar.gz")] == []
    paths = "import sys; sys.path += sys.argv[1:]\n"
    site_packages = str(Path(str(packaging.__file__)).parent.parent)
    asked = subprocess.run(
        [python, "-I", "-c", paths + TRANSFORMER_ENGINE, site_packages], capture_output=True, text=True, check=True
    )
    assert asked.stdout == f"{taken}\n"


def test_the_unlabelled_wheel_is_published_and_withdrawn_with_its_wheel(tmp_path: Path) -> None:
    wheel = write(tmp_path / "dist")
    plain = names.unlabelled(wheel.name)
    with fake_github.serve(fake_github.Hub()) as hub:
        api = github.GitHub(fake_github.REPOSITORY, token=fake_github.TOKEN, api_url=hub.url, say=lambda _: None)
        publish_as(api, "v1.0.0", tmp_path / "dist", lambda _: None)
        releases = list(hub.releases.values())
        (there,) = [asset["name"] for asset in releases[0]["assets"] if asset["name"] == plain]
        (tmp_path / "again").mkdir()
        again = rewrite.without_label(wheel, tmp_path / "again")

        def fetch(asset: Mapping[str, Any]) -> bytes:
            return api.download(asset["browser_download_url"])

        (link,) = catalogue.from_releases(releases, fetch, {}).unlabelled
        assert (link.name, link.sha256) == (there, contents.file_sha256(again))
        (yanked,) = catalogue.from_releases(releases, fetch, {wheel.name: "slow"}).unlabelled
        assert (yanked.yanked, yanked.listed) == ("slow", True)
        (gone,) = catalogue.from_releases(releases, fetch, {}, {wheel.name: "wrong"}).unlabelled
        assert (gone.yanked, gone.listed) == ("wrong", False)
        # The next release has the same contents: neither is published again.
        publish_as(api, "v1.1.0", tmp_path / "dist", lambda _: None)
        assert [release["tag_name"] for release in hub.releases.values()] == ["v1.0.0"]
