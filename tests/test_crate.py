"""The Rust crate: its test data equals what flash_attn launches now, and its calls run on the simulator."""

from __future__ import annotations

import json
import os
import re
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


def test_the_recorded_launches_are_up_to_date() -> None:
    command = [sys.executable, str(CRATE / "tests" / "record_launches.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(FLASH_ATTN_SRC)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_licence_is_the_repositorys() -> None:
    assert (CRATE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def build(*words: str, **variables: str) -> Path:
    """Builds a library with cargo. Raises as `tools.missing` without cargo or AMD's runtime."""
    if shutil.which("cargo") is None:
        tools.missing("no cargo on PATH: install Rust from https://rustup.rs")
    try:
        hip.fetch("6.4")
    except UnavailableError as problem:
        tools.missing(str(problem))
    command = ["cargo", "build", *words, "--message-format", "json"]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=CRATE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    libraries = (message for message in messages if "cdylib" in message.get("target", {}).get("crate_types", ()))
    (result,) = (one for one in libraries if one.get("filenames"))
    return Path(result["filenames"][0])


def run(script: str, library: Path, target: str, directory: Path, *more: str) -> str:
    """The output of a script with the crate's library, run with AMD's runtime on a simulated GPU."""
    command, environment = hip.command("6.4", target, [str(CRATE / "tests" / script), str(library), target, *more])
    output = directory / "output"
    with output.open("w") as file:  # a child that outlives the process would keep a pipe open
        running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            running.wait(timeout=600)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
    text = output.read_text(encoding="utf-8", errors="replace")
    assert running.returncode == 0, text
    return text


@pytest.mark.long
def test_tensors_of_a_rocm_device(tmp_path: Path) -> None:
    """Feature `rocm-device`, with a candle that has a stand-in for the device: candle's autograd, then as above."""
    package = ROOT / "build" / "rocm-candle"
    make = [sys.executable, str(CRATE / "tests" / "rocm_candle" / "make.py"), str(package)]
    subprocess.run(make, check=True)
    manifest = str(package / "Cargo.toml")
    artifacts = os.environ.get("CARGO_TARGET_DIR", str(CRATE / "target"))  # of the crate, most of which are shared
    built = build("--manifest-path", manifest, CARGO_TARGET_DIR=artifacts, CANDLE_FLASH_ROCM_DEVICE="1")
    assert "2 calls on gfx942" in run("resident_calls.py", built, "gfx942", tmp_path)


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, directly or by others, and those that import such modules."""
    while free := {name for name, imports in graph.items() if not imports & (set(graph) - {name})}:
        graph = {name: imports for name, imports in graph.items() if name not in free}
    return sorted(graph)


def test_no_modules_of_the_crate_import_each_other() -> None:
    """store/ takes its table of providers and the trait of kernels from launch/; the other way would be a circle."""
    source = CRATE / "src"
    modules = {path.stem: [path] for path in source.glob("*.rs") if path.stem != "lib"}
    modules |= {path.name: sorted(path.glob("*.rs")) for path in source.iterdir() if path.is_dir()}
    graph = {}
    for name, paths in modules.items():
        lines = "".join(path.read_text(encoding="utf-8") for path in paths).splitlines()
        code = "\n".join(line for line in lines if not line.lstrip().startswith("//"))
        graph[name] = set(re.findall(r"\bcrate::(\w+)", code)) - {name}
    assert circles(graph) == []


def test_no_modules_of_launch_import_each_other() -> None:
    """`use super::{Shape}` takes a type from the module that mod.rs names for it."""
    paths = {path.stem: path for path in (CRATE / "src/launch").glob("*.rs")}
    root = paths.pop("mod").read_text(encoding="utf-8").split("pub mod internals")[0]
    homes = {
        name: module
        for module, names in re.findall(r"use (\w+)::\{?([\w, ]+)\}?;", root)
        for name in re.findall(r"\w+", names)
    }
    graph = {}
    for stem, path in paths.items():
        names = re.findall(
            r"\bsuper::(?:\{([\w, \n]+)\}|(\w+))", path.read_text(encoding="utf-8").split("#[cfg(test)]")[0]
        )
        words = {word for group in names for part in group for word in re.findall(r"\w+", part)}
        assert words <= {*homes, *paths}, stem
        graph[stem] = {homes.get(word, word) for word in words}
    assert len(graph["forward"]) >= 4
    assert circles(graph) == []
