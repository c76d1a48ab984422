"""Runs a sample of flash-attn's own tests on the installed flash_attn and the GPU here.

    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip download --no-deps --no-build-isolation --no-binary :all: flash-attn==2.8.3
    python wheel_tests/upstream.py flash_attn-2.8.3.tar.gz [--cases 50] [--fa3]
    python wheel_tests/upstream.py <checkout of Dao-AILab/flash-attention> [--fa3] [--fa4]

Exit code 0: all passed; 1: some failed, and which; 2: nothing could be run. The tests are those of a source
distribution, or of a checkout, whose tests are newer. They have half a million cases: of each function so many are
drawn, others with another --seed. They want pytest and einops. --cpu runs them without a GPU, slowly.
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
import shutil
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = ("tests/test_flash_attn.py", "tests/test_rotary.py")
# Of a checkout alone.
OF_LAYERS = (
    "tests/ops/test_dropout_layer_norm.py",
    "tests/ops/test_fused_dense.py",
    "tests/ops/triton/test_layer_norm.py",
    "tests/losses/test_cross_entropy.py",
)
# S_dmask is laid out as the backend that filled it does.
OF_BACKEND = {"ck": "tests/test_flash_attn_ck.py", "triton": "tests/test_flash_attn_triton_amd.py"}
OF_FA3 = ("hopper/test_flash_attn.py",)
OF_FA4 = (
    "tests/cute/test_flash_attn.py",
    "tests/cute/test_flash_attn_varlen.py",
    "tests/cute/test_flash_attn_combine.py",
)
# Test functions that are left out, and why.
LEFT_OUT = {
    "test_compilation_count": "counts how often upstream's own kernel is compiled",
    "test_flash3_bw_compatibility": "compares schemas of upstream's extension flash_attn_3",
    "test_splitkv_forwards_explicit_arch": "looks into upstream's cache of compiled kernels",
    "test_flash_attn_bwd_preallocated_outputs": "calls upstream's private functions",
    "test_flash_attn_invalid_head_dim": "wants head dims refused that work here",
    "test_flash_attn_mla_sparse_bwd_sentinel": "gather_kv_indices, which raises here",
    "test_flash_attn_mla_sparse_bwd_sentinel_varlen": "gather_kv_indices, which raises here",
}
SINCE_2_8_4 = (
    "test_flash_attn_varlen_paged_kv_num_splits",
    "test_flash_attn_kvcache_paged_block_table_bounds",
    "test_flash_attn_generator_arg_must_be_none",
)
ON_A_GPU_ALONE = {
    "test_flash_attn_race_condition": "takes the memory of a GPU",
    "test_flash_attn_cluster": "repeats a launch a hundred times",
}
_TESTS = re.compile(
    r"[^/]+/(tests/((cute|ops|ops/triton|losses)/)?\w+|hopper/(test_\w+|padding)|flash_attn/cute/testing)\.py"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One test function: how many of its cases passed or were skipped by the test, and what failed."""

    test: str
    passed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()


def unpack(archive: Path, directory: Path) -> Path:
    """The tests of a checkout or of a source distribution in a directory, without the modules that they test:

    modules next to a test would be imported instead of the installed ones.
    """
    if archive.is_dir():
        if not (archive / FILES[0]).is_file():
            raise ValueError(f"{archive} holds no {FILES[0]}: give a checkout of flash-attn's repository")
        root = directory / "checkout"
        for path in archive.rglob("*.py"):
            place = path.relative_to(archive)
            if _TESTS.fullmatch(f"checkout/{place.as_posix()}"):
                (root / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, root / place)
        return root
    with tarfile.open(archive) as content:
        wanted = [member for member in content if _TESTS.fullmatch(member.name)]
        if not wanted:
            raise ValueError(f"{archive} holds no tests/*.py: give flash-attn's source distribution")
        content.extractall(directory, wanted, filter="data")
    return directory / wanted[0].name.split("/")[0]


def load(path: Path) -> Any:
    """Imports a file of tests as a module. It can import modules next to it."""
    sys.path.insert(0, str(path.parent))
    return load_as(f"upstream_{path.stem}", path)


def load_as(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
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


def is_skipped(function: Callable[..., None]) -> bool:
    """Whether a mark skips the function on this machine."""
    marks = getattr(function, "pytestmark", [])
    return any(mark.name == "skip" or (mark.name == "skipif" and any(mark.args)) for mark in marks)


def run(path: Path, name: str, count: int, seed: int, seconds: float, on_cpu: bool = False) -> Outcome:
    """Some cases of one test function, begun within so many seconds."""
    import pytest

    warnings.simplefilter("ignore")
    test, passed, skipped, failures = f"{path.parent.name}/{path.name}::{name}", 0, 0, []
    with contextlib.ExitStack() as stack:
        try:
            if on_cpu:
                stack.enter_context(importlib.import_module("upstream_cpu").on_cpu())
            if path.parent.name == "cute":
                importlib.import_module("upstream_cute").provide(path.parents[2] / "flash_attn" / "cute" / "testing.py")
            function = getattr(load(path), name)
        except BaseException as error:
            return Outcome(test=test, failures=(f"it cannot be imported: {type(error).__name__}: {error}",))
        if is_skipped(function):
            return Outcome(test=test, skipped=1)
        stop = time.monotonic() + seconds
        for case in draw(function, count, seed):
            if time.monotonic() > stop:
                break
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    function(**case)
                passed += 1
            except (pytest.skip.Exception, pytest.xfail.Exception):
                skipped += 1
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # pytest.fail and sys.exit raise no Exception
                line = next((each for each in reversed(traceback.extract_tb(error.__traceback__))
                             if each.filename == str(path)), None)  # fmt: skip
                where = f"line {line.lineno}: {line.line}" if line is not None else ""
                failures.append(f"{case}: {type(error).__name__}: {str(error)[:200]} {where}")
    return Outcome(test=test, passed=passed, skipped=skipped, failures=tuple(failures))


def _send(pipe: Any, job: tuple[Any, ...]) -> None:
    pipe.send(run(*job))


def run_alone(*job: Any) -> Outcome:
    """Calls `run` in a new process, so that damage to the GPU or to the process affects no other test."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, job))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        name = f"{job[0].parent.name}/{job[0].name}::{job[1]}"
        return Outcome(test=name, failures=(f"its process ended with exit code {process.exitcode}",))
    finally:
        process.join()


def names(path: Path) -> list[str]:
    """The test functions of a file, which is not imported for it."""
    return re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)


def reason_left_out(path: Path, name: str, version: str, on_cpu: bool) -> str | None:
    """The reason why a test function is not run on that version of flash_attn, or None."""
    text = path.read_text(encoding="utf-8")
    if name in LEFT_OUT:
        return LEFT_OUT[name]
    if re.search(r"^\s*(from|import) aiter\b", text, re.M):
        return "its file imports aiter, which has upstream's Triton kernels"
    if name in SINCE_2_8_4 and [int(part) for part in version.split(".")[:3]] < [2, 8, 4]:
        return f"2.8.4 has this, and {version} has not"
    if on_cpu and name in ON_A_GPU_ALONE:
        return ON_A_GPU_ALONE[name]
    (arguments,) = re.findall(rf"^def {name}\(([^)]*)\)", text, re.M)
    return "wants pytest's fixture monkeypatch, for upstream's internals" if "monkeypatch" in arguments else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="flash_attn-2.8.3.tar.gz, or a checkout of flash-attn's repository")
    parser.add_argument("--cases", type=int, default=50, help="of each test function (50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="that a function may begin cases for (120)")
    parser.add_argument("--jobs", type=int, default=4, help="processes on the one GPU (4)")
    parser.add_argument("--fa3", action="store_true", help="FlashAttention-3's tests too; wants flash-attn-3")
    parser.add_argument("--fa4", action="store_true", help="FlashAttention-4's too; wants flash-attn-4 and a checkout")
    parser.add_argument("--cpu", action="store_true", help="on the CPU: tensors that a test puts on a GPU go there")
    parser.add_argument("--only", default="", metavar="REGEX", help="test functions that match, as file.py::test_name")
    options = parser.parse_args(argv)
    wanted = {name: name for name in ("torch", "pytest", "einops")} | {"flash_attn": "the wheel"}
    if options.fa3:
        wanted["flash_attn_interface"] = "the wheel of flash-attn-3"
    if options.fa4:
        wanted["flash_attn.cute"] = "the wheel of flash-attn-4"
    for module, package in wanted.items():
        if importlib.util.find_spec(module) is None:
            print(f"error: {module} is not installed in {sys.executable}; pip install {package}", file=sys.stderr)
            return 2
    import flash_attn
    import torch

    if not torch.cuda.is_available() and not options.cpu:
        print("error: these tests want a GPU, and torch sees none; --cpu runs them without", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        try:
            root = unpack(options.archive, Path(directory))
        except (OSError, tarfile.TarError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        backend = flash_attn.backend_info()["gpu_backend"]
        layers = OF_LAYERS if options.archive.is_dir() else ()
        chosen = (
            *FILES,
            OF_BACKEND[backend],
            *layers,
            *(OF_FA3 if options.fa3 else ()),
            *(OF_FA4 if options.fa4 else ()),
        )
        jobs, left_out = [], []
        for file in chosen:
            path = root / file
            for name in names(path):
                if not re.search(options.only, f"{path.name}::{name}"):
                    continue
                why = reason_left_out(path, name, flash_attn.__version__, options.cpu)
                if why is None:
                    jobs.append((path, name, options.cases, options.seed, options.seconds, options.cpu))
                else:
                    left_out.append(f"  {file}::{name} is left out: {why}")
        where = "the CPU" if options.cpu else torch.cuda.get_device_name()
        print(f"flash_attn {flash_attn.__version__} ({backend}) on {where}: {len(jobs)} tests", *left_out, sep="\n")
        outcomes = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for outcome in pool.map(lambda job: run_alone(*job), jobs):
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
