"""Checks that this repository's workflows built the wheels and the crate at the release's commit.

GitHub signs an attestation of the run that builds and tests them. `gh attestation verify` checks it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from rocm_wheels.errors import MissingTool, PublishFailed
from rocm_wheels.matrix import names

_SECONDS = 120


def check(dist: Path, *, repository: str, commit: str, workflow: str, crate_workflow: str | None = None) -> list[str]:
    """The names of the wheels and the crate in `dist`. Raises PublishFailed, with gh's message, for a file without
    attestation.

    The wheels must be signed by the workflow file `workflow` and the crate by `crate_workflow`, on a runner that GitHub
    hosts. Kernel stores are members of the wheels (publish/parts.py), and a wheel without its label is derived from the
    wheel with it (publish/assets.py).
    """
    crates = sorted(dist.glob("*.crate"))
    if crates and crate_workflow is None:
        raise PublishFailed(
            f"nothing says who built {crates[0].name}",
            remedy="Give --crate-attested-by .github/workflows/build.yml, or move the crate away.",
        )
    wheels = sorted(path for path in dist.glob("*.whl") if not names.is_unlabelled(path.name))
    wanted = [(path, workflow) for path in wheels]
    wanted += [(path, str(crate_workflow)) for path in crates]
    for path, signer in wanted:
        _verify(path, repository=repository, commit=commit, workflow=signer)
    return [path.name for path, _ in wanted]


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
