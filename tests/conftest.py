"""Fixtures that several test modules share."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import c_make
import fake_github
import fewer_kernels
import kills
import publishing
import pytest
import tools
import torch
import wine

from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.versions import Versions, load
from rocm_wheels.publish import github
from rocm_wheels.wheel import launcher

ROOT = Path(__file__).resolve().parent.parent

# Import the package itself before a test of the compile stage replaces it by a bare package.
sys.path.append(str(ROOT / "flash_attn_src"))
import flash_attn  # noqa: E402, F401


@pytest.fixture(scope="session")
def data() -> Versions:
    """The versions.toml of this repository."""
    return load()


@pytest.fixture(scope="session")
def cell() -> Cell:
    """The combination of the README."""
    return Cell(flash_attn="2.8.3", python="3.11", torch="2.5.1", rocm="6.2", backend="triton")


@pytest.fixture(scope="session")
def c_library() -> Path:
    """`libflash_attn_rocm.so`, with the examples beside it, made by make. Processes of tests run it in turn."""
    if shutil.which("cargo") is None:
        tools.missing("no cargo on PATH: install Rust from https://rustup.rs")
    folder = c_make.FOLDER / "build"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        c_make.make("all", "examples")
    return folder / "libflash_attn_rocm.so"


@pytest.fixture(scope="session")
def windows_launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher for Windows of flash-attn 2.8.3. It is compiled once for all processes, and kept."""
    return launcher.build_for_windows(tmp_path_factory.mktemp("windows"), version="2.8.3", cache=wine.CACHE)


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache of launchers. Its compiler does not make its C library again."""
    cache = tmp_path_factory.mktemp("cache")
    (wine.CACHE / "zig").mkdir(parents=True, exist_ok=True)
    (cache / "zig").symlink_to(wine.CACHE / "zig")
    return cache


@pytest.fixture(scope="session")
def stub_hip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HIP runtime whose GPU is a gfx942 that computes nothing. A process opens one HIP runtime."""
    library = tmp_path_factory.mktemp("stub") / "libstub_hip.so"
    source = ROOT / "candle-flash-rocm/tests/stub_hip.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Removes the variables that a build reads, hides GPUs, and sets an empty cache."""
    for name in (
        *("PYTORCH_ROCM_ARCH", "GPU_ARCHS", "MAX_JOBS"),
        *("BUILD_TRITON_BACKEND", "FLASH_ATTENTION_TRITON_AMD_ENABLE", "SOURCE_DATE_EPOCH"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROCM_WHEELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rocm_wheels.matrix.machine.detect_targets", lambda: ())


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the Triton kernels of gfx1030 in a few sizes. They are compiled once for all processes and tests
    that build wheels. The kernels of gfx942 would take twice the time.
    """
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "kernel-cache"
    cache.mkdir(exist_ok=True)
    tree = cache / "repository"
    command = [sys.executable, "-m", "rocm_wheels", "compile", "--target", "gfx1030", "--cache", str(cache)]
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.is_dir():
            fewer_kernels.copy(tree)
            fewer_kernels.narrow(tree)
        subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL, check=True)
    return cache


@pytest.fixture(scope="session")
def kernel_store(kernel_cache: Path) -> Path:
    """The store of the Triton kernels of gfx1030, which every wheel for that target contains."""
    (path,) = kernel_cache.glob("stores/*/gfx1030.zip")
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs torch with one thread: waiting threads are slow while other tests run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def wheel_script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a file of wheel_tests for one test."""

    def imported(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "wheel_tests" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return imported


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with three wheels, their test reports and a kernel store."""
    return kills.make_dist(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_github.Hub]:
    """A stand-in for GitHub, named in the environment, with waits that are short enough for a test."""
    monkeypatch.setattr(github, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(github, "TIMEOUT_SECONDS", (5.0, 0.25))
    with fake_github.serve(fake_github.Hub()) as served:
        for name, value in publishing.environment(served).items():
            monkeypatch.setenv(name, value)
        yield served


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew, to be read and committed")


def pytest_configure(config: pytest.Config) -> None:
    fewer_kernels.every_operation = config.option.markexpr == "long"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts tests that compile for minutes first, and then tests that wait for installers, because other tests run in
    parallel. Files that would otherwise run last, alone and for minutes, come early too. test_c_library.py builds what
    test_c_differential.py beside it would wait for.
    """
    first = ("test_c_library.py", "test_pipeline.py", "test_triton_backend.py", "test_triton_varlen.py")
    items.sort(key=lambda item: item.path.name not in first)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: Python takes a second each time that it looks through it."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After a run with --durations: the files that took longest, with seconds and tests."""
    if not terminalreporter.config.getoption("durations"):
        return
    seconds, tests = Counter[str](), Counter[str]()
    for report in (one for some in terminalreporter.stats.values() for one in some if hasattr(one, "duration")):
        file = report.nodeid.partition("::")[0]
        seconds[file] += report.duration
        tests[file] += report.when == "call"
    terminalreporter.section("slowest files")
    for file, spent in seconds.most_common(60):
        terminalreporter.write_line(f"{spent:7.1f} s {tests[file]:5d} {file}")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of that name in tests/golden."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path} differs: pytest --update-golden, then read the diff"

    return compare
