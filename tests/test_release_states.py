"""The real lines of build.yml from every state of a release: docs/notes/release-states.md has what each run leaves.

Only builds, compilers and signatures are stand-ins (fake_build.py). Plan, draft, matrix, artifacts, publishing and the
conditions of jobs and steps are the workflow's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_github
import pytest
from fake_github import Hub
from publishing import TAG, environment
from wheelhouse import COMMIT
from workflows import ROOT, Job, Runner, base_environment, load, render

from rocm_wheels.matrix.release_plan import FILE

ONE = "2.7.4 3.11 2.5.1 6.2 triton"
BOTH = "2.7.4 3.1[12] 2.5.1 6.2 triton"
NEXT = "v1.2.4"
CHANGED = {"BUILD_CHANGE": "changed = 1\n"}
BROKEN = {"BUILD_FAILS": "cp312"}
PAGE = (ROOT / "docs/notes/release-states.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The address of a process that runs the commands of all steps."""
    address = tmp_path_factory.mktemp("server") / "socket"
    paths = f"{ROOT}:{ROOT / 'tests/support'}"
    command = [sys.executable, str(ROOT / "tests/support/fake_build.py"), str(address)]
    with subprocess.Popen(command, env={**base_environment(), "PYTHONPATH": paths}) as process:
        while not address.exists() and process.poll() is None:
            time.sleep(0.02)
        yield address
        process.terminate()


@dataclass(kw_only=True)
class Actions(Runner):
    """GitHub's runners for one repository. Each run has its artifacts; a repeated one has those of its attempts.

    older: downloads give the older copy of an artifact that two attempts uploaded, as GitHub may. meanwhile: job ->
    what happens before it.
    """

    hub: Hub
    home: Path
    runs: int = 0
    older: bool = False
    meanwhile: dict[str, Callable[[], object]] = field(default_factory=dict)

    def _checkout(self, inputs: Mapping[str, Any]) -> None:  # noqa: ARG002
        shutil.rmtree(self.workspace, ignore_errors=True)
        for name in ("create_matrix.py", "build_rocm.sh", "candle-flash-rocm/check.sh"):
            self._script(name, name.rpartition("/")[2])
        for name in ("env", "env-cibuildwheel", "env-release"):
            self._script(f"build/{name}/bin/python", "python")

    def _script(self, name: str, program: str) -> None:
        path = self.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {ROOT}/tests/support/fake_command.py {program} "$@"\n')
        path.chmod(0o755)

    def _action(self, action: str, inputs: Mapping[str, Any]) -> dict[str, str]:
        there, before = self.storage / "artifacts", self.storage / "older"
        if action == "actions/attest-build-provenance":
            assert [path for path in (self.workspace / "signed").rglob("*") if path.suffix in (".whl", ".crate")]
            return {}
        if action == "actions/upload-artifact" and (there / inputs["name"]).exists():
            shutil.copytree(there / inputs["name"], before / inputs["name"], dirs_exist_ok=True)
        if action == "actions/download-artifact" and self.older and before.is_dir():
            for copy in before.iterdir():
                shutil.rmtree(there / copy.name)
                shutil.copytree(copy, there / copy.name)
        return super()._action(action, inputs)

    def _job(self, name: str, key: str, job: dict[str, Any], contexts: dict[str, Any]) -> Job:
        if key in self.meanwhile:
            self.meanwhile.pop(key)()
        return super()._job(name, key, job, contexts)

    def run(
        self, tag: str = TAG, *, event: str = "workflow_dispatch", again: tuple[int, dict[str, Job]] | None = None,
        environment: Mapping[str, str] | None = None, dry_run: bool = False, **inputs: str,
    ) -> tuple[int, dict[str, Job]]:  # fmt: skip
        """A run of build.yml at a tag: its number and its jobs. again: the run whose failed jobs are run again."""
        number = again[0] if again else self.runs + 1
        self.runs = max(self.runs, number)
        ref = "refs/heads/main" if tag.startswith("nightly-") else f"refs/tags/{tag}"
        ref = {"pull_request": "refs/pull/1/merge"}.get(event, ref)
        before = dict(self.environment), self.storage, self.workspace, self.github
        self.storage, self.workspace = self.home / f"run{number}", self.home / f"workspace{number}"
        self.github = {
            "event_name": event, "ref": ref, "ref_name": ref.split("/", 2)[2], "sha": COMMIT, "run_id": str(number),
            "run_attempt": "2" if again else "1", "token": fake_github.TOKEN,
            "event": {"repository": {"default_branch": "main"}},
        }  # fmt: skip
        self.environment |= {"GITHUB_REF": ref, **(environment or {})}
        given: dict[str, Any] = {"tag": tag, "dry-run": dry_run, "only": BOTH, "targets": "gfx942", **inputs}
        jobs = set(load("build.yml")["jobs"]) - {"windows"}  # the stand-in makes no wheel for Windows
        done = self.workflow(
            "build.yml", given if event == "workflow_dispatch" else {}, only=jobs, earlier=again[1] if again else None
        )
        self.environment, self.storage, self.workspace, self.github = before
        return number, done

    def left(self) -> str:
        """What the repository holds: releases and drafts with the Pythons and build numbers of their wheels."""
        result = []
        for release in self.hub.releases.values():
            names = [asset["name"] for asset in release["assets"] if asset["state"] == "uploaded"]
            assert FILE in names
            wheels = sorted(name.split("-cp")[0].partition("triton")[2].strip("-") + " cp" + name.split("-cp")[1]
                            for name in names if name.endswith(".whl"))  # fmt: skip
            held = ", ".join(f"build {each}" if each[0] != " " else each.strip() for each in wheels)
            result.append(f"{'draft' if release['draft'] else 'public'} {release['tag_name']}: {held or 'no wheel'}")
        return "; ".join(result) or "nothing"


@pytest.fixture
def actions(hub: Hub, tmp_path: Path, server: Path) -> Actions:
    hub.tags |= {TAG: COMMIT, NEXT: COMMIT}
    paths = f"{ROOT / 'tests/support/bin'}:{Path(sys.executable).parent}"
    return Actions(
        hub=hub,
        home=tmp_path,
        workspace=tmp_path,
        storage=tmp_path,
        caches=tmp_path / "caches",
        github={},
        environment={**base_environment(), **environment(hub), "FAKE_BUILD": str(server)}
        | {"PATH": f"{paths}:{base_environment()['PATH']}"},
    )


def failed(done: tuple[int, Mapping[str, Job]]) -> list[str]:
    return [name for name, job in done[1].items() if job.result == "failure"]


Steps = Callable[[Actions], Iterator[tuple[str, list[str]]]]


def _half(actions: Actions) -> Iterator[tuple[str, list[str]]]:
    half = actions.run(environment=BROKEN)
    yield "half: a wheel does not pass its tests", failed(half)
    yield "one combination, other GPU targets", failed(actions.run(only=ONE, targets="gfx90a"))
    yield "one combination", failed(actions.run(only=ONE))
    yield "re-run of the failed jobs of the first run", failed(actions.run(again=half))
    yield "re-run of all jobs", failed(actions.run())


def _dead(actions: Actions) -> Iterator[tuple[str, list[str]]]:
    dead = actions.run(environment=BROKEN)
    (draft,) = actions.hub.releases.values()
    stray = "flash_attn-2.7.4+rocm62torch2.5triton-cp310-cp310-manylinux_2_17_x86_64.whl"
    actions.hub.add_asset(draft, stray, b"left over")
    actions.hub.add_asset(draft, stray.replace("cp310", "cp311"), b"unfinished", "starter")
    yield "dead: killed in the middle of its uploads", failed(dead)
    actions.older = True
    yield "re-run of its failed jobs, with older artifacts", failed(actions.run(again=dead))


def _tags(actions: Actions) -> Iterator[tuple[str, list[str]]]:
    actions.variables = {"RELEASE_ONLY": ONE, "RELEASE_TARGETS": "gfx942"}
    yield "fork: a pushed tag builds what two variables say", failed(actions.run(event="push"))
    yield "second tag, nothing changed", failed(actions.run(NEXT, event="push"))
    yield "second tag, a changed wheel", failed(actions.run(NEXT, event="push", environment=CHANGED))


def _together(actions: Actions) -> Iterator[tuple[str, list[str]]]:
    actions.meanwhile["publish"] = lambda: actions.run(NEXT, only=ONE, environment=CHANGED)
    yield "two tags at once, without the lock", failed(actions.run(only=ONE))
    yield "re-run of all jobs of the tag that lost", failed(actions.run(only=ONE))


def _targets(actions: Actions) -> Iterator[tuple[str, list[str]]]:
    yield "fresh", failed(actions.run(only=ONE))
    yield "more GPU targets at the public tag", failed(actions.run(only=ONE, targets="gfx90a;gfx942"))
    yield "fewer GPU targets at a later tag", failed(actions.run(NEXT, only=ONE, environment=CHANGED))


def _nightly(actions: Actions) -> Iterator[tuple[str, list[str]]]:
    yield "nightly candidate", failed(actions.run("nightly-20261129", only=ONE))
    assert [release["prerelease"] for release in actions.hub.releases.values()] == [True]
    yield "a release beside it", failed(actions.run(only=ONE, environment=CHANGED))


def _nothing(actions: Actions) -> Iterator[tuple[str, list[str]]]:
    yield "dry run", failed(actions.run(only=ONE, dry_run=True))
    yield "wrong combination", failed(actions.run(only="2.7.4 3.99 *"))
    yield "wrong GPU target", failed(actions.run(targets="sm_90", only="2.8.3 universal"))
    yield "wrong tag", failed(actions.run("v\uff11.2.3"))


def _pull_request(actions: Actions) -> Iterator[tuple[str, list[str]]]:
    yield "pull request", failed(actions.run(event="pull_request"))


LONG = (_tags, _targets, _dead, _nightly, _together, _pull_request)


@pytest.mark.parametrize("steps", [_half, _nothing, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)])
def test_what_each_run_leaves_is_the_table_of_the_docs(actions: Actions, steps: Steps) -> None:
    rows = [f"| {state} | {', '.join(jobs) or 'none'} | {actions.left()} |" for state, jobs in steps(actions)]
    assert "\n".join(rows) in PAGE, "docs/notes/release-states.md lacks:\n" + "\n".join(rows)


def admitted(lock: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The numbers of the runs that GitHub does not cancel while the first one works: a group has one run that waits
    unless its lock says `queue: max`.
    """
    groups: dict[str, list[str]] = {}
    for number, run in enumerate(runs, 1):
        group = str(render(lock["group"], {"github": {**run, "run_id": str(number)}, "inputs": run["inputs"]}))
        waiting = groups.setdefault(group, [])
        waiting[1:] = [*(waiting[1:] if lock.get("queue") == "max" else []), str(number)] if waiting else []
        waiting[:] = waiting or [str(number)]
    return sorted(number for each in groups.values() for number in each)


def test_a_tag_that_waits_is_not_cancelled_by_the_next_tag() -> None:
    tag: dict[str, Any] = {"event_name": "push", "inputs": {}}
    by_hand = {"event_name": "workflow_dispatch", "inputs": {"dry-run": False}}
    rehearsals = [{"event_name": "pull_request", "inputs": {}}, {**by_hand, "inputs": {"dry-run": True}}]
    lock = load("build.yml")["concurrency"]
    assert admitted(lock, [tag, by_hand, tag, *rehearsals]) == ["1", "2", "3", "4", "5"]
    assert admitted({"group": lock["group"]}, [tag, by_hand, tag, *rehearsals]) == ["1", "3", "4", "5"]
