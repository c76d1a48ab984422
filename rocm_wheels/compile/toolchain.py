"""Checks the environment of a build before anything is compiled."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from rocm_wheels.compile.ck import toolchain as ck_toolchain
from rocm_wheels.errors import MissingTool
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.packages import setup, version_of


def check(plan: Plan) -> None:
    """Raises MissingTool for the first requirement of the plan that this environment does not meet.

    The compiler must be the pinned version: another version would fill the store with other kernels under the same
    name.
    """
    name, expected = plan.compiler.split()
    version = version_of(name)
    if version != expected:
        raise MissingTool(f"the plan compiles with {name} {expected}, this environment has {version}", remedy=setup())
    for package in ("ziglang", "hatchling", "build", "uv", "msgpack", "pyelftools"):
        version_of(package)
    if plan.cell.backend == "ck":
        for package in ("triton", "clang-tidy", "setuptools"):
            version_of(package)
        ck_toolchain.find(plan.toolchain)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise MissingTool(
            f"the C headers of this Python are missing: no {header}",
            remedy="install python3-dev, or build with a Python that has them (uv's, pyenv's, deadsnakes' -dev)",
        )
