"""Runs the workflows for real, by nektos/act on this machine, against a GitHub of its own on loopback.

    GOBIN=~/bin go install github.com/nektos/act@v0.2.89 && PATH=~/bin:$PATH python tests/act/run.py

A release by hand from an empty repository: create_release, create_matrix, build_kernels, build_wheels_rocm, publish,
update_docs, for one cell with few kernels. It needs act, node, npm, git, and the package indexes.

act runs the steps with its own artifact and cache servers. Actions of GitHub's are replaced by those of this directory,
over the packages @actions/artifact and @actions/cache. A `gh` of this directory verifies attestations. What act cannot
do: permissions, environments and their reviewers, concurrency, Pages, containers without Docker.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import fake_github  # noqa: E402
import fewer_kernels  # noqa: E402
from fake_github import REPOSITORY, TOKEN, Hub  # noqa: E402

TAG = "v0.1.0"
CELL = "2.8.3 3.11 2.5.1 6.2 triton"
TARGET = "gfx1030"
LAST = "update_docs"
# Programs of a run read GitHub's address from a variable that act sets itself: Python sets it again at its start.
_SITE = "import os\nos.environ['GITHUB_API_URL'] = {url!r}\n"
# The check of the crate compiles it several times: here it is packed alone.
_CRATE = """#!/usr/bin/env bash
cd "$(dirname "$0")" && cargo package --locked --allow-dirty --no-verify --quiet
"""
_GH = """#!/usr/bin/env python3
import hashlib, json, os, pathlib, sys
words = sys.argv[1:]
if words[:2] == ["attestation", "verify"]:
    given = dict(zip(words[3:-1:2], words[4:-1:2]))
    digest = hashlib.sha256(pathlib.Path(words[2]).read_bytes()).hexdigest()
    known = [json.loads(line) for line in open(os.environ["ACT_ATTESTATIONS"])]
    workflow = given["--signer-workflow"].split("/", 2)[2]
    wanted = {"digest": digest, "workflow": workflow, "commit": given["--source-digest"]}
    sys.exit(0 if wanted in known else "no matching attestations found")
with open(os.environ["ACT_CALLS"], "a") as calls:
    calls.write(" ".join(words) + "\\n")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--job", default=LAST, help=f"the last job of build.yml to run, with those that it needs ({LAST})"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new directory and keep it")
    arguments = parser.parse_args()
    for tool in ("act", "node", "npm", "git"):
        if shutil.which(tool) is None:
            parser.error(f"there is no {tool} on PATH")
    with tempfile.TemporaryDirectory() as scratch:
        return run(arguments.keep or Path(scratch), arguments.job)


def run(work: Path, job: str) -> int:
    """All runs, in `work`. 0 if the release and the calls of gh are what they should be."""
    work.mkdir(parents=True, exist_ok=True)
    _packages(work)
    checkout = _repository(work / "name")
    commit = _git(checkout, "rev-parse", "HEAD")
    hub = Hub(settings={"": {"default_branch": "main"}})
    with fake_github.serve(hub):
        inputs = {"tag": TAG, "dry-run": "false", "only": CELL, "targets": TARGET}
        status = _act(work, checkout, hub, "build.yml", inputs, job)
    log = (work / "build.log").read_text(encoding="utf-8")
    failed = re.findall(r"\[([^\]]+)\] .*Job failed", log)
    print("\n".join(log.splitlines()[-25:]) if status else "act: every job succeeded")
    for release in hub.releases.values():
        print(f"{release['tag_name']}: {'draft' if release['draft'] else 'public'} at {release['target_commitish']}")
        print("\n".join(f"  {asset['name']}" for asset in release["assets"]))
    calls = (work / "calls").read_text() if (work / "calls").is_file() else ""
    print(f"gh: {calls.strip() or 'nothing was called'}")
    if job != LAST:
        return status
    good = (
        status == 0
        and not failed
        and [release["draft"] for release in hub.releases.values()] == [False]
        and hub.tags == {TAG: commit}
        and "workflow run pages.yml" in calls
    )
    print("as it should be" if good else f"NOT as it should be: {failed}")
    return 0 if good else 1


def _packages(work: Path) -> None:
    """node_modules of the actions, as the lock file has them, outside of the repository."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, work / name)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(command, cwd=work, check=True)


def _repository(path: Path) -> Path:
    """A repository with one commit on the branch main: these files, with fewer kernels to compile."""
    fewer_kernels.copy(path)
    fewer_kernels.narrow(path)
    (path / "candle-flash-rocm/check.sh").write_text(_CRATE)
    _git(path, "init", "--quiet", "--initial-branch", "main")
    _git(path, "remote", "add", "origin", f"https://github.com/{REPOSITORY}.git")
    _git(path, "add", "--all")
    _git(path, "-c", "user.name=act", "-c", "user.email=act@localhost", "commit", "--quiet", "--message", "all")
    return path


def _git(path: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(path), *words], capture_output=True, text=True, check=True).stdout.strip()


def _act(work: Path, checkout: Path, hub: Hub, workflow: str, inputs: dict[str, str], job: str) -> int:
    """One run of a workflow by hand, with its log in build.log."""
    tools = work / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "gh").write_text(_GH)
    (tools / "gh").chmod(0o755)
    (tools / "sitecustomize.py").write_text(_SITE.format(url=hub.url))
    (work / "attestations").touch()
    (work / "artifacts/1").mkdir(parents=True, exist_ok=True)  # of the run: act's server lists none where it is missing
    event = {"inputs": inputs, "repository": {"default_branch": "main"}}
    (work / "event.json").write_text(json.dumps(event))
    command = [
        "act",
        "workflow_dispatch",
        "--workflows",
        f".github/workflows/{workflow}",
        "--no-recurse",
        "--no-skip-checkout",
    ]
    command += ["--eventpath", str(work / "event.json"), "--defaultbranch", "main", "--actor", "owner"]
    command += [word for runner in ("ubuntu-22.04", "ubuntu-24.04") for word in ("-P", f"{runner}=-self-hosted")]
    command += [
        word for used, local in _actions(checkout).items() for word in ("--local-repository", f"{used}={local}")
    ]
    command += ["--artifact-server-path", str(work / "artifacts"), "--artifact-server-addr", "127.0.0.1"]
    command += ["--cache-server-path", str(work / "caches"), "--cache-server-addr", "127.0.0.1"]
    command += ["--secret", f"GITHUB_TOKEN={TOKEN}", "--concurrent-jobs", "1"]
    command += [word for name, value in inputs.items() for word in ("--input", f"{name}={value}")]
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(tools),
        "NODE_PATH": str(work / "node_modules"),
        "ACT_REPOSITORY": str(checkout),
        "ACT_ATTESTATIONS": str(work / "attestations"),
        "ACT_CALLS": str(work / "calls"),
    }
    command += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    command += ["--job", job]
    with (work / "build.log").open("w", encoding="utf-8") as log:
        return subprocess.run(command, cwd=checkout, stdout=log, stderr=subprocess.STDOUT, check=False).returncode


def _actions(checkout: Path) -> dict[str, Path]:
    """Each action that a workflow uses -> the directory of its stand-in, where there is one."""
    found = {}
    for workflow in sorted((checkout / ".github/workflows").glob("*.yml")):
        for owner, name, commit in re.findall(r"uses: ([\w-]+)/([\w-]+)[^@\s]*@([0-9a-f]{40})", workflow.read_text()):
            if (local := HERE / "actions" / name).is_dir():
                found[f"{owner}/{name}@{commit}"] = local
    return found


if __name__ == "__main__":
    sys.exit(main())
