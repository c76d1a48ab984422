"""The release workflow, rehearsed on this machine: its own steps, from the matrix to a tested wheel."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

import pytest
from workflows import Job, Runner, base_environment

CELL = "2.7.4 3.11 2.5.1 6.2 triton"
WHEEL = "flash_attn-2.7.4+rocm62torch2.5triton-cp311"
BUILDING = ("create_matrix", "build_kernels", "build_wheels_rocm")
REHEARSING = "rehearse"


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> tuple[Runner, dict[str, Job]]:
    """A run by hand, dry, of one cell for one target. Its kernels are compiled already, for another cell."""
    directory = tmp_path_factory.mktemp("actions")
    runner = Runner(
        workspace=directory / "workspace",
        storage=directory / "storage",
        caches=kernel_cache / "kernels",
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
    (wheel,) = (runner.storage / "artifacts" / f"wheel-{WHEEL}").glob("flash_attn-*.whl")
    verdict = json.loads(Path(f"{wheel}.verdict.json").read_text(encoding="utf-8"))
    assert wheel.name.startswith(f"{WHEEL}-cp311-manylinux")
    assert verdict["ok"]
    assert verdict["targets"] == ["gfx1030"]
    assert verdict["stages"]["gpu"]["status"].startswith("not run: ")


def test_the_wheel_is_assembled_from_kernels_of_another_job(
    rehearsal: tuple[Runner, dict[str, Job]], kernel_store: Path
) -> None:
    """Those that the wheel of another cell holds, byte for byte."""
    runner, jobs = rehearsal
    (wheel,) = (runner.storage / "artifacts" / f"wheel-{WHEEL}").glob("flash_attn-*.whl")
    with ZipFile(wheel) as archive:
        assert archive.read("flash_attn/_kernels/gfx1030.zip") == kernel_store.read_bytes()
    assert jobs["build_kernels"].log.count("$ build/env/bin/python -m rocm_wheels compile") == 1
    assert "--cached-kernels" in jobs["build_wheels_rocm"].log
    assert "  compiled" not in jobs["build_wheels_rocm"].log
    assert list((runner.storage / "artifacts/kernels-triton-rocm_any-gfx1030-1").glob("*/*.co"))


def test_every_step_of_the_jobs_ran(rehearsal: tuple[Runner, dict[str, Job]]) -> None:
    runner, _ = rehearsal
    assert [step.partition(":")[2] for step in runner.ran if ":rehearse:" not in step] == [
        "create_matrix: Check out",
        "create_matrix: Rows of the jobs",
        "build_kernels: Check out",
        "build_kernels: Take over kernels that are compiled",
        "build_kernels: Set up",
        "build_kernels: Compile",
        "build_kernels: Keep them, done or not",
        "build_kernels: Hand over",
        "build: Check out",
        "build: Take over the kernels",
        "build: Build, repair, verify",
        "build: Hand over",
    ]


def test_what_would_be_published_is_said(rehearsal: tuple[Runner, dict[str, Job]]) -> None:
    _, jobs = rehearsal
    assert f"{WHEEL}-cp311-manylinux" in jobs[REHEARSING].log
    assert "dry run: release v1.2.3 would hold these" in jobs[REHEARSING].log
