"""The packages that the tool's dependency groups install, and what to do where this Python lacks one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from rocm_wheels.errors import MissingTool


def setup(group: str = "build") -> str:
    """The remedy where this Python lacks a package of a dependency group."""
    option, suffix = ("", "") if group == "build" else (f" {group}", f"-{group}")
    return f"Run ./build_rocm.sh --setup{option}, then this with build/env{suffix}/bin/python."


@contextmanager
def packages_of(group: str) -> Iterator[None]:
    """MissingTool for a package that the code inside needs and this Python lacks, which the dependency group has."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "rocm_wheels").partition(".")[0] in ("rocm_wheels", "flash_attn"):  # ours: a mistake in here
            raise
        raise MissingTool(f"{error.name} is not installed in {sys.executable}", remedy=setup(group)) from None


def version_of(package: str, group: str = "build") -> str:
    """The version of a package of a dependency group, which is not imported. MissingTool without it."""
    with packages_of(group):
        return metadata.version(package)
