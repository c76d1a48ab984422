"""Publishing asks `gh` whether the workflow built each wheel, and sends nothing if it did not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import fake_parts
import pytest
import wheelhouse
from fake_github import Hub
from publishing import arguments, state, write_plan
from wheelhouse import COMMIT

from rocm_wheels import cli
from rocm_wheels.errors import MissingTool, PublishFailed
from rocm_wheels.publish import attestation

WORKFLOW = ".github/workflows/build.yml"
# A stand-in for gh that reads its attestations from a file: sha256 of a wheel -> workflow and commit.
GH = """#!{python}
import hashlib, json, pathlib, sys
words = sys.argv[1:]
assert words[:2] == ["attestation", "verify"] and words[3:5] == ["--repo", "owner/name"], words
assert words[-1] == "--deny-self-hosted-runners"
given = dict(zip(words[5:-1:2], words[6:-1:2]))
digest = hashlib.sha256(pathlib.Path(words[2]).read_bytes()).hexdigest()
known = json.loads(pathlib.Path({known!r}).read_text()).get(digest)
if known != [given["--signer-workflow"], given["--source-digest"]]:
    sys.exit("Loaded digest sha256:" + digest + "\\nError: verifying with issuer: no matching attestations found")
"""


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the attestations of the gh on PATH."""
    tools, known = tmp_path / "tools", tmp_path / "attestations.json"
    tools.mkdir()
    (tools / "gh").write_text(GH.format(python=sys.executable, known=str(known)))
    (tools / "gh").chmod(0o755)
    known.write_text("{}")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return known


def attest(known: Path, dist: Path, *, workflow: str = WORKFLOW, commit: str = COMMIT) -> None:
    digests = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in dist.glob("*.whl"))
    known.write_text(json.dumps({digest: [f"owner/name/{workflow}", commit] for digest in digests}))


def test_attested_wheels_are_published(hub: Hub, dist: Path, known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attest(known, dist)
    assert cli.main(arguments(dist, "--attested-by", WORKFLOW)) == 0
    assert f"attested by {WORKFLOW} at {COMMIT}: 3 wheels" in capsys.readouterr().out
    assert state(hub)["draft"] is False


@pytest.mark.parametrize("how", ["never", "by another workflow", "at another commit", "another file"])
def test_wheels_without_attestation_are_not_published(
    hub: Hub, tmp_path: Path, known: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    path = wheelhouse.write(dist, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    if how == "by another workflow":
        attest(known, dist, workflow=".github/workflows/check.yml")
    elif how == "at another commit":
        attest(known, dist, commit="d" * 40)
    elif how == "another file":
        attest(known, dist)
        path.unlink()
        wheelhouse.write(dist, wheelhouse.cell("2.8.3 3.12 2.5.1 6.2"))
    assert cli.main(arguments(dist, "--attested-by", WORKFLOW)) != 0
    assert f"has no attestation of {WORKFLOW} at {COMMIT}: Error: verifying" in capsys.readouterr().err
    assert hub.releases == {}, "nothing is sent, not even a draft is made"


def test_gh_must_be_installed_and_answer(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("gh", 120)

    with monkeypatch.context() as patched:
        patched.setenv("PATH", "/nowhere")
        with pytest.raises(MissingTool, match="there is no gh on PATH"):
            attestation.check(dist, repository="owner/name", commit=COMMIT, workflow=WORKFLOW)
    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(PublishFailed, match="gh did not verify"):
        attestation.check(dist, repository="owner/name", commit=COMMIT, workflow=WORKFLOW)


def test_a_run_of_another_commit_makes_no_draft(
    hub: Hub, dist: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attestations name the commit of the run, so a release is made by a run of its own commit."""
    hub.tags["v1.2.3"] = COMMIT
    monkeypatch.setenv("GITHUB_SHA", "d" * 40)
    assert cli.main(arguments(dist, "--draft-only", "--plan", str(write_plan(tmp_path, dist)))) != 0
    assert "gh workflow run build.yml --ref v1.2.3 -f tag=v1.2.3 -f dry-run=false" in capsys.readouterr().err
    assert hub.releases == {}


def test_test_reports_of_the_gpu_job_replace_the_others(hub: Hub, tmp_path: Path) -> None:
    dist, gpu = tmp_path / "dist", tmp_path / "gpu"
    for directory in (dist, gpu):
        directory.mkdir()
    cell = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
    path = wheelhouse.write(dist, cell)
    verdict = f"{path.name}.verdict.json"
    wheelhouse.write(gpu, cell, device=wheelhouse.MI300X).unlink()
    assert cli.main(arguments(dist, "--verdicts", str(gpu))) == 0
    (asset,) = (each for each in next(iter(hub.releases.values()))["assets"] if each["name"] == verdict)
    assert json.loads(hub.content[asset["id"]])["stages"]["gpu"]["status"] == "passed"
    # An attestation about other bytes is refused. Files that need no attestation are not checked.
    result = json.loads((gpu / verdict).read_text())
    (gpu / verdict).write_text(json.dumps({**result, "sha256": "0" * 64}))
    assert cli.main(arguments(dist, "--verdicts", str(gpu))) != 0
    assert cli.main(arguments(dist, "--verdicts", str(tmp_path / "none"))) == 0


def test_the_crate_is_attested_too(hub: Hub, tmp_path: Path, known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = wheelhouse.write(tmp_path / "dist", wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    dist = wheel.parent
    crate = fake_parts.crate(dist, COMMIT)
    attest(known, dist)
    assert cli.main(arguments(dist, "--attested-by", WORKFLOW)) == PublishFailed.exit_code
    assert f"{crate.name} has no attestation of {WORKFLOW} at {COMMIT}" in capsys.readouterr().err
    assert hub.releases == {}
    digest = hashlib.sha256(crate.read_bytes()).hexdigest()
    attested = json.loads(known.read_text()) | {digest: [f"owner/name/{WORKFLOW}", COMMIT]}
    known.write_text(json.dumps(attested))
    assert cli.main(arguments(dist, "--attested-by", WORKFLOW)) == 0
    assert crate.name in state(hub)["assets"]
