"""The universal wheel from a site, when pip and uv also see other releases of flash-attn and torch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pypi
import pytest
import sites
import wheelhouse
from installing import Site, install, installed, served, with_torch
from sites import HOME

from rocm_wheels.matrix import cells, targets, versions

LABEL = "2.8.3+rocm"
TORCH = "2.13.0+rocm7.2"
# GPUs of every family. Some have a kernel store of their own in the universal wheel, others use their family's store.
GPUS = ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1036", "gfx1100", "gfx1103", "gfx1151", "gfx1201")
INSTALLERS = ("pip", "uv")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The universal wheel, wheels for another torch, and an index with newer packages, as PyPI has or may have."""
    root = tmp_path_factory.mktemp("www")
    data = versions.load()
    dist = tmp_path_factory.mktemp("dist")
    wheelhouse.write(dist, cells.universal(data, "2.8.3"), targets=targets.universal(data, None))
    wheelhouse.write(dist, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    with served(root) as behind:
        home = replace(HOME, url=f"{behind.url}wheels/")
        sites.build(dist, root / "wheels", home)
        pypi.write(root / "ordinary", ("2.8.3", "2.8.3.post2", "2.9.0"))
        yield Site(url=home.url, root=root / "wheels", asked=behind.asked)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """The Python of an environment with ROCm's torch, in a version that no index has and no wheel of the site
    requires.
    """
    return with_torch(tmp_path, TORCH)


def line_for(site: Site, python: Path, gpu: str) -> str:
    """The line that the site's which.py prints for this GPU."""
    with (site.root / "which.py").open() as script:
        command = [str(python), "-", "--gpu", gpu]
        return subprocess.run(command, stdin=script, capture_output=True, text=True, check=True).stdout


def arguments(line: str) -> list[str]:
    """The arguments of `pip install`."""
    return shlex.split(line)[2:]


def test_which_prints_one_command_for_gpus_of_every_family(site: Site, user: Path) -> None:
    line = f'pip install "flash_attn=={LABEL}" --extra-index-url {site.url}simple/\n'
    assert {gpu: line_for(site, user, gpu) for gpu in GPUS} == dict.fromkeys(GPUS, line)


@pytest.mark.parametrize("installer", INSTALLERS)
def test_the_pinned_label_wins_over_newer_sources(site: Site, user: Path, tmp_path: Path, installer: str) -> None:
    ordinary = ["--index-url", site.url.replace("/wheels/", "/ordinary/")]
    line = arguments(line_for(site, user, "gfx942"))
    site.asked.clear()
    done = install(installer, user, tmp_path, *line, *ordinary)
    assert done.returncode == 0, done.stderr
    expected = {"flash_attn": LABEL, "torch": TORCH, "einops": "0.8.2"}
    assert installed(user) == expected
    assert [path for path in site.asked if path.endswith(".tar.gz")] == []
    # The requirement of a package that needs flash-attn and is installed later, without the site.
    for requirement in ("flash-attn==2.8.3", "flash_attn>=2.8.3"):
        assert install(installer, user, tmp_path, requirement, *ordinary).returncode == 0
    assert installed(user) == expected


def test_without_the_label_pip_takes_cuda_sources(site: Site, user: Path, tmp_path: Path) -> None:
    """Without the label, pip takes the newest of all indexes: sources for CUDA. uv takes the wheel of the site."""
    extra = ["--extra-index-url", f"{site.url}simple/", "--index-url", site.url.replace("/wheels/", "/ordinary/")]
    site.asked.clear()
    assert install("pip", user, tmp_path, "flash_attn", *extra).returncode != 0
    assert [path for path in site.asked if path.endswith(".tar.gz")] == ["/ordinary/flash-attn/flash_attn-2.9.0.tar.gz"]
    assert installed(user) == {"torch": TORCH}
    assert install("uv", user, tmp_path, "flash_attn", *extra).returncode == 0
    assert installed(user)["flash_attn"] == LABEL


@pytest.mark.parametrize("installer", INSTALLERS)
def test_with_the_registry_behind_the_site(site: Site, user: Path, tmp_path: Path, installer: str) -> None:
    """As in the README, with the settings of whoever runs this: einops comes from that registry, and nothing else
    does.
    """
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    index = ["--index-url", asked.stdout.strip()] if asked.returncode == 0 else []
    settings = {**os.environ, "NO_PROXY": f"127.0.0.1,{os.environ.get('NO_PROXY', '')}"}
    done = install(installer, user, tmp_path, *arguments(line_for(site, user, "gfx1100")), *index, settings=settings)
    assert done.returncode == 0, done.stderr
    result = installed(user)
    assert result.pop("einops")
    assert result == {"flash_attn": LABEL, "torch": TORCH}
