"""The packages of the tool's dependency groups, and the remedy if this Python lacks one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from rocm_wheels.errors import MissingTool


def setup(group: str = "build") -> str:
    """The remedy if this Python lacks a package of a dependency group."""
    option, suffix = ("", "") if group == "build" else (f" {group}", f"-{group}")
    return f"Run ./build_rocm.sh --setup{option}, then this with build/env{suffix}/bin/python."


@contextmanager
def packages_of(group: str) -> Iterator[None]:
    """Raises MissingTool if the code inside imports a package of the dependency group that this Python lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "rocm_wheels").partition(".")[0] in ("rocm_wheels", "flash_attn"):  # a mistake of ours
            raise
        raise MissingTool(f"{error.name} is not installed in {sys.executable}", remedy=setup(group)) from None


def uv() -> str:
    """The path of the group's uv. Raises MissingTool without it."""
    with packages_of("build"):
        from uv import find_uv_bin
    return str(find_uv_bin())


def version_of(package: str, group: str = "build") -> str:
    """The version of a package of a dependency group; the package is not imported. Raises MissingTool without it."""
    with packages_of(group):
        return metadata.version(package)
