"""The last job of build.yml, run again: from every state of a release, with the assets that a real release has."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_github
import fake_parts
import kills
import pytest
import wheelhouse
from fake_github import Hub
from publishing import TAG, client, environment, expected, publish, state
from wheelhouse import COMMIT
from workflows import ROOT, Runner, base_environment, load

from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import universal
from rocm_wheels.matrix.names import is_unlabelled
from rocm_wheels.publish import published

CELL = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2", "ck")
TARGETS = ("gfx90a", "gfx942", "gfx1030", "gfx1201")
# Of a release. The job of the long tests begins from the others.
STATES = [*(pytest.param(state, marks=pytest.mark.long) for state in ("complete draft", "public")), "immutable"]


@pytest.fixture
def built(windows_launcher: Path, tmp_path: Path) -> Path:
    """What the jobs of a run built: universal wheels for both systems with every interface, a combination with
    flash-attn-3, the crate.
    """
    dist = tmp_path / "built"
    known = versions.load()
    claim = universal(known, wheelhouse.NEWEST)
    beside = [wheelhouse.write_interface(dist, claim, name) for name in known.interfaces]
    wheelhouse.write(dist, claim, beside=beside, targets=TARGETS)
    wheelhouse.write(dist, claim, platform="win_amd64", targets=TARGETS[2:], launcher=windows_launcher)
    wheelhouse.write_with_fa3(dist, CELL)
    fake_parts.crate(dist, COMMIT)
    return dist


class Job(Runner):
    """Runs the job `publish` of build.yml in an environment that is set up already."""

    def _checkout(self, inputs: Mapping[str, Any]) -> None:
        assert inputs["ref"] == COMMIT
        shutil.rmtree(self.workspace, ignore_errors=True)
        python = self.workspace / "build/env-release/bin/python"
        python.parent.mkdir(parents=True)
        # The job's commands begin with `python -m rocm_wheels`. They wait as short for GitHub as a test can.
        python.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} -c '{kills.PROGRAM}' \"$@\"\n")
        python.chmod(0o755)
        (self.workspace / "build_rocm.sh").write_text("#!/bin/sh\n")
        (self.workspace / "build_rocm.sh").chmod(0o755)


def run_again(hub: Hub, tmp_path: Path, *, built: Path | None, crate: Path) -> str:
    """Runs the job. built: the wheels of the build jobs, None if there was nothing to build. Returns its log."""
    artifacts = tmp_path / "storage/artifacts"
    shutil.rmtree(artifacts, ignore_errors=True)
    (artifacts / "crate").mkdir(parents=True)
    shutil.copy(crate, artifacts / "crate")
    count = 0
    if built is not None:
        count = 1
        shutil.copytree(built, artifacts / "wheels-all/wheels-all", ignore=shutil.ignore_patterns("*.crate"))
    path = f"{ROOT / 'tests/support/bin'}:{os.environ['PATH']}"
    runner = Job(
        workspace=tmp_path / "workspace",
        storage=tmp_path / "storage",
        caches=tmp_path / "caches",
        github={"token": fake_github.TOKEN},
        environment={**base_environment(), **environment(hub), "PATH": path, "PYTHONPATH": str(ROOT)},
    )
    results = {"verify": "success" if built else "skipped", "create_release": "success"}
    counts = dict.fromkeys(("wheels-count", "artifacts-count", "windows-count"), str(count))
    outputs = {"create_matrix": {**counts, "commit": COMMIT}}
    jobs = ("create_release", "create_matrix", "verify", "smoke", "windows", "trend", "sign")
    needs = {
        job: {"result": results.get(job, "success" if job in ("create_matrix", "sign") else "skipped"),
              "outputs": outputs.get(job, {})}
        for job in jobs
    }  # fmt: skip
    if built is not None:
        needs["windows"]["result"] = "success"
    contexts = {"env": {"TAG": TAG}, "github": runner.github, "inputs": {}, "vars": {}, "needs": needs}
    job = runner._steps("publish", load("build.yml")["jobs"]["publish"], contexts)
    assert job.result == "success", job.log
    return job.log


def rows(hub: Hub, tmp_path: Path, **environment: str) -> str:
    """How many jobs of the universal wheel the job `create_matrix` would start for the release."""
    listed = tmp_path / "published.json"
    listed.write_text(json.dumps(published.listing(client(hub), TAG, COMMIT)))
    command = [sys.executable, str(ROOT / "create_matrix.py"), "--github-output", "--missing", str(listed)]
    done = subprocess.run(
        [*command, "--only", f"{wheelhouse.NEWEST} universal"],
        env={**base_environment(), "PYTORCH_ROCM_ARCH": ";".join(TARGETS), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    (count,) = re.findall(r"(?m)^wheels-count=(\d+)$", done.stdout)
    return str(count)


@pytest.mark.parametrize("start", STATES)
def test_nothing_is_left_to_build(hub: Hub, built: Path, tmp_path: Path, start: str) -> None:
    """The unlabelled wheels are in the release too, and have no test report."""
    whole = expected(built)
    assert sum(is_unlabelled(name) for name in whole) == 2
    hub.immutable = start == "immutable"
    publish(hub, built)
    if start == "complete draft":
        (release,) = hub.releases.values()
        release["draft"] = True
    stored = dict(hub.stored)
    (crate,) = built.glob("*.crate")
    for again in ("once", "twice"):
        run_again(hub, tmp_path, built=None, crate=crate)
        assert state(hub)["assets"] == whole, again
        assert state(hub)["draft"] is False
    assert dict(hub.stored) == stored, "nothing is sent again"


@pytest.mark.parametrize("start", ["nothing", "half draft", *STATES])
def test_the_job_alone_is_run_again(hub: Hub, built: Path, tmp_path: Path, start: str) -> None:
    """With the artifacts of the build jobs, whatever the release holds."""
    whole = expected(built)
    hub.immutable = start == "immutable"
    hub.tags[TAG] = COMMIT
    if start != "nothing":
        publish(hub, built)
        (release,) = hub.releases.values()
        release["draft"] = "draft" in start
        if start == "half draft":
            release["assets"] = release["assets"][: len(release["assets"]) // 2]
            there = {asset["name"] for asset in release["assets"]}
            hub.add_asset(release, next(name for name in whole if name not in there), b"", "starter")
    (crate,) = built.glob("*.crate")
    run_again(hub, tmp_path, built=built, crate=crate)
    assert (state(hub)["assets"], state(hub)["draft"]) == (whole, False)


def test_wheels_that_are_built_again_replace_nothing_in_an_immutable_release(
    hub: Hub, built: Path, tmp_path: Path
) -> None:
    """Their test reports have other times, and the crate is packed by another cargo."""
    hub.immutable = True
    publish(hub, built)
    before = state(hub)["assets"]
    for report in built.glob("*.verdict.json"):
        report.write_text(report.read_text().replace('"seconds": 20.0', '"seconds": 21.0'))
    (crate,) = built.glob("*.crate")
    fake_parts.crate(built, COMMIT, **{"src/lib.rs": "// packed by another cargo"})
    log = run_again(hub, tmp_path, built=built, crate=crate)
    assert state(hub)["assets"] == before
    assert "its verdict in the release stays: the release is immutable" in log


def test_a_universal_wheel_is_built_until_the_release_has_it_for_every_system(
    hub: Hub, built: Path, tmp_path: Path
) -> None:
    """For GPUs that torch does not serve on Windows, the wheel for Linux is all that a job builds."""
    publish(hub, built)
    assert rows(hub, tmp_path) == "0"
    (release,) = hub.releases.values()
    release["assets"] = [asset for asset in release["assets"] if "win_amd64" not in asset["name"]]
    assert rows(hub, tmp_path) == "1"
    assert rows(hub, tmp_path, PYTORCH_ROCM_ARCH="gfx90a;gfx942") == "0", "Instinct alone"
    assert rows(hub, tmp_path, PYTORCH_ROCM_ARCH="gfx1030;gfx1201") == "1", "Radeon alone"
    assert rows(hub, tmp_path, PYTORCH_ROCM_ARCH="gfx90a;gfx950") == "1", "the wheel has no gfx950"


def test_an_immutable_release_that_lacks_wheels_stops_the_first_jobs(hub: Hub, built: Path, tmp_path: Path) -> None:
    """Not the last one, after hours of building."""
    hub.immutable = True
    publish(hub, built)
    assert rows(hub, tmp_path) == "0"
    command = [sys.executable, str(ROOT / "create_matrix.py"), "--missing", str(tmp_path / "published.json")]
    done = subprocess.run(command, env=base_environment(), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"release {TAG} is immutable and lacks some of these wheels\nBuild them for a new tag" in done.stderr
