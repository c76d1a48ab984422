"""The gate of publishing: each wheel was built by the workflow of this repository, from the commit of the release.

GitHub signs an attestation in the job that builds and tests a wheel. `gh attestation verify` checks it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from rocm_wheels.errors import MissingTool, PublishFailed

_SECONDS = 120


def check(dist: Path, *, repository: str, commit: str, workflow: str) -> list[str]:
    """The names of the wheels in `dist`, each attested. PublishFailed, with gh's words, for one that is not.

    `workflow` is the path of the workflow file that must have signed, on a runner that GitHub hosts.
    """
    names = []
    for wheel in sorted(dist.glob("*.whl")):
        command = ["gh", "attestation", "verify", str(wheel), "--repo", repository]
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
                f"gh did not verify {wheel.name} within {_SECONDS} s", remedy="Run it again later."
            ) from error
        if done.returncode != 0:
            words = (done.stderr or done.stdout).strip().splitlines()
            raise PublishFailed(
                f"{wheel.name} has no attestation of {workflow} at {commit}: {words[-1] if words else 'gh failed'}",
                remedy="Publish the files that the run of this commit built, byte for byte.",
            )
        names.append(wheel.name)
    return names
