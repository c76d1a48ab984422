"""`build --cibuildwheel`: the universal wheel is assembled, repaired and tested in a manylinux image, by cibuildwheel.

What happens in the image is in flash_attn_src/pyproject.toml: the same build hook makes the wheel of the same compiled
parts as without it, the same repair makes it a manylinux wheel, and each Python there runs its tests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from rocm_wheels.errors import AssembleFailed, DataError
from rocm_wheels.matrix import names
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.packages import version_of
from rocm_wheels.paths import ROOT
from rocm_wheels.wheel import container
from rocm_wheels.wheel.assemble import collect, inherited, variables

OPTION = "--cibuildwheel"
_PROJECT = PurePosixPath("/project")  # name of cibuildwheel's working directory in the image
_COPIED = ("flash_attn_src", "locks", "rocm_wheels", "wheel_tests")


def check_plan(plan: Plan) -> None:
    """Raises DataError unless the plan is of the universal wheel, MissingTool without Docker.

    Needs only the standard library.
    """
    if not isinstance(plan.cell, Universal):
        raise DataError(
            f"{OPTION} builds the universal wheel, {plan.wheel} is for one Python",
            remedy=f"Leave {OPTION} out, or name the version of flash-attn alone.",
        )
    container.check_docker(OPTION)


def check(plan: Plan) -> None:
    """As `check_plan`, and raises MissingTool without cibuildwheel."""
    check_plan(plan)
    version_of("cibuildwheel", "cibuildwheel")


def assemble(
    plan: Plan, stores: Mapping[str, Path], launcher: Path, output: Path, *, planner: Path | None = None
) -> Path:
    """`assemble.assemble` in the image. The wheel has passed its tests under every Python. Raises AssembleFailed."""
    project, parts, built = output / "project", output / "project/parts", output / "built"
    for name in _COPIED:
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    parts.mkdir()
    files = {"KERNELS": collect(stores, parts / "kernels"), "LAUNCHER": Path(shutil.copy(launcher, parts))}
    if planner is not None:
        files["PLANNER"] = Path(shutil.copy(planner, parts))
    inside = {f"FLASH_ATTN_{name}": str(_PROJECT / path.relative_to(project)) for name, path in files.items()}
    passed = {**variables(plan), **inside}
    command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--output-dir", str(built.absolute())]
    done = subprocess.run(
        [*command, "flash_attn_src"],
        cwd=project,
        env={**inherited(), **passed, "CIBW_ENVIRONMENT_PASS_LINUX": " ".join(passed)},
        check=False,
    )
    if done.returncode != 0:
        raise AssembleFailed(f"cibuildwheel ended with {done.returncode}: its log is above")
    wheels = list(built.glob("*.whl"))
    if [names.stem(wheel.name) for wheel in wheels] != [names.stem(plan.wheel)]:
        made = ", ".join(wheel.name for wheel in wheels) or "nothing"
        raise AssembleFailed(f"cibuildwheel made {made}, the plan is for {plan.wheel}")
    return wheels[0]
