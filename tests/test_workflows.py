"""The contract of the workflows: what GitHub would only say when a job is already running."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workflows import EXPRESSION, ROOT, WORKFLOWS, Expression, Runner, base_environment, holds, load, render, verbs

from rocm_wheels import cli

NAMES = sorted(path.name for path in WORKFLOWS.glob("*.yml"))
# Outputs of actions, and inputs that they take; the first are required.
ACTIONS: dict[str, tuple[set[str], set[str], set[str]]] = {
    "actions/checkout": ({"persist-credentials"}, {"ref", "fetch-depth"}, set()),
    "actions/cache/restore": ({"path", "key"}, {"restore-keys"}, {"cache-hit", "cache-primary-key"}),
    "actions/cache/save": ({"path", "key"}, set(), set()),
    "actions/upload-artifact": (
        {"name", "path", "if-no-files-found", "retention-days"},
        {"overwrite"},
        {"artifact-id"},
    ),
    "actions/download-artifact": ({"path"}, {"name", "pattern", "merge-multiple"}, set()),
    "actions/attest-build-provenance": ({"subject-path"}, set(), {"bundle-path"}),
    "actions/upload-pages-artifact": ({"path"}, set(), set()),
    "actions/deploy-pages": (set(), set(), {"page_url"}),
    "peter-evans/create-pull-request": (
        {"branch", "title"},
        {"base", "commit-message", "body-path", "delete-branch"},
        set(),
    ),
}
READ_ONLY = {"contents: read"}
RELEASE_VERBS = {"publish", "notes", "index"}


def jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name in NAMES:
        for key, job in load(name)["jobs"].items():
            yield name, key, job


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, key, job in jobs():
        for step in job.get("steps", []):
            yield f"{name}:{key}: {step['name']}", step


JOBS = [pytest.param(name, key, job, id=f"{name}:{key}") for name, key, job in jobs()]


def expressions(value: Any) -> Iterator[str]:
    """All expressions below a value; an `if` is one without its braces."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "if" and "${{" not in str(each):
                yield str(each)
            else:
                yield from expressions(each)
    elif isinstance(value, list):
        for each in value:
            yield from expressions(each)
    elif isinstance(value, str):
        yield from EXPRESSION.findall(value)


def references(text: str) -> list[list[str]]:
    """Paths such as [needs, create_matrix, outputs, wheels] of an expression, its string literals aside."""
    bare = re.sub(r"'(?:[^']|'')*'", "''", text)
    return [path.split(".") for path in re.findall(r"\b[a-z][\w-]*(?:\.[\w-]+)+", bare)]


def needs(job: dict[str, Any]) -> list[str]:
    wanted = job.get("needs", [])
    return [wanted] if isinstance(wanted, str) else wanted


def test_these_are_the_workflows() -> None:
    assert NAMES == ["_build_rocm.yml", "build.yml", "check.yml", "pages.yml", "refresh.yml", "trend.yml"]
    assert list(load("build.yml")["jobs"]) == [
        "create_release",
        "create_matrix",
        "build_kernels",
        "build_wheels_rocm",
        "smoke",
        "trend",
        "rehearse",
        "publish",
        "update_release_notes",
        "update_docs",
    ]


def test_the_inputs_of_the_reusable_build() -> None:
    inputs = load("_build_rocm.yml")["on"]["workflow_call"]["inputs"]
    for name in ("flash-attn-version", "python-version", "torch-version", "rocm-version"):
        assert inputs[name]["required"] is True
    defaults = {name: entry["default"] for name, entry in inputs.items() if not entry.get("required")}
    assert defaults["runner"] == "ubuntu-22.04"
    assert defaults["is-upload"] is True
    assert defaults["build-triton-backend"] is False
    assert all(entry["description"] and entry["type"] for entry in inputs.values())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_allowed_on_top_and_concurrent_runs_are_thought_of(name: str) -> None:
    workflow = load(name)
    assert workflow["permissions"] == {}
    assert "concurrency" in workflow or set(workflow["on"]) == {"workflow_call"}


@pytest.mark.parametrize(("name", "key", "job"), JOBS)
def test_every_job_has_a_limit_and_permissions(name: str, key: str, job: dict[str, Any]) -> None:  # noqa: ARG001
    assert job["permissions"]
    assert "name" in job
    assert "uses" in job or "timeout-minutes" in job
    granted = {f"{scope}: {level}" for scope, level in job["permissions"].items()}
    if granted - READ_ONLY and "uses" not in job:
        # That a pull request runs none of these of build.yml is a test of its own.
        assert key in {
            "create_release",
            "publish",
            "update_release_notes",
            "update_docs",
            "deploy",
            "refresh",
            "compare",
        }


@pytest.mark.parametrize(("name", "key", "job"), JOBS)
def test_actions_are_pinned_and_get_what_they_take(name: str, key: str, job: dict[str, Any]) -> None:  # noqa: ARG001
    text = (WORKFLOWS / name).read_text(encoding="utf-8")
    for step in job.get("steps", []):
        assert "name" in step
        if "uses" not in step:
            continue
        action, _, commit = step["uses"].partition("@")
        assert re.fullmatch(r"[0-9a-f]{40}", commit), step["uses"]
        assert re.search(rf"{re.escape(step['uses'])} # v\d+\.\d+\.\d+", text), f"{step['uses']}: no version beside it"
        required, optional, _ = ACTIONS[action]
        given = set(step.get("with", {}))
        if action == "actions/download-artifact" and given == {"name"}:
            given.add("path")
        assert required <= given <= required | optional, (step["name"], given)
        if action == "actions/checkout":
            assert step["with"]["persist-credentials"] is False


def test_one_action_has_one_commit() -> None:
    used = {step["uses"] for _, step in steps() if "uses" in step}
    assert len({use.partition("@")[0].removesuffix("/restore").removesuffix("/save") for use in used}) == len(
        {use.partition("@")[2] for use in used}
    )


@pytest.mark.parametrize(("name", "key", "job"), JOBS)
def test_a_called_workflow_gets_its_inputs(name: str, key: str, job: dict[str, Any]) -> None:  # noqa: ARG001
    if "uses" not in job:
        return
    called = load(Path(job["uses"]).name)
    inputs = (called["on"]["workflow_call"] or {}).get("inputs", {})
    given = set(job.get("with", {}))
    assert {name for name, entry in inputs.items() if entry.get("required")} <= given <= set(inputs)
    asked = {scope: level for each in called["jobs"].values() for scope, level in each["permissions"].items()}
    assert asked.items() <= job["permissions"].items()


@pytest.mark.parametrize(("name", "key", "job"), JOBS)
def test_every_reference_leads_somewhere(name: str, key: str, job: dict[str, Any]) -> None:
    workflow = load(name)
    matrix_rows = _rows()
    ids = {step["id"]: step for step in job.get("steps", []) if "id" in step}
    triggers = workflow["on"]
    inputs = {each for event in triggers.values() for each in _inputs(event)}
    for expression in expressions(job):
        for path in references(expression):
            context, entry = path[0], path[1]
            if context == "needs":
                assert entry in needs(job), f"{key} does not need {entry}"
                if path[2] == "outputs":
                    assert path[3] in workflow["jobs"][entry]["outputs"], expression
            elif context == "steps":
                step = ids[entry]
                if "uses" in step:
                    assert path[3] in ACTIONS[step["uses"].partition("@")[0]][2], expression
                else:
                    assert "create_matrix.py --github-output" in step["run"], "known outputs: those of create_matrix.py"
                    assert path[3] in _outputs(), expression
            elif context == "inputs":
                assert entry in inputs, expression
            elif context == "matrix":
                rows = matrix_rows["kernels" if "outputs.kernels" in str(job["strategy"]) else "wheels"]
                assert all(entry in row for row in rows), f"no row has {entry}"
            elif context == "env":
                assert entry in {**workflow.get("env", {}), **job.get("env", {})}, expression
            elif context == "vars":
                assert entry == "GPU_RUNNER"
            else:
                assert context in ("github", "runner"), expression
    assert all(need in workflow["jobs"] for need in needs(job))


def _inputs(event: Any) -> dict[str, Any]:
    """Of a trigger, which may be nothing or, for a schedule, a list."""
    return event.get("inputs", {}) if isinstance(event, dict) else {}


def test_every_key_of_a_row_is_used() -> None:
    rows = _rows()
    build = load("build.yml")["jobs"]
    for kind, users in (("kernels", ["build_kernels"]), ("wheels", ["build_wheels_rocm", "smoke"])):
        used = {path[1] for user in users for each in expressions(build[user]) for path in references(each)
                if path[0] == "matrix"}  # fmt: skip
        for_people = {"kernels": {"rocm-version"}, "wheels": {"label", "torch-index"}}[kind]
        assert set(rows[kind][0]) == used | for_people


def _rows() -> dict[str, list[dict[str, Any]]]:
    text = (ROOT / "tests/golden/matrix.json").read_text(encoding="utf-8")
    return {name: each["include"] for name, each in json.loads(text).items() if name != "tag"}


def _outputs() -> set[str]:
    text = (ROOT / "tests/golden/matrix_one_target.txt").read_text(encoding="utf-8")
    return {line.partition("=")[0] for line in text.splitlines()}


def test_run_lines_hold_no_expression_and_know_their_variables() -> None:
    """What a run line reads is set beside it; an expression in it would be code from outside."""
    given = {"GITHUB_OUTPUT", "GITHUB_REPOSITORY", "GITHUB_STEP_SUMMARY", "RUNNER_TEMP"}
    for name, key, job in jobs():
        outer = {**load(name).get("env", {}), **job.get("env", {})}
        for step in job.get("steps", []):
            if "run" not in step:
                continue
            assert "${{" not in step["run"], f"{name}:{key}: {step['name']}"
            assert len(step["run"].strip().splitlines()) == 1, f"{name}:{key}: {step['name']} is more than one line"
            read = set(re.findall(r"\$\{?([A-Z][A-Z0-9_]*)", step["run"]))
            assert read <= {*outer, *step.get("env", {}), *given}, f"{name}:{key}: {step['name']}"


def test_run_lines_are_good_shell(tmp_path: Path) -> None:
    scripts = []
    for number, (label, step) in enumerate(steps()):
        if "run" in step:
            script = tmp_path / f"{number}.sh"
            script.write_text(f"#!/usr/bin/env bash\nset -eo pipefail\n# {label}\n{step['run']}\n")
            scripts.append(script)
    assert len(scripts) > 10
    # SC2154: the variables come from the step.
    done = subprocess.run(
        ["shellcheck", "--severity=style", "--exclude=SC2154", *scripts], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_run_lines_call_verbs_with_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = verbs()
    called = {}
    for label, step in steps():
        if match := re.search(r"-m rocm_wheels ([a-z]+)(.*)", step.get("run", "")):
            called[label] = (match[1], re.findall(r"(?<= )--[a-z-]+", match[2]))
    assert len(called) >= 8
    if not RELEASE_VERBS & known:
        called = {label: call for label, call in called.items() if call[0] not in RELEASE_VERBS}
    for label, (verb, options) in called.items():
        assert verb in known, f"{label}: no verb {verb}"
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        text = capsys.readouterr().out
        for option in options:
            assert re.search(rf"{option}\b", text), f"{label}: {verb} has no {option}"


def test_a_pull_request_writes_nothing_and_meets_no_gpu() -> None:
    build = load("build.yml")["jobs"]
    github = {"event_name": "pull_request", "ref": "refs/pull/1/merge", "token": "t", "ref_name": "1/merge"}
    done = {need: {"result": "success", "outputs": {"wheels-count": "2", "kernels-count": "4"}} for need in build} | {
        name: {"result": "skipped", "outputs": {}} for name in ("create_release", "smoke", "trend")
    }
    for variables in ({}, {"GPU_RUNNER": "true"}):
        contexts = {"github": github, "inputs": {}, "vars": variables, "needs": done, "status": "success"}
        contexts["needs"] = {**done, "publish": {"result": "skipped", "outputs": {}}}
        runs = {key: holds(job.get("if"), contexts) for key, job in build.items()}
        assert [key for key, runs_then in runs.items() if runs_then] == [
            "create_matrix",
            "build_kernels",
            "build_wheels_rocm",
            "rehearse",
        ]


@pytest.mark.parametrize(
    ("release", "wheels", "count", "smoke", "variable", "published"),
    [
        ("success", "success", "36", "success", "true", True),
        ("success", "success", "36", "skipped", "", True),
        ("success", "success", "36", "failure", "true", False),
        ("success", "success", "36", "skipped", "true", False),
        ("success", "failure", "36", "skipped", "", False),
        ("success", "success", "36", "cancelled", "", False),
        ("success", "skipped", "0", "skipped", "true", True),
        ("success", "skipped", "36", "skipped", "", False),
        ("skipped", "success", "36", "skipped", "", False),
        ("failure", "success", "36", "skipped", "", False),
    ],
)
def test_the_gate_of_publishing(
    release: str, wheels: str, count: str, smoke: str, variable: str, published: bool
) -> None:
    results = {"create_release": release, "create_matrix": "success", "build_wheels_rocm": wheels, "smoke": smoke}
    contexts = {
        "needs": {
            name: {"result": result, "outputs": {"wheels-count": count} if name == "create_matrix" else {}}
            for name, result in results.items()
        },
        "vars": {"GPU_RUNNER": variable},
        "github": {"event_name": "push"},
        "inputs": {},
        "status": "success",
    }
    assert holds(load("build.yml")["jobs"]["publish"]["if"], contexts) is published


@pytest.mark.parametrize(("wheels", "attests", "takes_over"), [("success", True, False), ("skipped", False, True)])
def test_a_run_attests_what_it_built(wheels: str, attests: bool, takes_over: bool) -> None:
    count = "36" if wheels == "success" else "0"
    contexts = {
        "needs": {
            "build_wheels_rocm": {"result": wheels},
            "create_matrix": {"outputs": {"wheels-count": count}},
        },
        "status": "success",
    }
    conditions = {step["name"]: step.get("if") for step in load("build.yml")["jobs"]["publish"]["steps"]}
    assert holds(conditions["Attest where the wheels come from"], contexts) is attests
    assert holds(conditions["Take over the wheels"], contexts) is attests
    assert holds(conditions["Take over what the release has already"], contexts) is takes_over


def test_runs_for_one_tag_wait_for_each_other() -> None:
    group = load("build.yml")["concurrency"]["group"]
    pushed = {"inputs": {}, "github": {"ref": "refs/tags/v1.2.3", "ref_name": "v1.2.3"}}
    by_hand = {"inputs": {"tag": "v1.2.3"}, "github": {"ref": "refs/heads/main", "ref_name": "main"}}
    assert render(group, pushed) == render(group, by_hand) == "build-v1.2.3"


def test_the_index_is_deployed_from_the_default_branch(tmp_path: Path) -> None:
    """The environment of Pages refuses any other ref, such as the tag that is being released."""
    assert set(load("pages.yml")["on"]) == {"workflow_dispatch"}
    job = load("build.yml")["jobs"]["update_docs"]
    assert job["permissions"] == {"actions": "write"}
    (tmp_path / "gh").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "gh").chmod(0o755)
    github = {"ref_name": "v1.2.3", "token": "t", "event": {"repository": {"default_branch": "trunk"}}}
    runner = Runner(
        workspace=tmp_path,
        storage=tmp_path / "storage",
        caches=tmp_path / "caches",
        github={},
        environment={"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_REPOSITORY": "owner/name"},
    )
    done = runner._steps("x", job, {"env": {}, "github": github, "inputs": {}})
    assert done.result == "success"
    assert "workflow run pages.yml --repo owner/name --ref trunk" in done.log


def test_a_pipe_fails_with_its_first_command() -> None:
    """GitHub's own bash has no pipefail unless it is asked for by name."""
    for name, key, job in jobs():
        piped = [step["name"] for step in job.get("steps", []) if re.search(r"[^|]\|[^|]", step.get("run", ""))]
        if piped:
            assert job.get("defaults", {}).get("run", {}).get("shell") == "bash", f"{name}:{key}: {piped}"


@pytest.mark.parametrize(
    ("smoke", "event", "runs"),
    [("success", "push", True), ("skipped", "push", False), ("success", "pull_request", False)],
)
def test_a_release_is_measured_where_it_met_a_gpu(smoke: str, event: str, runs: bool) -> None:
    contexts = {
        "needs": {"smoke": {"result": smoke}},
        "github": {"event_name": event},
        "inputs": {},
        "status": "success",
    }
    build = load("build.yml")["jobs"]
    assert holds(build["trend"]["if"], contexts) is runs
    assert "trend" not in build["publish"]["if"], "a regression keeps no release back"


def test_the_trend_measures_the_wheel_of_a_release_or_builds_its_own() -> None:
    workflow = load("trend.yml")
    assert {"schedule", "workflow_call", "workflow_dispatch"} == set(workflow["on"])
    measure = workflow["jobs"]["measure"]
    assert measure["permissions"] == {"contents": "read"}, "what runs on the GPU runner writes nothing"
    row = {"include": [_rows()["wheels"][-1]]}
    for given in ("", json.dumps(row)):
        needs = {"newest": {"result": "skipped" if given else "success", "outputs": {"row": json.dumps(row)}}}
        contexts = {"inputs": {"row": given}, "vars": {"GPU_RUNNER": "true"}, "needs": needs, "status": "success"}
        assert holds(workflow["jobs"]["newest"]["if"], contexts) is (given == "")
        assert holds(measure["if"], contexts)
        assert render(measure["strategy"]["matrix"], contexts) == row
        steps = {step["name"]: holds(step["if"], contexts) for step in measure["steps"] if "if" in step}
        assert steps == {"Take over the wheel": given != "", "Build the wheel": given == ""}
    contexts["vars"] = {}
    assert not holds(measure["if"], contexts)
    (build,) = (step for step in measure["steps"] if step["name"] == "Build the wheel")
    # The image of the job has a PYTORCH_ROCM_ARCH of its own.
    assert render(build["env"], {"matrix": row["include"][0]})["PYTORCH_ROCM_ARCH"] == row["include"][0]["targets"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a' == 'A' && 1 != 2", True),
        ("inputs.tag || (github.event_name == 'push' && github.ref_name) || ''", "v1"),
        ("!inputs.dry-run", True),
        ("format('{0}-{1}', inputs.missing, 'it''s')", "-it's"),
        ("fromJSON('{\"a\": [1]}')", {"a": [1]}),
        ("contains(github.ref, 'tags') || false", False),
    ],
)
def test_the_expressions_of_the_runner(text: str, value: object) -> None:
    contexts = {"inputs": {}, "github": {"event_name": "push", "ref_name": "v1", "ref": "x"}}
    assert Expression(text, contexts).value() == value
    assert render({"a": ["x ${{ github.ref }}-${{ github.ref_name }}"]}, contexts) == {"a": ["x x-v1"]}
    for bad in ("1 +", "a.b", "(1", "'x"):
        with pytest.raises((ValueError, KeyError, IndexError)):
            Expression(bad, contexts).value()


def test_a_failing_step_fails_its_job_and_keeps_what_must_be_kept(tmp_path: Path) -> None:
    """The runner itself: after a failure only steps that ask for it run, as a killed compile keeps its kernels."""
    runner = Runner(
        workspace=tmp_path / "work",
        storage=tmp_path / "storage",
        caches=tmp_path / "caches",
        github={"event_name": "push"},
        environment=base_environment(),
    )
    (tmp_path / "work/cache").mkdir(parents=True)
    (tmp_path / "work/cache/kernel").write_text("code")
    save = {"path": "cache", "key": "k"}
    job = {
        "steps": [
            {"name": "fails", "run": "false | true"},
            {"name": "not run", "run": "touch ran"},
            {"name": "keep", "if": "always()", "uses": "actions/cache/save@0", "with": save},
        ]
    }
    done = runner._steps("x", job, {"env": {}, "github": {}, "inputs": {}})
    assert done.result == "failure"
    assert not (tmp_path / "work/ran").exists()
    assert (tmp_path / "caches/kernel").read_text() == "code"


def test_a_shard_that_runs_out_of_time_keeps_its_kernels() -> None:
    job = load("build.yml")["jobs"]["build_kernels"]
    names = [step["name"] for step in job["steps"]]
    compile_, keep = (job["steps"][names.index(name)] for name in ("Compile", "Keep them, done or not"))
    assert keep["if"] == "always()"
    assert names.index("Keep them, done or not") == names.index("Compile") + 1
    for row in _rows()["kernels"]:
        contexts = {"matrix": row}
        assert render(compile_["timeout-minutes"], contexts) < render(job["timeout-minutes"], contexts) <= 360
