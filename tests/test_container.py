from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_parts import plan

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names
from rocm_wheels.matrix.cells import resolve
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.matrix.plan import make_plan
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.wheel import container

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"


def test_the_commands_of_a_cell() -> None:
    build, run = container.commands(
        plan("gfx90a", "gfx942"),
        dist=Path("/out"),
        cache=Path("/cache"),
        cached_kernels=True,
        packages=True,
        without=["asm"],
        device_group=None,
        root=Path("/repository"),
        env={"MAX_JOBS": "2", "HOME": "/home/someone", "BUILD_TRITON_BACKEND": "true", "GPU_ARCHS": "gfx942 gfx90a"},
    )
    tag = "rocm-wheels-build:rocm6.2-ubuntu22.04-py3.10-pytorch-release-2.3.0-cp311"
    base = "BASE=rocm/pytorch:rocm6.2_ubuntu22.04_py3.10_pytorch_release_2.3.0"
    assert build == [
        "docker", "build", "--tag", tag, "--file", "/repository/docker/build/Dockerfile",
        "--build-arg", base, "--build-arg", "PYTHON=3.11", "/repository",
    ]  # fmt: skip
    assert run == [
        "docker", "run", "--rm", "--user", f"{os.getuid()}:{os.getgid()}", "--workdir", "/repository",
        "--volume", "/repository:/repository", "--volume", "/out:/out", "--volume", "/cache:/cache",
        "--volume", "/repository/build/docker:/repository/build", "--env", "HOME=/repository/build",
        "--env", "PYTORCH_ROCM_ARCH=gfx90a;gfx942", "--env", "GPU_ARCHS=", "--env", "MAX_JOBS", tag,
        "/repository/build_rocm.sh", "2.8.3", "3.11", "2.5.1", "6.2", "--backend", "triton",
        "--dist", "/out", "--cache", "/cache", "--cached-kernels", "--packages", "--without",
        "asm",
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["ck", "triton"])
def test_the_plan_inside_is_that_outside(data: Versions, backend: str) -> None:
    """Whatever the variables of the image and the GPU in the container are."""
    cell = {"flash_attn": "2.8.3", "python": "3.11", "torch": "2.5.1", "rocm": "6.2", "backend": backend}
    outside = make_plan(data, **cell, env={}, machine=Machine(cores=1, available_mib=1024))
    _, run = container.commands(
        outside, dist=Path("/d"), cache=Path("/c"), cached_kernels=False, device_group=1, root=Path("/r"), env={}
    )
    image = {"PYTORCH_ROCM_ARCH": "gfx900;gfx906;gfx90a;gfx1100", "GPU_ARCHS": "gfx908"}
    given = dict(value.split("=") for option, value in itertools.pairwise(run) if option == "--env")
    inside = make_plan(data, **cell, env=image | given, machine=Machine(cores=1, available_mib=1, gpus=("gfx1100",)))
    assert inside.targets == outside.targets
    assert ("gfx1100" in inside.targets) == (backend == "triton")


def test_a_gpu_goes_into_the_container_with_its_group() -> None:
    _, run = container.commands(
        plan("gfx942"),
        dist=Path("/r/dist"),
        cache=Path("/r/cache"),
        cached_kernels=False,
        device_group=109,
        root=Path("/r"),
        env={},
    )
    words = " ".join(run)
    for flag in (
        "--device=/dev/kfd --device=/dev/dri --group-add video --group-add 109",
        "--cap-add=SYS_PTRACE --security-opt seccomp=unconfined --ipc=host",
    ):
        assert flag in words
    assert "--cached-kernels" not in words


def test_the_digest_of_an_image_stays_out_of_the_tag() -> None:
    pinned = replace(plan("gfx942"), image="rocm/pytorch:rocm6.2_x@sha256:" + "0" * 64)
    given: Any = {"dist": Path("/d"), "cache": Path("/c"), "root": Path("/r")}
    build, _ = container.commands(pinned, cached_kernels=False, device_group=None, env={}, **given)
    assert build[3] == "rocm-wheels-build:rocm6.2-x-cp311"
    assert f"BASE={pinned.image}" in build
    with pytest.raises(DataError, match=r"no container image is known for ROCm 6\.2"):
        container.commands(replace(pinned, image=None), cached_kernels=False, device_group=None, env={}, **given)


def script(*arguments: str, cwd: Path, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "build_rocm.sh", *arguments],
        cwd=cwd, env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(cwd / "xdg"), "ROCM_WHEELS_CACHE": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("status", [0, 7])
def test_build_rocm_hands_its_arguments_to_the_container(tmp_path: Path, status: int) -> None:
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(
        "#!/usr/bin/env bash\n[[ $1 != version ]] || exit 0\n"
        'printf \'%s\\n\' "$*" >>"$0.log"\n[[ $1 == build ]] || exit ' + str(status)
    )
    docker.chmod(0o755)
    cell = ("2.8.3", "3.11", "2.5.1", "6.2")
    done = script("--dist", "out", *cell, "--docker", cwd=tmp_path, path=f"{docker.parent}:{os.environ['PATH']}")
    assert done.returncode == status, done.stderr
    build, run = (tmp_path / "bin/docker.log").read_text().splitlines()
    assert build.startswith("build --tag rocm-wheels-build:")
    inside = f"2.8.3 3.11 2.5.1 6.2 --backend ck --dist {tmp_path}/out --cache {tmp_path}/xdg/rocm_wheels"
    assert run.endswith(f"{ROOT}/build_rocm.sh {inside}")
    assert (tmp_path / "out").is_dir()


def test_without_docker_the_error_names_docker(tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    for name in ("bash", "env", "dirname", "readlink", "cat", "sed"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = script("2.8.3", "3.11", "2.5.1", "6.2", "--docker", cwd=tmp_path, path=str(tmp_path))
    assert done.returncode == 5
    assert done.stderr == (
        "error: --docker: there is no docker on PATH\nInstall it, or leave --docker out: no build needs it.\n"
    )


def test_without_dockers_daemon_the_error_names_the_daemon(tmp_path: Path) -> None:
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text("#!/usr/bin/env bash\necho Client: 27\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    docker.chmod(0o755)
    done = script(
        "2.8.3", "3.11", "2.5.1", "6.2", "--docker", cwd=tmp_path, path=f"{docker.parent}:{os.environ['PATH']}"
    )
    assert done.returncode == 5
    assert done.stderr.startswith(
        "error: --docker: docker cannot reach its daemon: Cannot connect to the Docker daemon\nStart it (sudo "
    )


def test_files_that_the_images_copy_exist() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()[1:]
    assert "build" in ignored, "gigabytes of environments"
    for dockerfile in DOCKER.glob("*/Dockerfile"):
        context = ROOT if "docker/user" not in str(dockerfile) else dockerfile.parent
        for sources in re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE):
            for source in sources.split():
                assert source.startswith("${") or (context / source).exists(), f"{dockerfile}: {source}"
                assert source.partition("/")[0] not in ignored


def test_images_end_as_an_ordinary_user() -> None:
    for dockerfile in DOCKER.glob("*/Dockerfile"):
        users = re.findall(r"^USER (\S+)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
        assert users == ["10001"], dockerfile


def test_the_user_image_is_of_the_cell_that_its_readme_builds(data: Versions) -> None:
    """ROCm and Python of the base, torch and its directory, the label: the doctor reports no problem."""
    text = (DOCKER / "user/Dockerfile").read_text(encoding="utf-8")
    values = dict(re.findall(r'^ARG (\w+)="?([^"\n]+)"?$', text, re.MULTILINE))
    cells = set()
    for page in (text, (DOCKER / "user/README.md").read_text(encoding="utf-8")):
        cells.update(re.findall(r"build_rocm\.sh ([\d. ]+) --dist docker/user", page))
    (words,) = cells
    cell = resolve(
        data, **dict(zip(("flash_attn", "python", "torch", "rocm"), words.split(), strict=True)), backend="triton"
    )
    assert values["BASE"] == str(data.rocm[cell.rocm].image).partition("@")[0]
    assert f"_py{cell.python}_" in values["BASE"]
    assert (values["TORCH"], values["INDEX"]) == (cell.torch, data.torch[cell.torch].rocm[cell.rocm])
    assert values["REQUIREMENT"] == f"flash_attn=={names.version(cell)}"


@pytest.mark.parametrize(
    ("wheels", "index", "installs", "error"),
    [
        (["flash_attn-1-py3-none-any.whl"], "", "--no-deps {}/flash_attn-1-py3-none-any.whl", ""),
        ([], "https://index", "--no-deps --index-url https://index flash_attn==2.8.3+rocm62torch2.6triton", ""),
        ([], "", "", "no wheel in docker/user and no INDEX_URL\nBuild one: ./build_rocm.sh"),
        (
            [
                "flash_attn-1+a-py3-none-any.whl",
                "flash_attn-1+atriton-py3-none-any.whl",
                "flash_attn_3-1-py3-none-any.whl",
            ],
            "https://index",
            "",
            "docker/user holds several wheels: flash_attn-1+a-py3-none-any.whl flash_attn-1+atriton-py3-none-any.whl\n"
            "Leave the one to install there",
        ),
    ],
)
def test_the_user_image_takes_a_wheel_or_an_index(
    wheels: list[str], index: str, installs: str, error: str, tmp_path: Path
) -> None:
    text = (DOCKER / "user/Dockerfile").read_text(encoding="utf-8")
    script = text.partition("\nRUN shopt")[2].partition("\nRUN ")[0]
    for name in wheels:
        (tmp_path / name).touch()
    variables = {
        "INDEX_URL": index,
        "REQUIREMENT": "flash_attn==2.8.3+rocm62torch2.6triton",
        "PATH": os.environ["PATH"],
    }
    fake = 'python3() { printf "%s\\n" "$*"; }; shopt'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", fake + script.replace("/tmp/wheels", str(tmp_path))],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if error:
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {error}")
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0].endswith(installs.format(tmp_path))


def test_the_page_runs_the_user_image_with_the_gpu() -> None:
    page = (DOCKER / "user/README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"(?m)^    (docker run .*\\\n.* fa_triton)$", page)
    for part in ("--device=/dev/kfd", "--device=/dev/dri", "--group-add video", '--group-add "$(stat -c %g /dev/kfd)"'):
        assert part in command


def test_the_runner_takes_one_job_and_only_its_daemon_is_privileged() -> None:
    services = yaml.safe_load((DOCKER / "runner/compose.yml").read_text(encoding="utf-8"))["services"]
    runner, docker = services["runner"], services["docker"]
    assert runner["restart"] == "no"
    assert "--jitconfig" in json.dumps(runner["entrypoint"])
    assert runner["cap_drop"] == ["ALL"]
    assert runner["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in runner
    assert "devices" not in runner
    assert docker["devices"] == ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]
    (work,) = (volume.partition(":")[2] for volume in docker["volumes"] if volume.startswith("work:"))
    started = docker["entrypoint"][-1]
    assert (
        started
        == f"chown 1001:1001 {work}; exec dockerd-entrypoint.sh dockerd --host=unix:///run/job/docker.sock --group=1001"
    )
    assert runner["depends_on"]["docker"]["condition"] == "service_healthy", "the work volume is the runner's by then"
    for service in services.values():
        assert "ports" not in service
        assert not any("docker.sock" in volume for volume in service["volumes"])
