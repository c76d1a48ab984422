"""Rehearses the release workflow on this machine, from the matrix to a tested wheel, and the command of the README.

Only Triton's kernels in a few sizes (fewer_kernels.py), because Composable Kernel takes most of an hour; its own tests
compile a few kernels.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest
from workflows import Job, Runner, base_environment

CELL = "2.7.4 3.11 2.5.1 6.2 triton"
WHEEL = "flash_attn-2.7.4+rocm62torch2.5triton-cp311"
BUILDING = ("create_matrix", "build_kernels", "assemble", "verify")
REHEARSING = "rehearse"


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> tuple[Runner, dict[str, Job]]:
    """A dry run by hand, of one combination for one target. Its kernels were compiled for another combination."""
    directory = tmp_path_factory.mktemp("actions")
    runner = Runner(
        workspace=directory / "workspace",
        storage=directory / "storage",
        caches=kernel_cache / "kernels",
        narrow=True,
        github={"event_name": "workflow_dispatch", "run_id": "1", "run_attempt": "1", "ref": "refs/heads/main"},
        environment={**base_environment(), "GITHUB_REPOSITORY": "owner/name"},
    )
    inputs = {"tag": "v1.2.3", "dry-run": True, "only": CELL, "targets": "gfx1030"}
    jobs = runner.workflow("build.yml", inputs, only={*BUILDING, "smoke", REHEARSING})
    return runner, jobs


def test_a_dry_run_ends_with_a_tested_wheel(rehearsal: tuple[Runner, dict[str, Job]]) -> None:
    runner, jobs = rehearsal
    log = "\n".join(job.log for job in jobs.values())
    ran = [name for name, job in jobs.items() if job.result == "success"]
    assert ran == [*BUILDING, REHEARSING], log
    assert all(job.result == "skipped" for name, job in jobs.items() if name not in ran)
    (wheel,) = (runner.storage / "artifacts/wheels-2.7.4").glob("*/flash_attn-*.whl")
    tested = runner.storage / "artifacts/verdicts-torch2.5.1-py3.11/verdicts-torch2.5.1-py3.11"
    verdict = json.loads((tested / f"{wheel.name}.verdict.json").read_text(encoding="utf-8"))
    assert wheel.name.startswith(f"{WHEEL}-cp311-manylinux")
    assert verdict["ok"]
    assert verdict["targets"] == ["gfx1030"]
    assert verdict["stages"]["gpu"]["status"].startswith("not run: ")


def test_the_wheel_is_assembled_from_kernels_of_another_job(
    rehearsal: tuple[Runner, dict[str, Job]], kernel_store: Path
) -> None:
    """The kernels of the other combination's wheel, byte for byte."""
    runner, jobs = rehearsal
    (wheel,) = (runner.storage / "artifacts/wheels-2.7.4").glob("*/flash_attn-*.whl")
    with ZipFile(wheel) as archive:
        assert archive.read("flash_attn/_kernels/gfx1030.zip") == kernel_store.read_bytes()
    assert jobs["build_kernels"].log.count("$ build/env/bin/python -m rocm_wheels compile") == 1
    assert "  compiled" not in jobs["assemble"].log
    assert list((runner.storage / "artifacts/kernels-triton-rocm_any-gfx1030-1").glob("*/*/*.co"))


def test_every_step_of_the_jobs_ran(rehearsal: tuple[Runner, dict[str, Job]]) -> None:
    runner, _ = rehearsal
    assert [step.partition(":")[2] for step in runner.ran if ":rehearse:" not in step] == [
        "create_matrix: Check out",
        "create_matrix: Rows of the jobs",
        "build_kernels: Check out",
        "build_kernels: Restore the kernel cache",
        "build_kernels: Set up",
        "build_kernels: Compile",
        "build_kernels: Save the kernel cache, complete or not",
        "build_kernels: Name the directory after the artifact",
        "build_kernels: Upload",
        "assemble: Check out",
        "assemble: Download the kernels",
        "assemble: Set up",
        "assemble: Merge the kernels",
        "assemble: Assemble",
        "assemble: Upload",
        "verify: Check out",
        "verify: Download the wheels",
        "verify: Set up",
        "verify: Merge the wheels",
        "verify: Test them",
        "verify: Upload the test reports",
    ]


def test_a_dry_run_prints_the_files_to_publish(rehearsal: tuple[Runner, dict[str, Job]]) -> None:
    _, jobs = rehearsal
    assert f"{WHEEL}-cp311-manylinux" in jobs[REHEARSING].log
    assert "dry run: release v1.2.3 would hold these" in jobs[REHEARSING].log


@pytest.mark.long
def test_the_command_of_the_readme_ends_with_a_tested_wheel(
    rehearsal: tuple[Runner, dict[str, Job]], kernel_cache: Path, kernel_store: Path, tmp_path: Path
) -> None:
    """In the rehearsal's copy of the repository, which already has the build environment. test_documented_commands.py
    types this command too.
    """
    asked = {"PYTORCH_ROCM_ARCH": "gfx1030", "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
    done = subprocess.run(
        [rehearsal[0].workspace / "build_rocm.sh", "2.8.3", "3.11", "2.5.1", "6.2", "--dist", tmp_path],
        env={**base_environment(), **asked, "ROCM_WHEELS_CACHE": str(kernel_cache)}, cwd=tmp_path, text=True,
        check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (wheel,) = tmp_path.glob("flash_attn-*.whl")
    assert wheel.name.startswith("flash_attn-2.8.3+rocm62torch2.5triton-cp311-cp311-manylinux")
    verdict = json.loads(Path(f"{wheel}.verdict.json").read_text(encoding="utf-8"))
    assert verdict["tests"]["failed"] == 0
    assert verdict["tests"]["passed"] >= 40
    assert {stage: entry["status"] for stage, entry in verdict["stages"].items() if stage != "gpu"} == dict.fromkeys(
        ["repaired", "installed with pip", "installed with uv", "code objects", "import", "cpu numerics"],
        "passed",
    )
    size = "MiB" if wheel.stat().st_size >= 2**20 else "KiB"
    for word in (str(wheel), "gfx1030", "pip install", size, "passed"):
        assert word in done.stdout
    with ZipFile(wheel) as archive:
        assert archive.read("flash_attn/_kernels/gfx1030.zip") == kernel_store.read_bytes()
