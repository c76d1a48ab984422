"""The stand-ins of GitHub's actions, and the workflow steps that pass artifacts on: one artifact or several."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import actions
import pytest
from workflows import ROOT, WORKFLOWS, Runner, load

NOTES = ROOT / "docs/notes/actions.md"
# Inputs of a download -> the content of `path` afterwards, by the source of the pinned action.
DOWNLOADS = {
    "several of a pattern": ({"pattern": "w-*"}, ["w-1/a", "w-2/b"]),
    "a single match": ({"pattern": "w-1"}, ["a"]),
    "a single match of a glob": ({"pattern": "*-2"}, ["b"]),
    "merged": ({"pattern": "w-*", "merge-multiple": True}, ["a", "b"]),
    "by name": ({"name": "w-2"}, ["b"]),
    "a name is above a pattern": ({"name": "w-2", "pattern": "w-*"}, ["b"]),
    "no match": ({"pattern": "x-*"}, []),
    "all": ({}, ["other/c", "w-1/a", "w-2/b"]),
}


def tree(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def make(directory: Path, *files: str) -> Path:
    for name in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    return directory


@pytest.mark.parametrize(("inputs", "files"), DOWNLOADS.values(), ids=DOWNLOADS)
def test_a_download(tmp_path: Path, inputs: dict[str, Any], files: list[str]) -> None:
    store = make(tmp_path / "store", "w-1/a", "w-2/b", "other/c")
    actions.download({**inputs, "path": "to"}, tmp_path, store)
    assert tree(tmp_path / "to") == files
    with pytest.raises(actions.ActionFailed, match="not found"):
        actions.download({"name": "w-3"}, tmp_path, store)


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("dist", ["a.whl", "deep/b"]),
        ("dist/*.whl", ["a.whl"]),
        ("dist/a.whl", ["a.whl"]),
        ("one.json", ["one.json"]),
        ("dist/a.whl\none.json", ["dist/a.whl", "one.json"]),
        ("dist/deep\ndist/a.whl", ["a.whl", "deep/b"]),
        ("dist\ndist/deep", ["a.whl", "deep/b"]),
        ("link", ["b"]),
        ("d*/deep", ["dist/deep/b"]),
    ],
)
def test_an_upload(tmp_path: Path, path: str, files: list[str]) -> None:
    """Hidden files, empty directories and modes are lost. A link is followed."""
    make(tmp_path, "dist/a.whl", "dist/deep/b", "dist/.hidden", "dist/.git/x", "one.json")
    (tmp_path / "dist/empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "dist/deep")
    actions.upload({"name": "x", "path": path}, tmp_path, tmp_path / "store")
    assert tree(tmp_path / "store/x") == files


def test_an_upload_that_fails(tmp_path: Path) -> None:
    make(tmp_path, "a", "b:c")
    good = {"name": "x", "path": "a", "if-no-files-found": "error"}
    actions.upload(good, tmp_path, tmp_path / "store")
    for change in ({}, {"name": "a/b"}, {"name": ""}, {"path": "none"}, {"name": "y", "path": "b:c"}):
        with pytest.raises(actions.ActionFailed):
            actions.upload({**good, **change}, tmp_path, tmp_path / "store")
    actions.upload({**good, "overwrite": True, "retention-days": 30}, tmp_path, tmp_path / "store")
    with pytest.raises(actions.ActionFailed, match="retention"):
        actions.upload({**good, "name": "z", "retention-days": 91}, tmp_path, tmp_path / "store")


@pytest.mark.parametrize("keys", [{"key": "a,b"}, {"key": "k" * 513}, {"key": "a-1", "restore-keys": "b-\n"}])
def test_a_cache_key_that_is_refused(keys: dict[str, str]) -> None:
    with pytest.raises(actions.ActionFailed):
        actions.check_keys(keys)
    actions.check_keys({"key": "a-b-1", "restore-keys": "a-b-\na-\n"})


UPLOADS = {
    "kernels": ("build.yml", "build_kernels", "build/cache/kernels"),
    "wheels": ("_build_rocm.yml", "build", "dist"),
}
CONSUMERS = {
    "a version takes its kernels": ("build.yml", "assemble", "kernels", "build/cache/kernels"),
    "a wheel takes its kernels": ("_build_rocm.yml", "build", "kernels", "build/cache/kernels"),
    "the GPU job": ("build.yml", "smoke", "wheels", "dist"),
    "a rehearsal": ("build.yml", "rehearse", "wheels", "dist"),
    "publishing": ("build.yml", "publish", "wheels", "dist"),
    "the trend": ("trend.yml", "measure", "wheels", "dist"),
}


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """A runner whose workspace has the interpreters that the steps name."""
    workspace = tmp_path / "work"
    for name in (*(f"build/env{group}/bin/python" for group in ("", "-release", "-cibuildwheel")), "bin/python3"):
        path = make(workspace, name) / name
        path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
        path.chmod(0o755)
    environment = {"PATH": f"{workspace / 'bin'}:{os.environ['PATH']}"}
    return Runner(
        workspace=workspace, storage=tmp_path / "s", caches=tmp_path / "c", github={}, environment=environment
    )


def steps(workflow: str, job: str, *names: str) -> dict[str, Any]:
    """A job with only the steps whose names start with these texts."""
    chosen = [step for step in load(workflow)["jobs"][job]["steps"] if step["name"].startswith(names)]
    return {"steps": [{name: value for name, value in step.items() if name != "if"} for step in chosen]}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_one_artifact_arrives_as_several_do(runner: Runner, consumer: str, count: int) -> None:
    """From the steps that upload to the steps that merge, as in the workflows."""
    workflow, job, kind, target = CONSUMERS[consumer]
    files = [f"ab/{kind}-{number}.co" if kind == "kernels" else f"{kind}-{number}.whl" for number in range(count)]
    uploading, uploader, directory = UPLOADS[kind]
    for number, file in enumerate(files):
        make(runner.workspace / directory, file, "same")
        shutil.rmtree(runner.workspace / "build/upload", ignore_errors=True)
        name = f"{kind}-{number}"
        contexts = {"env": {"ARTIFACT": name}, "matrix": {"artifact": name}, "inputs": {"is-upload": True}}
        done = runner._steps("upload", steps(uploading, uploader, "Name the directory", "Upload"), contexts)
        assert done.result == "success", done.log
    shutil.rmtree(runner.workspace / "build/upload")
    contexts = {
        "env": {},
        "inputs": {"kernels": f"{kind}-*", "row": "x"},
        "matrix": {"wheels": "same;*.whl"},
        "needs": {"create_matrix": {"outputs": {"artifacts-count": str(count)}}},
    }
    names = ("Download the wheel", "Download the kernels", "Merge the", "Take the wheel")
    done = runner._steps("merge", steps(workflow, job, *names), contexts)
    assert done.result == "success", done.log
    assert tree(runner.workspace / target) == sorted([*files, "same"])


def test_an_artifact_that_expired_is_missed(runner: Runner) -> None:
    """A re-run weeks later downloads nothing, and must not publish an empty result."""
    (runner.storage / "artifacts").mkdir(parents=True)
    contexts = {"env": {}, "needs": {"create_matrix": {"outputs": {"artifacts-count": "2"}}}}
    for job in ("publish", "rehearse"):
        done = runner._steps("x", steps("build.yml", job, "Download the wheels", "Merge the"), contexts)
        assert done.result == "failure"
        assert "holds 0 artifacts, 2 were built" in done.log


def test_the_notes_name_every_action_at_its_version() -> None:
    """Read a newer version before using it: docs/notes/actions.md has its assumptions in a table."""
    text = NOTES.read_text(encoding="utf-8")
    used = {
        match
        for path in WORKFLOWS.glob("*.yml")
        for match in re.findall(r"uses: ([\w-]+/[\w-]+)\S*@([0-9a-f]{40}) # v(\d+\.\d+\.\d+)", path.read_text())
    }
    assert used
    for action, commit, version in used:
        assert f"| `{action}` | {version} | `{commit[:12]}` |" in text, f"{action}: read its source, then add its row"
