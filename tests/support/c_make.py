"""Runs make in libflash_attn_rocm."""

from __future__ import annotations

import os
import subprocess

from rocm_wheels.paths import ROOT

FOLDER = ROOT / "libflash_attn_rocm"
# The profile and the directory of the crate's check, which has compiled the dependencies.
_DEV = ("PROFILE=dev", f"CARGO_TARGET_DIR={os.environ.get('CARGO_TARGET_DIR', ROOT / 'candle-flash-rocm/target')}")


def make(*words: str, dev: bool = True) -> None:
    """dev: False compiles as a user does, with optimisation at link time, which takes minutes."""
    command = ["make", "--silent", "-C", str(FOLDER), *(_DEV if dev else ()), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
