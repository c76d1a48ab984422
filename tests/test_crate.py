"""The Rust crate: what its tests compare with is what flash_attn launches now, and its calls run on the simulator."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tools

from amdgpu_simulator.debian import UnavailableError
from amdgpu_simulator.hip import process as hip
from rocm_wheels.paths import FLASH_ATTN_SRC, ROOT

CRATE = ROOT / "candle-flash-rocm"


def test_the_recorded_launches_are_those_of_flash_attn() -> None:
    command = [sys.executable, str(CRATE / "tests" / "record_launches.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(FLASH_ATTN_SRC)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_licence_is_the_repositorys() -> None:
    assert (CRATE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def library() -> Path:
    """The crate's example `simulated`, a library. Raises what `tools.missing` raises without cargo or AMD's runtime."""
    if shutil.which("cargo") is None:
        tools.missing("no cargo on PATH: install Rust from https://rustup.rs")
    try:
        hip.fetch("6.4")
    except UnavailableError as problem:
        tools.missing(str(problem))
    command = ["cargo", "build", "--locked", "--example", "simulated", "--message-format", "json"]
    done = subprocess.run(command, cwd=CRATE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    (found,) = (one for one in messages if one.get("target", {}).get("name") == "simulated" and one.get("filenames"))
    return Path(found["filenames"][0])


@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx1100"])
def test_calls_from_rust_to_the_packets(library: Path, target: str, tmp_path: Path) -> None:
    """Forward and backward: Rust reads a store, plans, loads and launches by AMD's runtime, the simulator executes."""
    script = [str(CRATE / "tests" / "simulated_calls.py"), str(library), target]
    command, environment = hip.command("6.4", target, script)
    output = tmp_path / "output"
    with output.open("w") as file:  # its children have it too: one that outlives it would hold a pipe open
        running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            running.wait(timeout=600)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
    text = output.read_text(encoding="utf-8", errors="replace")
    assert running.returncode == 0, text
    assert f"3 calls on {target}" in text
