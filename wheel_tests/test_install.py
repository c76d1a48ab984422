"""The installed distribution: its metadata, and that this environment satisfies it."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import flash_attn
from packaging.requirements import Requirement
from packaging.version import Version


def test_version_carries_the_label(dist: metadata.Distribution, build_info: dict[str, Any]) -> None:
    version = Version(dist.version)
    assert version.public == build_info["version"]
    assert (version.local or "") == build_info["label"]


def test_dunder_version_is_plain() -> None:
    assert Version(flash_attn.__version__).local is None
    assert flash_attn.__version__ == Version(metadata.version("flash_attn")).public


def test_found_under_both_spellings() -> None:
    assert metadata.version("flash-attn") == metadata.version("flash_attn")


def test_requirements(dist: metadata.Distribution, build_info: dict[str, Any]) -> None:
    requirements = {each.name: each for each in map(Requirement, dist.requires or ())}
    # A Requires-Dist on triton would replace the one that a ROCm torch brings under the same import name. One on any
    # torch would replace a torch for ROCm by PyPI's.
    assert set(requirements) == ({"torch", "einops"} if build_info["torch"] else {"einops"})
    if build_info["torch"]:
        assert str(requirements["torch"].specifier) == f"=={build_info['torch']}.*"
    for name, requirement in requirements.items():
        assert requirement.specifier.contains(metadata.version(name), prereleases=True)


def test_built_for_this_python(build_info: dict[str, Any]) -> None:
    """The universal wheel names no Python: its tag, which test_contents.py compares, holds for this one."""
    assert build_info["python"] in ("", f"{sys.version_info.major}.{sys.version_info.minor}")


def test_licenses_are_there(dist: metadata.Distribution) -> None:
    """The licenses of the project, of AMD's assembly kernels and of Composable Kernel."""
    names = sorted(dist.metadata.get_all("License-File") or [])
    assert names == ["LICENSE", "LICENSE.aiter", "LICENSE.composable_kernel"]
    own, *others = (dist.read_text(f"licenses/{name}") or "" for name in names)
    assert "BSD 3-Clause" in own
    assert all("MIT License" in text for text in others)
    assert dist.metadata["License-Expression"] == "BSD-3-Clause AND MIT"
