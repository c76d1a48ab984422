"""The real lines of build.yml from every state of a release: docs/releasing.md has the table of what each leaves.

Only builds, compilers and signatures are stand-ins (fake_build.py). Plan, draft, matrix, artifacts, publishing and the
conditions of jobs and steps are the workflow's.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_github
import pytest
from fake_github import Hub
from publishing import TAG, environment
from wheelhouse import COMMIT
from workflows import ROOT, Job, Runner, base_environment

from rocm_wheels.matrix.release_plan import FILE

ONLY = "2.7.4 3.1[12] 2.5.1 6.2 triton"
STEMS = [f"flash_attn-2.7.4+rocm62torch2.5triton-cp31{minor}" for minor in (1, 2)]
CHANGED = {"BUILD_CHANGE": "changed = 1\n"}


class Actions(Runner):
    """GitHub's runners for one repository. A step runs the real line with stand-ins for what takes hours."""

    def _checkout(self, inputs: Mapping[str, Any]) -> None:  # noqa: ARG002
        shutil.rmtree(self.workspace, ignore_errors=True)
        self.workspace.mkdir()
        (self.workspace / "create_matrix.py").symlink_to(ROOT / "create_matrix.py")
        stand_in = f"{sys.executable} {ROOT}/tests/support/fake_build.py"
        self._script("build_rocm.sh", f'exec {stand_in} build_rocm.sh "$@"')
        self._script("candle-flash-rocm/check.sh", f"exec {stand_in} check.sh")
        for name in ("env", "env-release"):
            self._script(f"build/{name}/bin/python", f'exec {stand_in} python "$@"')

    def _script(self, name: str, text: str) -> None:
        path = self.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def _action(self, action: str, inputs: Mapping[str, Any]) -> dict[str, str]:
        if action == "actions/attest-build-provenance":
            assert [path for path in (self.workspace / "signed").rglob("*") if path.suffix in (".whl", ".crate")]
            return {}
        return super()._action(action, inputs)


@pytest.fixture
def actions(hub: Hub, tmp_path: Path) -> Actions:
    hub.tags[TAG] = COMMIT
    return Actions(
        workspace=tmp_path / "workspace",
        storage=tmp_path / "storage",
        caches=tmp_path / "caches",
        github={},
        environment={
            **base_environment(),
            **environment(hub),
            "PATH": f"{ROOT / 'tests/support/bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}",
        },
    )


def run(
    actions: Actions, tag: str = TAG, *, event: str = "workflow_dispatch", earlier: dict[str, Job] | None = None,
    environment: Mapping[str, str] | None = None, dry_run: bool = False, **inputs: str,
) -> dict[str, Job]:  # fmt: skip
    """A run of build.yml at a tag."""
    if earlier is None:
        shutil.rmtree(actions.storage / "artifacts", ignore_errors=True)
    ref = {"pull_request": "refs/pull/1/merge"}.get(event, f"refs/tags/{tag}")
    actions.github |= {
        "event_name": event, "ref": ref, "ref_name": ref.split("/", 2)[2], "sha": COMMIT, "run_id": "1",
        "run_attempt": "1", "token": fake_github.TOKEN, "event": {"repository": {"default_branch": "main"}},
    }  # fmt: skip
    before = dict(actions.environment)
    actions.environment |= {"GITHUB_REF": ref, **(environment or {})}
    given: dict[str, Any] = {"tag": tag, "dry-run": dry_run, "only": ONLY, "targets": "gfx942", **inputs}
    given = given if event == "workflow_dispatch" else {}
    jobs = actions.workflow("build.yml", given, earlier=earlier)
    actions.environment = before
    return jobs


def failed(jobs: Mapping[str, Job]) -> list[str]:
    return [name for name, job in jobs.items() if job.result == "failure"]


def left(hub: Hub, tag: str = TAG) -> tuple[str, list[str]]:
    """The state of a release and the stems of its wheels, with build numbers."""
    (release,) = (each for each in hub.releases.values() if each["tag_name"] == tag)
    wheels = [asset["name"].partition("-manylinux")[0] for asset in release["assets"] if asset["name"].endswith(".whl")]
    assert FILE in {asset["name"] for asset in release["assets"]}
    return "draft" if release["draft"] else "public", sorted(name.rsplit("-", 1)[0] for name in wheels)


def test_a_fork_pushes_a_tag_then_runs_all_jobs_again_then_pushes_another_tag(actions: Actions, hub: Hub) -> None:
    """Two variables say what a tag builds. Nothing is sent twice, and a second tag without a change has no release."""
    actions.variables = {"RELEASE_ONLY": ONLY, "RELEASE_TARGETS": "gfx942"}
    jobs = run(actions, event="push")
    assert failed(jobs) == [], "\n".join(job.log for job in jobs.values())
    assert left(hub) == ("public", STEMS)
    stored = dict(hub.stored)
    jobs = run(actions)
    assert (failed(jobs), jobs["build_wheels_rocm"].result) == ([], "skipped"), jobs["publish"].log
    assert (left(hub), dict(hub.stored)) == (("public", STEMS), stored)
    hub.tags["v1.2.4"] = COMMIT
    jobs = run(actions, "v1.2.4", event="push")
    assert (failed(jobs), jobs["update_docs"].result) == ([], "skipped")
    assert {each["tag_name"] for each in hub.releases.values()} == {TAG}


@pytest.mark.long
def test_a_run_that_died_then_one_combination_then_the_failed_jobs_again(actions: Actions, hub: Hub) -> None:
    died = run(actions, environment={"BUILD_FAILS": "2.7.4 3.12 2.5.1 6.2"})
    assert failed(died) == ["build_wheels_rocm"]
    assert left(hub) == ("draft", [])
    one = "2.7.4 3.11 2.5.1 6.2 triton"
    other_targets = run(actions, only=one, targets="gfx90a")
    assert failed(other_targets) == ["create_release"]
    assert "holds flash_attn-2.7.4+rocm62torch2.5triton-cp311 for gfx942" in other_targets["create_release"].log
    jobs = run(actions, only=one)
    assert failed(jobs) == ["publish"]
    assert "lacks 1 of 2 wheels" in jobs["publish"].log
    assert left(hub) == ("draft", STEMS[:1])
    again = run(actions, earlier=died)
    assert failed(again) == [], again["publish"].log
    assert again["create_matrix"] is died["create_matrix"]
    assert left(hub) == ("public", STEMS)


@pytest.mark.long
def test_more_targets_at_a_public_tag_and_fewer_at_a_later_one(actions: Actions, hub: Hub) -> None:
    one = "2.7.4 3.11 2.5.1 6.2 triton"
    run(actions, only=one)
    jobs = run(actions, only=one, targets="gfx90a;gfx942")
    assert failed(jobs) == [], "\n".join(job.log for job in jobs.values())
    assert left(hub) == ("public", [STEMS[0].replace("-cp", "-1-cp"), STEMS[0]])
    hub.tags["v1.3.0"] = COMMIT
    jobs = run(actions, "v1.3.0", only=one, environment=CHANGED)
    assert failed(jobs) == ["create_release"]
    assert "which also serves gfx90a" in jobs["create_release"].log


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"only": "2.7.4 3.99 *"}, "no combination matches '2.7.4 3.99 *'"),
        ({"targets": "sm_90", "only": "2.8.3 universal"}, "wheels for NVIDIA GPUs are never published: sm_90"),
        ({"tag": "v\uff11.2.3"}, "is not a release tag"),
    ],
)
def test_wrong_inputs_leave_no_draft(actions: Actions, hub: Hub, inputs: dict[str, Any], message: str) -> None:
    jobs = run(actions, **inputs)
    assert failed(jobs) == ["create_release"]
    assert message in jobs["create_release"].log
    assert {job.result for name, job in jobs.items() if name != "create_release"} == {"skipped"}
    assert hub.releases == {}


def test_a_dry_run_leaves_nothing(actions: Actions, hub: Hub) -> None:
    jobs = run(actions, dry_run=True)
    assert failed(jobs) == []
    assert {name for name, job in jobs.items() if job.result == "skipped"} == {
        "create_release", "smoke", "windows", "trend", "sign", "publish", "update_docs"
    }  # fmt: skip
    assert "would hold these" in jobs["rehearse"].log
    assert (hub.releases, hub.requests) == ({}, 0)
