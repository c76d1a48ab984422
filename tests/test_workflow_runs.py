"""Which jobs the workflows run, and when: their conditions are evaluated and their steps executed as a runner does."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path

import pytest
from workflows import Expression, Runner, ancestors, base_environment, holds, load, matrix_rows, render


def test_a_pull_request_writes_nothing_and_meets_no_gpu() -> None:
    build = load("build.yml")["jobs"]
    github = {"event_name": "pull_request", "ref": "refs/pull/1/merge", "token": "t", "ref_name": "1/merge"}
    done = {
        need: {"result": "success", "outputs": {"wheels-count": "2", "kernels-count": "4", "windows-count": "1"}}
        for need in build
    } | {name: {"result": "skipped", "outputs": {}} for name in ("create_release", "smoke", "trend")}
    for variables in ({}, {"GPU_RUNNER": "true"}):
        needs = {**done, "publish": {"result": "skipped", "outputs": {}}}
        runs = {}
        for key, job in build.items():
            good = all(needs[before]["result"] == "success" for before in ancestors(build, key))
            status = "success" if good else "failure"
            contexts = {"github": github, "inputs": {}, "vars": variables, "needs": needs, "status": status}
            runs[key] = holds(job.get("if"), contexts)
        assert [key for key, runs_then in runs.items() if runs_then] == [
            "create_matrix",
            "build_kernels",
            "assemble",
            "verify",
            "windows",
            "crate",
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
    results = {"create_release": release, "create_matrix": "success", "verify": wheels, "smoke": smoke}
    for crate in ("success", "failure"):
        for windows, universals in (("success", "8"), ("skipped", "0"), ("skipped", "8"), ("failure", "8")):
            # A run that builds nothing publishes what the draft holds, which was tested before.
            tested = count == "0" or windows == "success" or universals == "0"
            done = {**results, "sign": crate, "windows": windows}
            assert _publishes(done, count, variable, universals) is (published and crate == "success" and tested)


def _publishes(results: dict[str, str], count: str, variable: str, universals: str) -> bool:
    outputs = {"wheels-count": count, "windows-count": universals}
    contexts = {
        "needs": {
            name: {"result": result, "outputs": outputs if name == "create_matrix" else {}}
            for name, result in results.items()
        },
        "vars": {"GPU_RUNNER": variable},
        "github": {"event_name": "push"},
        "inputs": {},
        "status": "success",
    }
    return holds(load("build.yml")["jobs"]["publish"]["if"], contexts)


def test_a_release_waits_for_one_approval() -> None:
    """In the job that makes it public. Later jobs change none of its files."""
    jobs = load("build.yml")["jobs"]
    assert [key for key, job in jobs.items() if job.get("environment")] == ["publish"]


@pytest.mark.parametrize(("wheels", "built"), [("success", True), ("skipped", False)])
def test_a_run_publishes_what_it_built_or_what_the_draft_holds(wheels: str, built: bool) -> None:
    contexts = {
        "needs": {
            "verify": {"result": wheels},
            "create_matrix": {"outputs": {"wheels-count": "36" if built else "0"}},
        },
        "status": "success",
    }
    conditions = {step["name"]: step.get("if") for step in load("build.yml")["jobs"]["publish"]["steps"]}
    assert holds(conditions["Download the wheels"], contexts) is built
    assert holds(conditions["Download the assets of the release"], contexts) is not built


def test_one_gpu_job_takes_all_contents_and_a_sample() -> None:
    """Its wheels are the universal wheels and the oldest and newest combination of each backend."""
    rows = matrix_rows()
    (row,) = rows["gpu"]
    backends = {wheel["wheels"]: wheel["backend"] for wheel in rows["wheels"]}
    chosen = [each for each in backends if each in row["wheels"]]
    assert ";".join(chosen) != row["wheels"], "universal wheels first"
    assert sorted(backends[each] for each in chosen) == [*[""] * 8, "ck", "ck", "triton", "triton"]
    assert sum(map(len, chosen)) + len(chosen) - 1 == len(row["wheels"])
    smoke = load("build.yml")["jobs"]["smoke"]
    assert [
        step["run"].split(" -m rocm_wheels ")[1] for step in smoke["steps"] if "-m rocm_wheels" in step.get("run", "")
    ] == [
        'merge build/artifacts dist --only "$WHEELS"',
        "verify --require-gpu --cache build/cache dist/flash_attn-*manylinux*.whl",
    ]
    assert row["gpu-timeout-minutes"] < 360


def test_the_universal_wheels_alone_are_built_through_cibuildwheel(tmp_path: Path) -> None:
    (tmp_path / "build_rocm.sh").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "build_rocm.sh").chmod(0o755)
    (step,) = (
        step for step in load("_build_rocm.yml")["jobs"]["build"]["steps"] if step["name"] == "Build, repair, verify"
    )
    for row in matrix_rows()["wheels"]:
        contexts = {"inputs": {**row, "build-triton-backend": False}}
        env = {name: str(render(text, contexts)) for name, text in step["env"].items()}
        done = subprocess.run(
            ["bash", "-euc", step["run"]], cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        cell = [row["python-version"], row["torch-version"], row["rocm-version"], "--backend", row["backend"]]
        universal = ["--platform", "all", "--cibuildwheel"]
        assert done.stdout.split() == [
            row["flash-attn-version"], *(cell if row["backend"] else universal),
            "--packages", "--cache", "build/cache", "--cached-kernels",
        ]  # fmt: skip


def test_a_newer_push_to_a_pull_request_cancels_the_jobs_of_the_push_before() -> None:
    lock = load("build.yml")["jobs"]["build_kernels"]["concurrency"]
    assert lock["cancel-in-progress"] is True

    def group(event: str, number: str, row: str) -> object:
        github = {"event_name": event, "ref": "refs/pull/7/merge", "run_id": number}
        return render(lock["group"], {"github": github, "matrix": {"name": row}})

    assert group("pull_request", "1", "a") == group("pull_request", "2", "a") != group("pull_request", "2", "b")
    assert group("push", "1", "a") != group("push", "2", "a")


@pytest.mark.parametrize(
    ("event", "inputs", "only", "targets"),
    [
        ("push", {}, "2.8.3 universal", "gfx942"),
        ("workflow_dispatch", {"only": "", "targets": ""}, "2.8.3 universal", "gfx942"),
        ("workflow_dispatch", {"only": "2.6.3 *", "targets": "gfx90a"}, "2.6.3 *", "gfx90a"),
        ("pull_request", {}, "*", ""),
    ],
)
def test_a_fork_says_once_what_it_builds(event: str, inputs: dict[str, str], only: str, targets: str) -> None:
    """By two variables, so that the push of a tag starts no run for everything."""
    variables = {"RELEASE_ONLY": "2.8.3 universal", "RELEASE_TARGETS": "gfx942"}
    contexts = {"github": {"event_name": event, "ref_name": "v1.2.3"}, "inputs": inputs, "vars": variables}
    env = render(load("build.yml")["env"], contexts)
    assert (env["ONLY"], env["TARGETS"]) == (only, targets)
    env = render(load("build.yml")["env"], {**contexts, "vars": {}})
    assert (env["ONLY"], env["TARGETS"]) == (inputs.get("only") or "*", inputs.get("targets") or "")


def test_a_failed_report_of_a_gpu_is_no_artifact_of_the_report_that_is_published() -> None:
    steps = load("build.yml")["jobs"]["smoke"]["steps"]
    (upload,) = [step for step in steps if step["name"] == "Upload the test reports"]
    names = {
        status: render(upload["with"]["name"], {"job": {"status": status}, "github": {"run_attempt": "2"}})
        for status in ("success", "failure")
    }
    assert names == {"success": "gpu-verdicts", "failure": "failed-gpu-verdicts-2"}
    expected = [step["with"]["name"] for step in load("build.yml")["jobs"]["publish"]["steps"] if "GPU" in step["name"]
              and "with" in step]  # fmt: skip
    assert expected == ["gpu-verdicts"]


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


@pytest.mark.parametrize(("known", "started"), [("c0ffee", False), ("beef", True)])
def test_a_nightly_candidate_goes_after_a_week_and_a_commit_has_one(tmp_path: Path, known: str, started: bool) -> None:
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    tags = {days: f"nightly-{today - datetime.timedelta(days=days):%Y%m%d}" for days in (0, 6, 8, 400)}
    (tmp_path / "gh").write_text(
        f"#!/bin/sh\ncase $2 in list) printf '%s\\n' v1.2.3 {' '.join(tags.values())} ;;\n"
        f'repos/owner/name/*) echo {known} ;;\n*) echo RAN "$@" ;; esac\n'
    )
    (tmp_path / "gh").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_SHA": "c0ffee", "GITHUB_REF_NAME": "main"}
    runner = Runner(
        workspace=tmp_path, storage=tmp_path / "storage", caches=tmp_path / "caches", github={}, environment=variables
    )
    contexts = {"env": {}, "inputs": {}, "github": {"repository": "owner/name", "token": "t"}}
    done = runner._steps("x", load("nightly.yml")["jobs"]["start"], contexts)
    assert done.result == "success", done.log
    ran = [line.removeprefix("RAN ") for line in done.log.splitlines() if line.startswith("RAN ")]
    assert ran == [
        *(f"release delete --yes --cleanup-tag {tags[days]}" for days in (8, 400)),
        *[f"workflow run build.yml --ref main -f tag={tags[0]} -f dry-run=false"] * started,
    ]


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
    row = {"include": [matrix_rows()["wheels"][-1]]}
    for given in ("", json.dumps(row)):
        needs = {"newest": {"result": "skipped" if given else "success", "outputs": {"row": json.dumps(row)}}}
        contexts = {"inputs": {"row": given}, "vars": {"GPU_RUNNER": "true"}, "needs": needs, "status": "success"}
        assert holds(workflow["jobs"]["newest"]["if"], contexts) is (given == "")
        assert holds(measure["if"], contexts)
        assert render(measure["strategy"]["matrix"], contexts) == row
        steps = {step["name"]: holds(step["if"], contexts) for step in measure["steps"] if "if" in step}
        assert steps == {
            "Download the wheel": given != "",
            "Build the wheel": given == "",
            "Take the wheel out of its artifact": given != "",
        }
    contexts["vars"] = {}
    assert not holds(measure["if"], contexts)
    (build,) = (step for step in measure["steps"] if step["name"] == "Build the wheel")
    # The image of the job sets PYTORCH_ROCM_ARCH itself.
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
    """Tests the runner itself: after a failure only steps that request it run, such as saving kernels of a killed
    compilation.
    """
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
    compile_, keep = (job["steps"][names.index(name)] for name in ("Compile", "Save the kernel cache, complete or not"))
    assert keep["if"] == "always()"
    assert names.index("Save the kernel cache, complete or not") == names.index("Compile") + 1
    for row in matrix_rows()["kernels"]:
        contexts = {"matrix": row}
        assert render(compile_["timeout-minutes"], contexts) < render(job["timeout-minutes"], contexts) <= 360
