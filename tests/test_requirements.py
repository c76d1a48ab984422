"""Requirements without a label, as other projects write them, on the site of the first release, with pip and uv.

The universal wheel is installed, and ROCm's torch stays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pypi
import pytest
import sites
import wheelhouse
from installing import Site, empty, install, installed, served, with_torch
from sites import HOME

from create_matrix import ROCM_MATRIX
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import Cell, Claim
from rocm_wheels.matrix.select import select

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
REQUIREMENTS = ("flash-attn", "flash-attn==2.8.3", "flash-attn>=2.7", "flash-attn~=2.8.0", "-U flash-attn")
INSTALLERS = ("pip", "uv")
TORCHES = ("2.5.1+rocm6.2", "2.9.1+rocm6.4", "2.15.0+rocm10.0")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site of the first release, for the running Python, and PyPI next to it."""
    root, dist = tmp_path_factory.mktemp("www"), tmp_path_factory.mktemp("dist")
    release = select(versions.load(), {"rocm": ROCM_MATRIX})
    claims: list[Claim] = [*release.universals, *release.cells]
    for claim in claims:
        if not isinstance(claim, Cell) or claim.python == HERE:
            wheelhouse.write(dist, claim, targets=("gfx942", "gfx1100"))
    pypi.write(root / "pypi")
    pypi.write(root / "later", (*pypi.FLASH_ATTN, "2.8.4", "2.9.0"))
    with served(root) as behind:
        home = replace(HOME, url=f"{behind.url}wheels/")
        sites.build(dist, root / "wheels", home)
        yield Site(url=behind.url, root=root, asked=behind.asked)


def beside(site: Site, pypi_: str = "pypi") -> list[str]:
    """The site next to PyPI."""
    return ["--index-url", f"{site.url}{pypi_}/", "--extra-index-url", f"{site.url}wheels/simple/"]


def check(python: Path, torch: str, site: Site) -> str:
    """The installed version of flash-attn, which must be a universal wheel's. torch must be unchanged."""
    result = installed(python)
    assert result["torch"] == torch
    assert result["einops"] == "0.8.2"
    assert result["flash_attn"].endswith("+rocm")
    assert [path for path in site.asked if path.endswith(".tar.gz")] == []
    return result["flash_attn"]


# Each requirement with one torch by pip, which takes ten times as long as uv.
CASES = [
    *(
        pytest.param("pip", requirement, TORCHES[place % len(TORCHES)], marks=pytest.mark.long if place else ())
        for place, requirement in enumerate(REQUIREMENTS)
    ),
    *(("uv", requirement, torch) for requirement in REQUIREMENTS for torch in TORCHES),
]


@pytest.mark.parametrize(("installer", "requirement", "torch"), CASES)
def test_the_universal_wheel_comes_and_torch_stays(
    site: Site, tmp_path: Path, installer: str, requirement: str, torch: str
) -> None:
    python = with_torch(tmp_path, torch)
    site.asked.clear()
    done = install(installer, python, tmp_path, *requirement.split(), *beside(site))
    assert done.returncode == 0, done.stderr
    version = check(python, torch, site)
    if "==" in requirement:
        assert version == "2.8.3+rocm"


@pytest.mark.parametrize("installer", INSTALLERS)
def test_without_torch_no_torch_for_cuda_comes(site: Site, tmp_path: Path, installer: str) -> None:
    python = empty(tmp_path)
    assert install(installer, python, tmp_path, "flash-attn", *beside(site)).returncode == 0
    assert installed(python) == {"flash_attn": f"{versions.load().flash_attn[-1]}.post2+rocm", "einops": "0.8.2"}


@pytest.mark.parametrize("requirement", ["flash-attn", "flash-attn>=2.7", "-U flash-attn"])
@pytest.mark.parametrize("installer", [pytest.param("pip", marks=pytest.mark.long), "uv"])
def test_newer_sources_on_pypi_are_kept_away_by_only_binary(
    site: Site, tmp_path: Path, installer: str, requirement: str
) -> None:
    """The line of the README for requirements without a label. PyPI has only sources of flash-attn."""
    python = with_torch(tmp_path, TORCHES[1])
    site.asked.clear()
    arguments = [*requirement.split(), "--only-binary", "flash-attn", *beside(site, "later")]
    done = install(installer, python, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    check(python, TORCHES[1], site)
