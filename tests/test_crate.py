"""The Rust crate: what its tests compare with is what flash_attn launches now."""

from __future__ import annotations

import os
import subprocess
import sys

from rocm_wheels.paths import FLASH_ATTN_SRC, ROOT

CRATE = ROOT / "candle-flash-rocm"


def test_the_recorded_launches_are_those_of_flash_attn() -> None:
    command = [sys.executable, str(CRATE / "tests" / "record_launches.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(FLASH_ATTN_SRC)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_licence_is_the_repositorys() -> None:
    assert (CRATE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
