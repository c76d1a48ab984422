"""Assembles kernel stores, the launcher and the Python package into a wheel for one combination or for all of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rocm_wheels.environment import OLDEST_EPOCH, source_date_epoch
from rocm_wheels.errors import AssembleFailed
from rocm_wheels.matrix import names
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.matrix.versions import Interface
from rocm_wheels.paths import FLASH_ATTN_SRC

_LOG_LINES = 25


def assemble(
    plan: Plan,
    stores: Mapping[str, Path],
    launcher: Path,
    output: Path,
    *,
    planner: Path | None = None,
    source: Path = FLASH_ATTN_SRC,
) -> Path:
    """Builds the wheel of `plan.cell` into `output` and returns its path.

    `stores` maps each target of the plan to its zip; the ck backend has a planner too. The same stores, launcher,
    planner, sources and SOURCE_DATE_EPOCH give the same bytes. Raises AssembleFailed with the end of the build's log.
    """
    libraries = {"LAUNCHER": launcher} | ({"PLANNER": planner} if planner is not None else {})
    _check_inputs(plan, stores, libraries)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="assemble-", dir=output) as scratch:
        kernels = collect(stores, Path(scratch) / "kernels")
        built = _build(plan, kernels, libraries, Path(scratch) / "dist", source)
        return built.replace(output / built.name)


def assemble_interface(interface: Interface, plan: Plan, output: Path, *, source: Path = FLASH_ATTN_SRC) -> Path:
    """Builds the wheel of an interface that accompanies the wheel of `plan.cell`. It is pure Python, for any platform.

    The same sources and the same hatchling give the same bytes, for every Python and at any time. Raises
    AssembleFailed.
    """
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="assemble-", dir=output) as scratch:
        expected = names.interface_wheel_name(interface, plan.cell)
        environment = {**inherited(), **variables(plan, source), "SOURCE_DATE_EPOCH": str(OLDEST_EPOCH)}
        built = _run_build(plan, source / interface.name, Path(scratch), environment, expected)
        return built.replace(output / built.name)


def collect(stores: Mapping[str, Path], directory: Path) -> Path:
    """Copies stores into a new directory, in the layout of flash_attn_src/hatch_build.py. Returns the directory."""
    directory.mkdir()
    for target, store in stores.items():
        shutil.copyfile(store, directory / f"{target}.zip")
    return directory


def wheel_date() -> int:
    """The date of every file in the wheel, in seconds since 1970: SOURCE_DATE_EPOCH, else 1980-01-01.

    So a build at another time or from another commit gives the same bytes for the same contents.
    """
    return source_date_epoch(os.environ) or OLDEST_EPOCH


def commit(source: Path = FLASH_ATTN_SRC) -> str:
    """The commit of a checkout, with "-dirty" if a tracked file is changed; "" outside of a checkout."""
    # In a container the checkout belongs to another user, which git refuses by default.
    git = ["git", "-c", "safe.directory=*", "-C", str(source)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", ":/"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    if head.returncode != 0 or changed.returncode != 0:
        return ""
    return head.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def repository(source: Path = FLASH_ATTN_SRC) -> str:
    """The address of the repository on GitHub, for the wheel's metadata: the workflow's, else the clone's, else ""."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL') or 'https://github.com'}/{name}"
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", str(source), "config", "--get", "remote.origin.url"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    match = re.fullmatch(
        r"(?:https://|git@|ssh://git@)github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?", done.stdout.strip()
    )
    return f"https://github.com/{match[1]}" if match else ""


def _check_inputs(plan: Plan, stores: Mapping[str, Path], libraries: Mapping[str, Path]) -> None:
    remedy = "run the compile stage for the same plan again"
    if set(stores) != set(plan.targets):
        raise AssembleFailed(
            f"the plan is for {', '.join(plan.targets)}, the stores are for {', '.join(sorted(stores))}",
            remedy=remedy,
        )
    missing = [str(path) for path in (*stores.values(), *libraries.values()) if not path.is_file()]
    if missing:
        raise AssembleFailed(f"compiled parts are missing: {', '.join(missing)}", remedy=remedy)


def _build(plan: Plan, kernels: Path, libraries: Mapping[str, Path], dist: Path, source: Path) -> Path:
    return _run_build(plan, source, dist, _environment(plan, kernels, libraries, source), plan.wheel)


def _run_build(plan: Plan, project: Path, dist: Path, environment: dict[str, str], expected: str) -> Path:
    # No build isolation: the environment is pinned already. The compilers among the build requirements are only for a
    # user's own build and may be absent here.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"]
    done = subprocess.run(
        [*command, "--outdir", str(dist), str(project)],
        env=environment,
        cwd=dist.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    tail = "\n".join(done.stdout.splitlines()[-_LOG_LINES:])
    if done.returncode != 0:
        raise AssembleFailed(f"building the wheel of {plan.label} failed:\n{tail}")
    built = [path.name for path in dist.iterdir()]
    if built != [expected]:
        raise AssembleFailed(
            f"the build made {', '.join(built) or 'nothing'}, the wheel of the combination is {expected}",
            remedy="flash_attn_src/hatch_build.py and rocm_wheels/matrix/names.py disagree: fix one",
        )
    return dist / expected


def variables(plan: Plan, source: Path = FLASH_ATTN_SRC) -> dict[str, str]:
    """The variables that flash_attn_src/hatch_build.py reads about a wheel, besides its compiled parts."""
    cell = plan.cell
    if isinstance(cell, Universal):
        claim = {"FLASH_ATTN_ABI": cell.abi_tag}
    else:
        claim = {"FLASH_ATTN_TORCH": cell.torch_minor, "FLASH_ATTN_ROCM": cell.rocm}
    return {
        **claim,
        "FLASH_ATTN_VERSION": cell.flash_attn,
        "FLASH_ATTN_LOCAL_VERSION": names.local_label(cell),
        "FLASH_ATTN_BACKEND": cell.backend,
        "FLASH_ATTN_PYTHON": cell.python,
        "FLASH_ATTN_PLATFORM": plan.platform,
        "FLASH_ATTN_REPOSITORY": repository(source),
        "FLASH_ATTN_COMMIT": commit(source),
        "SOURCE_DATE_EPOCH": str(wheel_date()),
    }


def inherited() -> dict[str, str]:
    """This process's environment without variables that would describe another wheel to hatch_build.py."""
    return {key: value for key, value in os.environ.items() if not key.startswith("FLASH_ATT")}


def _environment(plan: Plan, kernels: Path, libraries: Mapping[str, Path], source: Path) -> dict[str, str]:
    return {
        **inherited(),
        **variables(plan, source),
        "FLASH_ATTN_KERNELS": str(kernels.resolve()),
        **{f"FLASH_ATTN_{name}": str(path.resolve()) for name, path in libraries.items()},
    }
