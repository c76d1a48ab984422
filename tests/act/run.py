"""Runs the workflows for real, by nektos/act on this machine, against a GitHub of its own on loopback.

    GOBIN=~/bin go install github.com/nektos/act@v0.2.89 && PATH=~/bin:$PATH python tests/act/run.py

All jobs of build.yml for one combination with few kernels, as SCENARIOS says: a release by hand from an empty
repository, a pull request, and a pushed tag whose run dies three times and is run again. It needs act, node, npm, git,
cargo, and the package indexes.

act runs the steps with its own artifact and cache servers. Actions of GitHub's are replaced by those of this directory,
over the packages @actions/artifact and @actions/cache. A `gh` of this directory answers for GitHub's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import fake_github  # noqa: E402
import fewer_kernels  # noqa: E402
from fake_github import REPOSITORY, TOKEN, Hub  # noqa: E402

TAG = "v0.1.0"
TARGET = "gfx1030"
CELL = {"flash_attn": ["2.8.3"], "python": ["3.11"], "torch": ["2.5.1"], "rocm": ["6.2"], "backend": ["triton"]}
# The check of the crate compiles it several times, so here the crate is only packed.
_CRATE = """#!/usr/bin/env bash
cd "$(dirname "$0")" && cargo package --locked --allow-dirty --no-verify --quiet
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Kills a Python program of `job` at its `count`-th audit event of that name whose arguments contain `text`."""

    job: str
    event: str
    text: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run of build.yml: its trigger and its expected end.

    Each fault ends an attempt. The next attempt finds its artifacts and caches. The last attempt has no fault, and all
    of `jobs`, which a run without faults needs, have run then.
    """

    event: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    tagged: bool = False  # the tag exists before the run
    faults: tuple[Fault, ...] = ()
    jobs: frozenset[str]
    publishes: bool
    like: str = ""  # the scenario whose release this one repeats


_BUILT = {"create_matrix", "build_kernels", "build", "crate"}
_PUBLISHED = {"create_release", "sign_crate", "publish", "update_release_notes", "update_docs"}
SCENARIOS = {
    "release": Scenario(
        event="workflow_dispatch",
        payload={"ref": f"refs/tags/{TAG}", "inputs": {"tag": TAG, "dry-run": "false"}},
        tagged=True,
        jobs=frozenset(_BUILT | _PUBLISHED),
        publishes=True,
    ),
    "pull_request": Scenario(
        event="pull_request",
        payload={"number": 1, "pull_request": {"number": 1, "head": {"ref": "topic"}, "base": {"ref": "main"}}},
        jobs=frozenset(_BUILT | {"rehearse"}),
        publishes=False,
    ),
    "rerun": Scenario(
        event="push",
        payload={"ref": f"refs/tags/{TAG}"},
        tagged=True,
        faults=(
            Fault(job="build_kernels", event="os.rename", text=".co.", count=20),  # as if memory ran out
            Fault(job="publish", event="http.client.send", text="POST /upload/", count=3),
            Fault(job="publish", event="http.client.send", text="PATCH /repos/", count=2),  # before it is public
        ),
        jobs=frozenset(_BUILT | _PUBLISHED),
        publishes=True,
        like="release",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)} (default, all)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new directory and keep it")
    arguments = parser.parse_args()
    for tool in ("act", "node", "npm", "git", "cargo"):
        if shutil.which(tool) is None:
            parser.error(f"there is no {tool} on PATH")
    if unknown := set(arguments.scenario) - set(SCENARIOS):
        parser.error(f"there is no scenario {', '.join(sorted(unknown))}: take {', '.join(SCENARIOS)}")
    with tempfile.TemporaryDirectory() as scratch:
        return run((arguments.keep or Path(scratch)).resolve(), arguments.scenario or list(SCENARIOS))


def run(work: Path, names: list[str]) -> int:
    """Runs scenarios in `work`. Returns 0 if each ends as expected."""
    work.mkdir(parents=True, exist_ok=True)
    _packages(work)
    checkout = _repository(work / "name")
    problems: list[str] = []
    ends: dict[str, dict[str, str]] = {}
    for name in names:
        scenario = SCENARIOS[name]
        found, ends[name] = _play(scenario, work, work / name, checkout)
        if scenario.like in ends and ends[name] != ends[scenario.like]:
            found.append(f"its release is not the one that the scenario {scenario.like} made")
        problems += [f"{name}: {problem}" for problem in found]
    print("\n".join(problems) or "as it should be")
    return 1 if problems else 0


def _play(scenario: Scenario, work: Path, own: Path, checkout: Path) -> tuple[list[str], dict[str, str]]:
    """Runs all attempts of a scenario. Returns the unexpected results, and the release as `_release` describes it."""
    commit = _git(checkout, "rev-parse", "HEAD")
    hub = Hub(settings={"": {"default_branch": "main"}})
    if scenario.tagged:
        hub.tags[TAG] = commit
    problems: list[str] = []
    done: set[str] = set()
    with fake_github.serve(hub):
        for number, fault in enumerate((*scenario.faults, None), start=1):
            started = time.monotonic()
            results = _attempt(scenario, number, fault, hub, work, own, checkout)
            print(f"{own.name} {number}: {time.monotonic() - started:.0f} s, {results}", flush=True)
            failed = {job for job, result in results.items() if result != "success"}
            if failed != ({fault.job} if fault else set()):
                problems.append(f"attempt {number}: failed {sorted(failed)}, log {own / f'{number}.log'}")
            if fault and any(not release["draft"] for release in hub.releases.values()):
                problems.append(f"attempt {number} made a release public")
            done |= {job for job, result in results.items() if result == "success"}
    if done != scenario.jobs:
        problems.append(f"jobs that ran and should not, or the other way round: {sorted(done ^ scenario.jobs)}")
    return problems + _wrong_end(scenario, hub, own, commit), _release(hub)


def _release(hub: Hub) -> dict[str, str]:
    """Name -> digest of each file that is the same in each run. Test reports hold times, and SHA256SUMS covers the
    reports.
    """
    assets = [asset for release in hub.releases.values() for asset in release["assets"]]
    return {asset["name"]: asset["digest"] * asset["name"].endswith((".whl", ".crate")) for asset in assets}


def _wrong_end(scenario: Scenario, hub: Hub, own: Path, commit: str) -> list[str]:
    """Objects that GitHub has but should not have, or lacks."""
    calls, attested = ((own / name).read_text().splitlines() for name in ("calls", "attestations"))
    print("\n".join(f"  {name}" for name in _release(hub)))
    if not scenario.publishes:
        left = {"releases": hub.releases, "tags": hub.tags, "gh": calls, "attestations": attested}
        return [f"{name}: {there}" for name, there in left.items() if there]
    public = [(release["tag_name"], release["draft"]) for release in hub.releases.values()]
    wheels = {name: count for name, count in hub.stored.items() if name.endswith((".whl", ".crate"))}
    checks = {
        f"releases {public}": public == [(TAG, False)],
        f"tags {hub.tags}": hub.tags == {TAG: commit},
        f"stored {wheels}": wheels and set(wheels.values()) == {1},
        f"calls of gh {calls}": [call for call in calls if call.startswith("workflow run pages.yml ")] == calls != [],
    }
    return [text for text, good in checks.items() if not good]


def _packages(work: Path) -> None:
    """The actions' node_modules from the lock file, outside of the repository."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, work / name)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(command, cwd=work, check=True)


def _repository(path: Path) -> Path:
    """A repository with one commit on the branch main: these files, reduced to one combination, one target and fewer
    kernels.
    """
    fewer_kernels.copy(path)
    fewer_kernels.narrow(path)
    (path / "candle-flash-rocm/check.sh").write_text(_CRATE)
    _replace(path / "create_matrix.py", r"ROCM_MATRIX = \{.*?\n\}", f"ROCM_MATRIX = {CELL}")
    _replace(path / "rocm_wheels/versions.toml", r"(?<=\n)default = true", "default = false")
    _replace(path / "rocm_wheels/versions.toml", rf"(\[targets\.{TARGET}\].*?)default = false", r"\1default = true")
    _git(path, "init", "--quiet", "--initial-branch", "main")
    _git(path, "remote", "add", "origin", f"https://github.com/{REPOSITORY}.git")
    _git(path, "add", "--all")
    _git(path, "-c", "user.name=act", "-c", "user.email=act@localhost", "commit", "--quiet", "--message", "all")
    return path


def _replace(path: Path, pattern: str, text: str) -> None:
    changed, count = re.subn(pattern, text, path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert count, f"{path.name} has no {pattern}"
    path.write_text(changed, encoding="utf-8")


def _git(path: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(path), *words], capture_output=True, text=True, check=True).stdout.strip()


def _attempt(
    scenario: Scenario, number: int, fault: Fault | None, hub: Hub, work: Path, own: Path, checkout: Path
) -> dict[str, str]:
    """Runs one attempt and writes act's log to a numbered file. Returns job -> result for the jobs that ran."""
    # A fault that kills a compiler needs kernels to compile, so a run with faults does not use the cache of another
    # run.
    caches = (own if scenario.faults else work) / "caches"
    # act's server lists no artifacts if the run has no directory.
    for directory in (own / "artifacts/1", caches):
        directory.mkdir(parents=True, exist_ok=True)
    for name in ("calls", "attestations"):
        (own / name).touch()
    event = {**scenario.payload, "repository": {"default_branch": "main"}}
    (own / "event.json").write_text(json.dumps(event))
    command = ["act", scenario.event, "--json", "--workflows", ".github/workflows/build.yml"]
    command += ["--no-recurse", "--no-skip-checkout", "--concurrent-jobs", "1"]
    command += ["--eventpath", str(own / "event.json"), "--defaultbranch", "main", "--actor", "owner"]
    command += ["--artifact-server-path", str(own / "artifacts"), "--artifact-server-addr", "127.0.0.1"]
    command += ["--cache-server-path", str(caches), "--cache-server-addr", "127.0.0.1"]
    for runner in ("ubuntu-22.04", "ubuntu-24.04"):
        command += ["-P", f"{runner}=-self-hosted"]
    for used, local in _actions(checkout).items():
        command += ["--local-repository", f"{used}={local}"]
    # The token of a pull request cannot write: this GitHub does not know it.
    command += ["--secret", f"GITHUB_TOKEN={TOKEN if scenario.publishes else 'of-a-pull-request'}"]
    variables = {
        "GITHUB_RUN_ATTEMPT": str(number),
        "PATH": f"{HERE / 'tools'}:{os.environ['PATH']}",
        "PYTHONPATH": str(HERE / "tools"),
        "NODE_PATH": str(work / "node_modules"),
        "ACT_GITHUB": hub.url,
        "ACT_REPOSITORY": str(checkout),
        "ACT_ATTESTATIONS": str(own / "attestations"),
        "ACT_CALLS": str(own / "calls"),
        "ACT_FAULT": json.dumps(vars(fault) if fault else {}),
    }
    for name, value in variables.items():
        command += ["--env", f"{name}={value}"]
    with (own / f"{number}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=checkout, stdout=log, stderr=subprocess.STDOUT, check=False)
    return _results(own / f"{number}.log")


def _results(log: Path) -> dict[str, str]:
    """Job -> result from act's log. A job fails if one of its matrix rows fails."""
    results: dict[str, str] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        if "jobResult" in entry and results.get(entry["jobID"]) != "failure":
            results[entry["jobID"]] = entry["jobResult"]
    return results


def _actions(checkout: Path) -> dict[str, Path]:
    """Each action that a workflow uses -> the directory of its stand-in, if it has one."""
    found = {}
    for workflow in sorted((checkout / ".github/workflows").glob("*.yml")):
        for owner, name, commit in re.findall(r"uses: ([\w-]+)/([\w-]+)[^@\s]*@([0-9a-f]{40})", workflow.read_text()):
            if (local := HERE / "actions" / name).is_dir():
                found[f"{owner}/{name}@{commit}"] = local
    return found


if __name__ == "__main__":
    sys.exit(main())
