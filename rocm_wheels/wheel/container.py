"""`build --docker`: runs the same build in a container with the combination's ROCm, through docker's command line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rocm_wheels.errors import DataError, MissingTool
from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.paths import ROOT

KFD = Path("/dev/kfd")
# Variables that affect a build besides its plan; docker passes those that are set.
PASSED_ON = ("MAX_JOBS", "SOURCE_DATE_EPOCH")


def run(
    plan: Plan, *, dist: Path, cache: Path, cached_kernels: bool, without: Sequence[str] = (), packages: bool = False
) -> int:
    """Builds the image if it is new, then the wheel in it, with the same `dist` and `cache`. Returns docker's exit
    code.

    It is the exit code of the build in the container. Raises MissingTool without docker or its daemon, DataError if no
    image is known for the ROCm.
    """
    check_docker("--docker")
    build = ROOT / "build" / "docker"
    for directory in (build, dist, cache):
        directory.mkdir(parents=True, exist_ok=True)
    device_group = KFD.stat().st_gid if KFD.exists() else None
    steps = commands(
        plan,
        dist=dist,
        cache=cache,
        cached_kernels=cached_kernels,
        without=without,
        packages=packages,
        device_group=device_group,
        root=ROOT,
        env=os.environ,
    )
    for command in steps:
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            return done.returncode
    return 0


def check_docker(option: str) -> None:
    """Raises MissingTool without docker or its daemon."""
    if shutil.which("docker") is None:
        raise MissingTool(
            f"{option}: there is no docker on PATH", remedy=f"Install it, or leave {option} out: no build needs it."
        )
    asked = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise MissingTool(
            f"{option}: docker cannot reach its daemon: {(asked.stderr.strip() or 'no reason given').splitlines()[-1]}",
            remedy="Start it (sudo systemctl start docker) and join its group (sudo usermod -aG docker $USER), "
            f"or leave {option} out: no build needs it.",
        )


def commands(
    plan: Plan,
    *,
    dist: Path,
    cache: Path,
    cached_kernels: bool,
    without: Sequence[str] = (),
    packages: bool = False,
    device_group: int | None,
    root: Path,
    env: Mapping[str, str],
) -> list[list[str]]:
    """The two docker commands. device_group: the group of /dev/kfd, None on a machine without an AMD GPU."""
    cell = plan.cell
    if not isinstance(cell, Cell):
        raise DataError(
            "the universal wheel is for every ROCm, so there is no container for it",
            remedy="Leave --docker out: the kernels are the same, compiled by pinned packages.",
        )
    if plan.image is None:
        raise DataError(
            f"no container image is known for ROCm {cell.rocm}",
            remedy=f'Add one to rocm_wheels/versions.toml: [rocm."{cell.rocm}"] image = "repository:tag".',
        )
    origin = re.sub(r"[^a-z0-9.]+", "-", plan.image.partition("@")[0].partition(":")[2])
    tag = f"rocm-wheels-build:{origin}-{cell.python_tag}"
    image = ["docker", "build", "--tag", tag, "--file", str(root / "docker/build/Dockerfile")]
    image += ["--build-arg", f"BASE={plan.image}", "--build-arg", f"PYTHON={cell.python}", str(root)]

    start = ["docker", "run", "--rm", "--user", f"{os.getuid()}:{os.getgid()}", "--workdir", str(root)]
    # The same paths inside and outside, except for the Python environment of the host, which does not run in the
    # container.
    for directory in dict.fromkeys((root, dist, cache)):
        start += ["--volume", f"{directory}:{directory}"]
    start += ["--volume", f"{root}/build/docker:{root}/build", "--env", f"HOME={root}/build"]
    # Pass the targets of the plan: the image sets PYTORCH_ROCM_ARCH itself, and the container may see another GPU.
    start += ["--env", f"PYTORCH_ROCM_ARCH={';'.join(plan.targets)}", "--env", "GPU_ARCHS="]
    for name in PASSED_ON:
        if name in env:
            start += ["--env", name]
    if device_group is not None:
        start += ["--device=/dev/kfd", "--device=/dev/dri", "--group-add", "video", "--group-add", str(device_group)]
        start += ["--cap-add=SYS_PTRACE", "--security-opt", "seccomp=unconfined", "--ipc=host"]
    build = [f"{root}/build_rocm.sh", cell.flash_attn, cell.python, cell.torch, cell.rocm, "--backend", cell.backend]
    build += ["--dist", str(dist), "--cache", str(cache), *(["--cached-kernels"] if cached_kernels else [])]
    build += ["--packages"] if packages else []
    build += [word for name in without for word in ("--without", name)]
    return [image, [*start, tag, *build]]
