"""Runs a sample of flash-attn's own tests on the installed flash_attn and the GPU here.

    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip download --no-deps --no-build-isolation --no-binary :all: flash-attn==2.8.3
    python wheel_tests/upstream.py flash_attn-2.8.3.tar.gz [--cases 50] [--fa3]

Exit code 0: all passed; 1: some failed, and which; 2: nothing could be run. The archive is flash-attn's source
distribution. Its tests have half a million cases: of each function so many are drawn, others with another --seed.
They want pytest and einops.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import math
import multiprocessing
import random
import re
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = ("tests/test_flash_attn.py", "tests/test_rotary.py")
# S_dmask is laid out as the backend that filled it does.
OF_BACKEND = {"ck": "tests/test_flash_attn_ck.py", "triton": "tests/test_flash_attn_triton_amd.py"}
OF_FA3 = "hopper/test_flash_attn.py"
# Tests of what is upstream's alone: how often a kernel of its name was compiled, the schema of its FA3 extension.
LEFT_OUT = ("test_compilation_count", "test_flash3_bw_compatibility")
_TESTS = re.compile(r"[^/]+/(tests/\w+|hopper/(test_\w+|padding))\.py")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One test function: how many of its cases passed or were skipped by the test, and what failed."""

    test: str
    passed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()


def unpack(archive: Path, directory: Path) -> Path:
    """The tests of a source distribution, below the directory that is returned, without the modules that they test."""
    with tarfile.open(archive) as content:
        wanted = [member for member in content if _TESTS.fullmatch(member.name)]
        if not wanted:
            raise ValueError(f"{archive} holds no tests/*.py: give flash-attn's source distribution")
        content.extractall(directory, wanted, filter="data")
    return directory / wanted[0].name.split("/")[0]


def load(path: Path) -> Any:
    """A file of tests as a module; what it imports from beside it is found."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"upstream_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(function: Callable[..., None], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Different cases of a parametrized test, at random."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            axes.append((names, [value if len(names) > 1 else (value,) for value in mark.args[1]]))
    generator = random.Random(f"{seed} {function.__name__}")
    total = math.prod(len(values) for _, values in axes)
    for index in generator.sample(range(total), min(count, total)):
        case = {}
        for names, values in axes:
            index, place = divmod(index, len(values))
            case.update(zip(names, values[place], strict=True))
        yield case


def run(path: Path, name: str, count: int, seed: int, seconds: float) -> Outcome:
    """Some cases of one test function, begun within so many seconds."""
    import pytest

    warnings.simplefilter("ignore")
    stop = time.monotonic() + seconds
    test, passed, skipped, failures = f"{path.parent.name}/{path.name}::{name}", 0, 0, []
    try:
        function = getattr(load(path), name)
    except Exception as error:
        return Outcome(test=test, failures=(f"it cannot be imported: {type(error).__name__}: {error}",))
    if any(mark.name == "skip" for mark in getattr(function, "pytestmark", [])):
        return Outcome(test=test, skipped=1)
    for case in draw(function, count, seed):
        if time.monotonic() > stop:
            break
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                function(**case)
            passed += 1
        except pytest.skip.Exception:
            skipped += 1
        except Exception as error:
            line = next((each for each in reversed(traceback.extract_tb(error.__traceback__))
                         if each.filename == str(path)), None)  # fmt: skip
            where = f"line {line.lineno}: {line.line}" if line is not None else ""
            failures.append(f"{case}: {type(error).__name__}: {str(error)[:200]} {where}")
    return Outcome(test=test, passed=passed, skipped=skipped, failures=tuple(failures))


def names(path: Path) -> list[str]:
    """The test functions of a file, which is not imported for it."""
    return [name for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
            if name not in LEFT_OUT]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="flash_attn-2.8.3.tar.gz")
    parser.add_argument("--cases", type=int, default=50, help="of each test function (50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="that a function may begin cases for (120)")
    parser.add_argument("--jobs", type=int, default=4, help="processes on the one GPU (4)")
    parser.add_argument("--fa3", action="store_true", help="FlashAttention-3's tests too; wants flash-attn-3")
    options = parser.parse_args(argv)
    wanted = {name: name for name in ("torch", "pytest", "einops")} | {"flash_attn": "the wheel"}
    if options.fa3:
        wanted["flash_attn_interface"] = "the wheel of flash-attn-3"
    for module, package in wanted.items():
        if importlib.util.find_spec(module) is None:
            print(f"error: {module} is not installed in {sys.executable}; pip install {package}", file=sys.stderr)
            return 2
    import flash_attn
    import torch

    if not torch.cuda.is_available():
        print("error: these tests want a GPU, and torch sees none", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        try:
            root = unpack(options.archive, Path(directory))
        except (OSError, tarfile.TarError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        backend = flash_attn.backend_info()["gpu_backend"]
        files = [root / file for file in (*FILES, OF_BACKEND[backend], *([OF_FA3] if options.fa3 else []))]
        jobs = [(file, name, options.cases, options.seed, options.seconds) for file in files for name in names(file)]
        print(f"flash_attn {flash_attn.__version__} ({backend}) on {torch.cuda.get_device_name()}: {len(jobs)} tests")
        outcomes = []
        # A process for each test: what one does to the GPU is no other's trouble.
        with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
            for pending in [pool.apply_async(run, job) for job in jobs]:
                outcome = pending.get()
                outcomes.append(outcome)
                failed = f", {len(outcome.failures)} FAILED" if outcome.failures else ""
                print(f"  {outcome.test}: {outcome.passed} passed, {outcome.skipped} skipped{failed}", flush=True)
                for failure in outcome.failures[:3]:
                    print(f"      {failure}")
    passed, failed = sum(each.passed for each in outcomes), sum(len(each.failures) for each in outcomes)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
