"""The wheels that pip and uv install from a site."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
import sites
import wheelhouse
from installing import Site, install, installed, pip, pure_wheel, served, uv, with_torch
from sites import HOME

from rocm_wheels.matrix import versions
from rocm_wheels.publish import directory, index
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.wheel import contents

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
# (flash-attn wanted or "", Python, torch, ROCm, expected label): the newest, ck before triton, never another
# combination.
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
    ("", "3.12", "2.9", "6.4", "2.7.4+rocm64torch2.9"),  # the newest wheel is yanked
]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """An HTTP server for an empty directory."""
    with served(tmp_path_factory.mktemp("www")) as empty:
        yield empty


@pytest.fixture(scope="module")
def site(serve: Site, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """All combinations, and an ordinary index with the packages that flash_attn needs."""
    home = replace(HOME, url=f"{serve.url}wheels/")
    out = sites.build(sites.wheels(tmp_path_factory.mktemp("dist")), serve.root / "wheels", home)
    for name, version in (("einops", "0.8.2"), ("torch", "2.5.1"), ("torch", "2.5.2")):
        pure_wheel(serve.root / "ordinary" / name, name, version)
    return Site(url=home.url, root=out, asked=serve.asked)


def for_python(python: str, target: Path) -> list[str]:
    """pip's options for a Python that is not installed here."""
    options = ["--python-version", python, "--platform", wheelhouse.PLATFORM, "--implementation", "cp"]
    return [*options, "--only-binary", ":all:", "--target", str(target), "--ignore-installed"]


# The job of the long tests asks pip, which takes ten times as long as uv, in every situation.
@pytest.mark.parametrize(
    ("expected", "python", "torch", "rocm", "label"),
    [pytest.param(*each, marks=pytest.mark.long if place % 4 else ()) for place, each in enumerate(SITUATIONS, 1)],
)
def test_pip_takes_the_right_wheel_and_dry_runs_download_none(
    site: Site, tmp_path: Path, expected: str, python: str, torch: str, rocm: str, label: str
) -> None:
    site.asked.clear()
    requirement = f"flash_attn=={expected}" if expected else "flash_attn"
    options = ["--dry-run", "--no-deps", "--quiet", "--report", "-", *for_python(python, tmp_path / "target")]
    done = pip(tmp_path, *options, "--index-url", site.simple(rocm, torch), requirement)
    assert done.returncode == 0, done.stderr
    (item,) = json.loads(done.stdout)["install"]
    tag = f"cp{python.replace('.', '')}"
    name = f"flash_attn-{label}-{tag}-{tag}-{wheelhouse.PLATFORM}.whl"
    assert unquote(item["download_info"]["url"]).rpartition("/")[2] == name
    assert item["download_info"]["archive_info"]["hashes"]["sha256"] == contents.file_sha256(site.root / "files" / name)
    assert item["is_yanked"] is False
    assert [path for path in site.asked if ".whl" in path] == [f"/wheels/files/{name}.metadata"]


@pytest.mark.parametrize(("expected", "python", "torch", "rocm", "label"), SITUATIONS)
def test_uv_takes_the_right_wheel_and_dry_runs_download_none(
    site: Site, tmp_path: Path, expected: str, python: str, torch: str, rocm: str, label: str
) -> None:
    requirement = f"flash_attn=={expected}" if expected else "flash_attn"
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
    """The Python of an environment with only ROCm's torch."""
    return with_torch(tmp_path, "2.5.1+rocm6.2")


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_line_that_which_prints_installs(
    site: Site, serve: Site, consumer: Path, tmp_path: Path, installer: str
) -> None:
    """From a clean environment: the site's own which.py, its line, and an import; torch is not changed."""
    with (site.root / "which.py").open() as script:
        result = subprocess.run(
            [consumer, "-", "--gpu", "gfx942"], stdin=script, capture_output=True, text=True, check=False
        )
    assert result.returncode == 0, result.stderr
    assert (
        result.stdout
        == f'pip install "flash_attn==2.8.3+rocm62torch2.5" --extra-index-url {site.simple("6.2", "2.5")}\n'
    )
    arguments = [*shlex.split(result.stdout)[2:], "--index-url", f"{serve.url}ordinary/"]
    done = install(installer, consumer, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert installed(consumer) == {"flash_attn": "2.8.3+rocm62torch2.5", "torch": "2.5.1+rocm6.2", "einops": "0.8.2"}
    label = subprocess.run(
        [consumer, "-I", "-c", "import flash_attn; print(flash_attn.label)"], capture_output=True, text=True, check=True
    )
    assert label.stdout == "2.8.3+rocm62torch2.5\n"


def test_find_links(site: Site, consumer: Path, tmp_path: Path) -> None:
    options = ["--no-index", "--no-deps", "--find-links", f"{site.simple('6.2', '2.5')}flash-attn/"]
    done = pip(tmp_path, *options, "flash_attn==2.8.3+rocm62torch2.5triton", python=consumer)
    assert done.returncode == 0, done.stderr
    assert installed(consumer)["flash_attn"] == "2.8.3+rocm62torch2.5triton"


@pytest.mark.parametrize(("installer", "words"), [("pip", "DO NOT MATCH THE HASHES"), ("uv", "Hash mismatch")])
def test_a_file_with_another_digest_than_in_the_index_is_refused(
    serve: Site, tmp_path: Path, installer: str, words: str
) -> None:
    cell = wheelhouse.cell(f"2.8.3 {HERE} 2.5.1 6.2")
    wheelhouse.write(tmp_path / "dist", cell)
    out = serve.root / f"broken-{installer}"
    home = replace(HOME, url=f"{serve.url}{out.name}/")
    local = directory.read(tmp_path / "dist")
    index.build(Catalogue(wheels=local.wheels), out, versions=versions.load(), home=home, files=local.files)
    wheelhouse.write(out / "files", cell, payload="changed = 1\n")
    target = tmp_path / "target"
    url = f"{home.url}rocm6.2/torch2.5/simple/"
    arguments = ["--no-deps", "--target", str(target), "--index-url", url, "flash_attn"]
    done = pip(tmp_path, *arguments) if installer == "pip" else uv(tmp_path, "--python", sys.executable, *arguments)
    assert words in done.stderr
    assert done.returncode != 0
    assert not (target / "flash_attn").exists()


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


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_flash_attn_3_brings_the_flash_attn_of_its_label(
    site: Site, serve: Site, consumer: Path, tmp_path: Path, installer: str
) -> None:
    arguments = ["--index-url", f"{serve.url}ordinary/", "--extra-index-url", site.simple("6.2", "2.5"), "flash-attn-3"]
    done = install(installer, consumer, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    result = installed(consumer)
    assert result["flash_attn"] == "2.8.3+rocm62torch2.5"
    assert {name.replace("-", "_"): result[name] for name in result}["flash_attn_3"] == "3.0.0+rocm62torch2.5"
    code = "import flash_attn_interface; print(flash_attn_interface.label)"
    label = subprocess.run([consumer, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert label.stdout == "2.8.3+rocm62torch2.5\n"


@pytest.mark.parametrize(
    "version",
    ["23.0", *(pytest.param(each, marks=pytest.mark.long) for each in ("21.3", "22.3", "23.1", "23.2", "24.0"))],
)
def test_old_pips_take_names_with_hyphens(site: Site, tmp_path: Path, version: str) -> None:
    """pip 22.3 to 23.1 compare METADATA's name letter by letter, where a page names the metadata as before PEP 714.
    Debian 12 has 23.0.1. tests were run with each minor version from 21.0 to 26.3 (2026-11-28).
    """
    tools = tmp_path / "pip"
    assert uv(tmp_path / "cache", "--no-deps", "--target", str(tools), f"pip=={version}.*").returncode == 0
    options = ["--no-deps", "--no-cache-dir", "--dest", str(tmp_path), "--index-url", site.simple("6.2", "2.5")]
    expected = ["flash-attn==2.8.3+rocm62torch2.5", "flash-attn-3==3.0.0+rocm62torch2.5"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "download",
        *options,
        *for_python("3.12", tmp_path)[:-3],
        *expected,
    ]
    env = {"PYTHONPATH": str(tools), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name.split("-")[0] for path in tmp_path.glob("*.whl")} == {"flash_attn", "flash_attn_3"}
