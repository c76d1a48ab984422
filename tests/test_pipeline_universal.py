"""Rehearses the jobs of a universal wheel: from the matrix to tested wheels for both systems, as a pull request does.

With kernels of gfx1030 in a few sizes, and a stand-in for the Docker that cibuildwheel calls.
"""

from __future__ import annotations

import json
from pathlib import Path

import fake_docker
import pytest
from workflows import Runner, base_environment

JOBS = ("create_matrix", "build_kernels", "assemble", "verify", "rehearse")
ARTIFACT = "wheels-2.8.3"


@pytest.mark.long
def test_a_dry_run_ends_with_tested_universal_wheels_for_both_systems(tmp_path: Path, kernel_cache: Path) -> None:
    (tmp_path / "image").mkdir()  # not above the workspace, because uv reads the uv.toml of the directories above
    runner = Runner(
        workspace=tmp_path / "workspace",
        storage=tmp_path / "storage",
        caches=kernel_cache / "kernels",
        narrow=True,
        github={"event_name": "workflow_dispatch", "run_id": "1", "run_attempt": "1", "ref": "refs/heads/main"},
        environment={
            **base_environment(),
            "GITHUB_REPOSITORY": "owner/name",
            **fake_docker.environment(tmp_path / "image"),
        },
    )
    inputs = {"tag": "v1.2.3", "dry-run": True, "only": "2.8.3 universal", "targets": "gfx1030"}
    jobs = runner.workflow("build.yml", inputs, only={*JOBS})
    log = "\n".join(job.log for job in jobs.values())
    assert [name for name, job in jobs.items() if job.result == "success"] == [*JOBS], log
    assert jobs["create_matrix"].outputs["windows-count"] == "1"
    wheels = {
        path.name.split("-")[-1]: path for path in (runner.storage / "artifacts" / ARTIFACT).glob("*/flash_attn-*.whl")
    }
    linux, windows = (next(path for tag, path in wheels.items() if part in tag) for part in ("manylinux", "win_amd64"))
    for wheel in (linux, windows):
        tested = runner.storage / "artifacts/verdicts-universal/verdicts-universal"
        report = json.loads((tested / f"{wheel.name}.verdict.json").read_text(encoding="utf-8"))
        assert (report["ok"], report["targets"]) == (True, ["gfx1030"])
        assert wheel.name in jobs["rehearse"].log
    assert "cibuildwheel" in jobs["assemble"].log
    assert (Path(runner.environment["FAKE_DOCKER"]) / "created").is_file()
