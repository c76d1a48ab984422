"""The stand-ins of actions in tests/act: each takes what the workflows give, and their packages are locked."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from workflows import ROOT, WORKFLOWS, load

ACT = ROOT / "tests/act"
# These need GitHub: a pull request, Pages.
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
