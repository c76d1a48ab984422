"""Checks that this repository's workflows built the wheels and the crate at the release's commit.

A job of its own signs them, after the jobs that build and test. `gh attestation verify` checks the attestation.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from rocm_wheels.errors import MissingTool, PublishFailed
from rocm_wheels.matrix import names

_SECONDS = 120


def check(dist: Path, *, repository: str, commit: str, workflow: str) -> list[str]:
    """The names of the wheels and the crate in `dist`. Raises PublishFailed, with gh's message, for a file without
    attestation.

    They must be signed by the workflow file `workflow`, on a runner that GitHub hosts. Kernel stores are members of the
    wheels (publish/parts.py), and a wheel without its label is derived from the wheel with it (publish/assets.py).
    """
    wheels = sorted(path for path in dist.glob("*.whl") if not names.is_unlabelled(path.name))
    signed = [*wheels, *sorted(dist.glob("*.crate"))]
    for path in signed:
        _verify(path, repository=repository, commit=commit, workflow=workflow)
    return [path.name for path in signed]


def _verify(path: Path, *, repository: str, commit: str, workflow: str) -> None:
    """Raises PublishFailed unless gh finds an attestation of the file by that workflow at that commit."""
    command = ["gh", "attestation", "verify", str(path), "--repo", repository]
    command += ["--signer-workflow", f"{repository}/{workflow}", "--source-digest", commit]
    command += ["--deny-self-hosted-runners"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        raise MissingTool(
            "there is no gh on PATH to verify attestations with",
            remedy="Install GitHub's command line, or publish without --attested-by.",
        ) from None
    except subprocess.TimeoutExpired as error:
        raise PublishFailed(
            f"gh did not verify {path.name} within {_SECONDS} s", remedy="Run it again later."
        ) from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise PublishFailed(
            f"{path.name} has no attestation of {workflow} at {commit}: {words[-1] if words else 'gh failed'}",
            remedy="Publish the files that the run of this commit built, byte for byte.",
        )
