"""The parts of tests/act: scenarios of build.yml, stand-ins of the actions and of gh, faults, locked packages."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import fake_github
import pytest
import yaml
from workflows import ROOT, WORKFLOWS, load

ACT = ROOT / "tests/act"
# These jobs need GitHub: a pull request, Pages.
WITHOUT = {
    "actions/deploy-pages",
    "actions/upload-pages-artifact",
    "peter-evans/create-pull-request",
}


def test_every_action_has_a_stand_in_that_takes_its_inputs() -> None:
    found = set()
    for workflow in WORKFLOWS.glob("*.yml"):
        for job in load(workflow.name)["jobs"].values():
            for step in job.get("steps", []):
                action = step.get("uses", "").partition("@")[0]
                if not action or action in WITHOUT:
                    continue
                local = ACT / "actions" / action.removeprefix("actions/")
                inputs = yaml.safe_load((local / "action.yml").read_text())["inputs"]
                assert set(step["with"]) <= set(inputs), (workflow.name, step["name"])
                assert (local / "index.js").is_file()
                found.add(local)
    assert found == {path.parent for path in (ACT / "actions").rglob("action.yml")}, "one that no workflow uses"


def test_the_packages_of_the_stand_ins_are_locked() -> None:
    wanted = json.loads((ACT / "package.json").read_text())["dependencies"]
    locked = json.loads((ACT / "package-lock.json").read_text())["packages"]
    for name, version in wanted.items():
        assert locked[f"node_modules/{name}"]["version"] == version
    packages = {name: entry for name, entry in locked.items() if name}
    assert all("integrity" in entry for entry in packages.values())
    assert not any("resolved" in entry for entry in packages.values()), "an address of a registry"


def test_what_runs_actionlint_pins_it() -> None:
    lint = [line for line in Path(ROOT / "run_tests.sh").read_text().splitlines() if "actionlint" in line]
    assert lint == ["    go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12"]


@pytest.fixture
def program(hub: fake_github.Hub, tmp_path: Path) -> dict[str, str]:
    """The environment of a program in a run."""
    own = {
        "ACT_GITHUB": hub.url,
        "ACT_CALLS": str(tmp_path / "calls"),
        "ACT_FAULT": "{}",
        "GH_TOKEN": fake_github.TOKEN,
    }
    own |= {"ACT_ATTESTATIONS": str(tmp_path / "attestations"), "PYTHONPATH": str(ACT / "tools")}
    return {**os.environ, **own, "GITHUB_API_URL": "https://api.github.com"}


def test_the_scenarios_name_jobs_of_the_workflows() -> None:
    known = {"build", *load("build.yml")["jobs"]}
    scenarios = runpy.run_path(str(ACT / "run.py"))["SCENARIOS"]
    for name, scenario in scenarios.items():
        assert scenario.jobs <= known
        assert {fault.job for fault in scenario.faults} <= scenario.jobs
        assert scenario.like in ("", *scenarios), name
        assert scenario.event in load("build.yml")["on"]


@pytest.mark.parametrize(("count", "code"), [(2, -signal.SIGKILL), (3, 0)])
def test_a_program_dies_at_its_fault(program: dict[str, str], tmp_path: Path, count: int, code: int) -> None:
    names = ("a.co", "b.co", "c.json")
    for name in names:
        (tmp_path / name).touch()
    script = f"import os\nfor name in {names}: os.rename(name, 'there')"
    fault = json.dumps({"event": "os.rename", "text": ".co", "count": count})
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={**program, "ACT_FAULT": fault}, check=False
    )
    assert done.returncode == code


def test_gh_downloads_what_a_draft_holds(hub: fake_github.Hub, program: dict[str, str], tmp_path: Path) -> None:
    """With the command of build.yml."""
    draft = hub.add_release("v1.2.3")
    for name in ("a.whl", "a.whl.verdict.json", "SHA256SUMS"):
        hub.add_asset(draft, name, name.encode())
    (command,) = (
        step["run"]
        for step in load("build.yml")["jobs"]["publish"]["steps"]
        if "gh release download" in step.get("run", "")
    )
    (tmp_path / "dist").mkdir()
    environment = {**program, "PATH": f"{ACT / 'tools'}:{os.environ['PATH']}", "TAG": "v1.2.3"}
    environment["GITHUB_REPOSITORY"] = fake_github.REPOSITORY
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=environment, check=True)
    found = {path.name: path.read_text() for path in (tmp_path / "dist").iterdir()}
    assert found == {"a.whl": "a.whl", "a.whl.verdict.json": "a.whl.verdict.json"}
