"""The contract of the workflows: errors that GitHub would only report when a job is already running."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workflows import EXPRESSION, ROOT, WORKFLOWS, holds, load, matrix_rows, render, verbs

from rocm_wheels import cli
from rocm_wheels.matrix import rows, versions

NAMES = sorted(path.name for path in WORKFLOWS.glob("*.yml"))
# Outputs of actions, and inputs that they accept; the first ones are required.
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
SECRETS = {"WINDOWS_CERTIFICATE", "WINDOWS_PASSWORD"}  # of the repository, as docs/notes/releases.md names them
READ_ONLY = {"contents: read"}


def jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name in NAMES:
        for key, job in load(name)["jobs"].items():
            yield name, key, job


def every_step() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, key, job in jobs():
        for step in job.get("steps", []):
            yield f"{name}:{key}: {step['name']}", step


JOBS = [pytest.param(name, key, job, id=f"{name}:{key}") for name, key, job in jobs()]


def expressions(value: Any) -> Iterator[str]:
    """All expressions below a value; an `if` is an expression without braces."""
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
    """Paths in an expression, such as [needs, create_matrix, outputs, wheels], without its string literals."""
    bare = re.sub(r"'(?:[^']|'')*'", "''", text)
    return [path.split(".") for path in re.findall(r"\b[a-z][\w-]*(?:\.[\w-]+)+", bare)]


def needs(job: dict[str, Any]) -> list[str]:
    expected = job.get("needs", [])
    return [expected] if isinstance(expected, str) else expected


def test_these_are_the_workflows() -> None:
    known = (
        "_build_rocm",
        "build",
        "check",
        "emulator",
        "hardware",
        "installs",
        "nightly",
        "pages",
        "refresh",
        "trend",
    )
    assert [f"{name}.yml" for name in known] == NAMES
    assert list(load("build.yml")["jobs"]) == [
        "create_release",
        "create_matrix",
        "build_kernels",
        "assemble",
        "verify",
        "smoke",
        "windows",
        "trend",
        "crate",
        "sign",
        "rehearse",
        "publish",
        "update_docs",
    ]


def test_the_inputs_of_the_reusable_build() -> None:
    inputs = load("_build_rocm.yml")["on"]["workflow_call"]["inputs"]
    for name in ("flash-attn-version", "python-version", "torch-version", "rocm-version"):
        assert inputs[name]["required"] is True
    defaults = {name: entry["default"] for name, entry in inputs.items() if not entry.get("required")}
    assert defaults["runner"] == "ubuntu-24.04"
    assert defaults["is-upload"] is True
    assert defaults["build-triton-backend"] is False
    assert all(entry["description"] and entry["type"] for entry in inputs.values())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_allowed_on_top_and_concurrent_runs_are_thought_of(name: str) -> None:
    workflow = load(name)
    # A called workflow has its caller's permissions, which a test of its own checks.
    assert workflow.get("permissions") == (None if set(workflow["on"]) == {"workflow_call"} else {})
    assert "concurrency" in workflow or set(workflow["on"]) == {"workflow_call"}


@pytest.mark.parametrize(("name", "key", "job"), JOBS)
def test_every_job_has_a_limit_and_permissions(name: str, key: str, job: dict[str, Any]) -> None:
    assert "name" in job
    assert "uses" in job or "timeout-minutes" in job
    if name == "_build_rocm.yml":
        assert "permissions" not in job
        return
    assert job["permissions"]
    granted = {f"{scope}: {level}" for scope, level in job["permissions"].items()}
    if granted - READ_ONLY and "uses" not in job:
        # Another test checks that a pull request runs none of these jobs of build.yml.
        assert key in {
            "create_release",
            "sign",
            "publish",
            "update_docs",
            "deploy",
            "propose",
            "report",
            "start",
        }


def test_one_job_signs_and_runs_no_code_of_a_wheel() -> None:
    """Torch and the crate's dependencies run in jobs without a token that can sign."""
    build = load("build.yml")["jobs"]
    signing = {key for key, job in build.items() if "id-token" in job.get("permissions", {})}
    assert signing == {"sign"}
    job = build["sign"]
    assert job["permissions"] == {"id-token": "write", "attestations": "write"}
    assert not [step for step in job["steps"] if "run" in step]
    assert {str(build[job]["permissions"]) for job in ("crate", "assemble", "verify")} == {"{'contents': 'read'}"}
    (attest,) = [
        step for _, step in every_step() if step.get("uses", "").startswith("actions/attest-build-provenance@")
    ]
    assert attest in job["steps"]
    assert attest["with"]["subject-path"].split() == ["signed/*.crate", "signed/**/*.whl"]
    (publish,) = [step for _, step in every_step() if step["name"] == "Check, upload, publish"]
    assert " --attested-by .github/workflows/build.yml" in publish["run"]
    assert publish["env"]["GH_TOKEN"] == "${{ github.token }}", "gh verifies with it"


def test_one_attestation_takes_all_files_of_a_release() -> None:
    """It takes 1024 files. Each job of the newest flash-attn makes the wheels of the interfaces too."""
    data = versions.load()
    files = 1  # the crate
    for row in matrix_rows()["wheels"]:
        systems = rows.systems_of(data, row["targets"].split(";")) if not row["python-version"] else [None]
        newest = row["flash-attn-version"] == data.flash_attn[-1]
        files += len(systems) + len(data.interfaces) * newest
    assert 170 < files <= 1024


def test_a_rehearsal_builds_as_a_release_does() -> None:
    """With the same job. Build numbers and the secrets of Windows belong to a release alone."""
    job = load("build.yml")["jobs"]["assemble"]
    steps = {step["name"]: step for step in job["steps"]}
    row: dict[str, Any] = {"universal": "true"}
    for result, published in (("success", "published"), ("skipped", "")):
        contexts = {"vars": {"SIGN_WINDOWS": "true"}, "matrix": row, "status": "success"}
        contexts["needs"] = {"create_release": {"result": result}}
        assert render(steps["Assemble"]["env"], contexts)["PUBLISHED"] == published
        for name in ("Sign the launcher for Windows", "Download the list of public wheels"):
            assert holds(steps[name]["if"], contexts) is bool(published)
    assert not holds(steps["Sign the launcher for Windows"]["if"], {**contexts, "matrix": {"universal": ""}})
    secret = [step["name"] for _, step in every_step() if "secrets." in str(step)]
    assert secret == ["Sign the launcher for Windows"]


def test_a_release_tests_each_of_its_wheels_once() -> None:
    """The globs of the jobs `verify` and the rows of the jobs `assemble` have every combination once."""
    rows = matrix_rows()
    made = [name for row in rows["assemble"] for name, _ in json.loads(row["rows"])]
    tested = [globs for row in rows["verify"] for globs in row["wheels"].split(";") if globs.startswith("flash_attn-2")]
    assert sorted(made) == sorted(row["name"] for row in rows["wheels"])
    assert sorted(tested) == sorted(row["wheels"].split(";")[0] for row in rows["wheels"])
    artifacts = [row["artifact"] for row in (*rows["assemble"], *rows["verify"])]
    assert len(set(artifacts)) == len(artifacts)


def test_a_job_that_can_write_installs_next_to_nothing() -> None:
    """Any installed package could use the token: only the group `release` (test_locks), or no package."""
    for name, key, job in jobs():
        if "uses" not in job and job.get("permissions", {}).get("contents") == "write":
            runs = [step["run"] for step in job["steps"] if "run" in step]
            installed = [run for run in runs if "--setup" in run or "install" in run]
            assert set(installed) <= {"./build_rocm.sh --setup release"}, (name, key)
            assert not any(run.startswith("./build_rocm.sh") and "--setup" not in run for run in runs), (name, key)


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
    used = {step["uses"] for _, step in every_step() if "uses" in step}
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
    asked = {scope: level for each in called["jobs"].values() for scope, level in each.get("permissions", {}).items()}
    assert asked.items() <= job["permissions"].items()


@pytest.mark.parametrize(("name", "key", "job"), JOBS)
def test_every_reference_leads_somewhere(name: str, key: str, job: dict[str, Any]) -> None:
    workflow = load(name)
    all_rows = matrix_rows()
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
                elif "--draft-only" in step["run"]:
                    assert path[3] == "commit", expression
                elif "rocm_wheels publish" in step["run"]:
                    assert path[3] == "url", expression
                elif "git diff" in step["run"]:
                    assert f'echo "{path[3]}=' in step["run"], expression
                else:
                    assert "create_matrix.py --github-output" in step["run"], "known outputs: those of create_matrix.py"
                    assert path[3] in _outputs(), expression
            elif context == "inputs":
                assert entry in inputs, expression
            elif context == "matrix":
                source = re.findall(r"outputs\.(kernels|assemble|verify|gpu)\b", str(job["strategy"]))
                rows = all_rows[source[0] if source else "wheels"]
                if "outputs" not in str(job["strategy"]) and "inputs" not in str(job["strategy"]):
                    rows = [job["strategy"]["matrix"]]
                assert all(entry in row for row in rows), f"no row has {entry}"
            elif context == "env":
                assert entry in {**workflow.get("env", {}), **job.get("env", {})}, expression
            elif context == "job":
                assert entry == "status", expression
            elif context == "vars":
                assert entry in ("GPU_RUNNER", "SIGN_WINDOWS", "RELEASE_ONLY", "RELEASE_TARGETS", "NIGHTLY")
            elif context == "secrets":
                called = triggers.get("workflow_call")
                assert entry in (called["secrets"] if called else SECRETS), expression
            else:
                assert context in ("github", "runner"), expression
    assert all(need in workflow["jobs"] for need in needs(job))


def _inputs(event: Any) -> dict[str, Any]:
    """The inputs of a trigger, which may be nothing or, for a schedule, a list."""
    return event.get("inputs", {}) if isinstance(event, dict) else {}


def test_every_key_of_a_row_is_used() -> None:
    rows = matrix_rows()
    build = {**load("build.yml")["jobs"], **load("trend.yml")["jobs"]}
    single = [f"matrix.{name}" for name in load("_build_rocm.yml")["on"]["workflow_call"]["inputs"]]  # a row alone
    build["alone"] = {"name": f"${{{{ {' || '.join(single)} }}}}"}
    users_of = {"kernels": ["build_kernels"], "wheels": ["alone", "measure"], "gpu": ["smoke"]}
    users_of |= {"assemble": ["assemble"], "verify": ["verify"]}
    for kind, users in users_of.items():
        used = {path[1] for user in users for each in expressions(build[user]) for path in references(each)
                if path[0] == "matrix"}  # fmt: skip
        for_people = {"kernels": {"rocm-version"}, "wheels": {"name", "label", "torch-index"}}.get(kind, set())
        used -= {"is-upload", "build-triton-backend", "commit"}
        assert set(rows[kind][0]) == used | for_people, kind


def _outputs() -> set[str]:
    text = (ROOT / "tests/golden/matrix_one_target.txt").read_text(encoding="utf-8")
    return {line.partition("=")[0] for line in text.splitlines()}


def test_run_lines_hold_no_expression_and_know_their_variables() -> None:
    """Variables of a run line are set in its step. An expression in the line would be code from outside."""
    given = {"GITHUB_OUTPUT", "GITHUB_REPOSITORY", "GITHUB_STEP_SUMMARY", "RUNNER_TEMP"}
    given |= {"GITHUB_REF_NAME", "GITHUB_SHA"}
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
    for number, (label, step) in enumerate(every_step()):
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
    for label, step in every_step():
        if match := re.search(r"-m rocm_wheels ([a-z]+)(.*)", step.get("run", "")):
            called[label] = (match[1], re.findall(r"(?<= )--[a-z-]+", match[2]))
    assert len(called) >= 8
    for label, (verb, options) in called.items():
        assert verb in known, f"{label}: no verb {verb}"
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        text = capsys.readouterr().out
        for option in options:
            assert re.search(rf"{option}\b", text), f"{label}: {verb} has no {option}"


def test_a_pipe_fails_with_its_first_command() -> None:
    """GitHub's default bash has no pipefail unless a step names bash."""
    for name, key, job in jobs():
        default = job.get("defaults", {}).get("run", {}).get("shell")
        for step in job.get("steps", []):
            if re.search(r"[^|]\|[^|]", step.get("run", "")):
                assert step.get("shell", default) == "bash", f"{name}:{key}: {step['name']}"


def test_everything_of_a_release_is_of_its_commit() -> None:
    """Builds, tests and publishing check out the commit of the tag, not the commit of the run."""
    for key, job in load("build.yml")["jobs"].items():
        if key in ("create_release", "update_docs", "trend", "sign"):
            continue
        if "uses" in job:
            assert job["with"]["commit"] == "${{ needs.create_matrix.outputs.commit }}", key
            continue
        (checkout,) = (step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@"))
        source = "needs.create_matrix.outputs.commit"
        if key == "create_matrix":  # passes on the commit that it checks out
            source = "needs.create_release.result == 'success' && needs.create_release.outputs.commit || github.sha"
            assert job["outputs"]["commit"] == f"${{{{ {source} }}}}"
        assert checkout["with"]["ref"] == f"${{{{ {source} }}}}", key
    (checkout, *_) = load("_build_rocm.yml")["jobs"]["build"]["steps"]
    assert checkout["with"]["ref"] == "${{ inputs.commit }}"


def test_artifacts_live_as_long_as_an_approval_may_wait() -> None:
    for label, step in every_step():
        if step.get("uses", "").startswith("actions/upload-artifact@"):
            assert step["with"]["retention-days"] >= 30, label


def test_actionlint_is_pinned() -> None:
    lint = [line for line in (ROOT / "run_tests.sh").read_text().splitlines() if "actionlint@" in line]
    assert lint == ["    go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12"]
