from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fake_parts
import pytest
import wheelhouse

from rocm_wheels import package_modules, packages
from rocm_wheels.errors import VerifyFailed
from rocm_wheels.matrix import cells, locks, plan, versions
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.publish import directory
from rocm_wheels.wheel import assemble, contents, interpreters, repair, verdict, verify
from rocm_wheels.wheel.combinations import Combination

NAME = "flash_attn-2.8.3+rocm62torch2.5triton-cp311-cp311-manylinux_2_17_x86_64.whl"
FILES = [name for files in verdict.TESTED.values() for name in files]


def _test(file: str, outcome: str = "passed", reason: str = "", **properties: object) -> dict[str, Any]:
    return {
        "name": f"{file}::test_it",
        "file": file,
        "outcome": outcome,
        "seconds": 0.5,
        "reason": reason,
        "properties": properties,
    }


def _report(*tests: dict[str, Any]) -> dict[str, Any]:
    """A report in which the named tests replace a passing test of their file, without a GPU."""
    named = {test["file"] for test in tests}
    gpu = verdict.TESTED[verdict.GPU]
    others = [_test(file) for file in FILES if file not in {*named, *gpu}]
    others += [
        _test(file, "skipped", "the machine that tested it has no AMD or NVIDIA GPU")
        for file in gpu
        if file not in named
    ]
    return {"python": "3.11.7", "torch": "2.5.1+cu124", "devices": [], "tests": [*tests, *others]}


@pytest.fixture
def repaired(tmp_path: Path) -> Path:
    return wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "TORCH_INDEX", "http://127.0.0.1:9/whl")


def _pretend(monkeypatch: pytest.MonkeyPatch, pip: dict[str, Any] | str, uv: dict[str, Any] | str) -> None:
    """Replaces the results of the two environments: a report, or the message of an installer that failed."""

    def give(result: dict[str, Any] | str) -> Any:
        def install(*_: object) -> tuple[float, dict[str, Any]]:
            if isinstance(result, str):
                raise VerifyFailed(result)
            return 1.5, result

        return install

    monkeypatch.setattr(verify, "_with_pip", give(pip))
    monkeypatch.setattr(verify, "_with_uv", give(uv))
    monkeypatch.setattr(interpreters, "find", lambda _: Path(sys.executable))


@pytest.mark.usefixtures("unreachable")
def test_passing_wheel(tmp_path: Path, repaired: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numerics: dict[str, Any] = {"error float32 forward": 2e-7, "error bfloat16 backward": 4e-3}
    _pretend(
        monkeypatch,
        _report(_test("test_numerics_cpu.py", **numerics)),
        _report(_test("test_smoke.py")),
    )
    result = verify.verify(repaired, fake_parts.plan("gfx90a", "gfx942"), tmp_path)
    assert result.ok
    written = json.loads((tmp_path / f"{NAME}.verdict.json").read_text())
    assert written == json.loads(json.dumps(result.as_dict()))
    assert written["ok"] is True
    assert written["sha256"] == hashlib.sha256(repaired.read_bytes()).hexdigest()
    assert written["size"] == repaired.stat().st_size
    assert written["contents"] == contents.read(repaired).contents
    assert written["commit"] == wheelhouse.COMMIT
    assert written["cell"] == {
        "flash_attn": "2.8.3",
        "python": "3.11",
        "torch": "2.5.1",
        "rocm": "6.2",
        "backend": "triton",
    }
    assert written["targets"] == ["gfx90a", "gfx942"]
    assert written["torch_source"] == "PyPI 2.5.1+cu124: the ROCm index could not be reached"
    assert {name: stage["status"] for name, stage in written["stages"].items()} == {
        "repaired": "passed",
        "installed with pip": "passed",
        "installed with uv": "passed",
        "code objects": "passed",
        "import": "passed",
        "cpu numerics": "passed",
        "gpu": "not run: the machine that tested it has no AMD or NVIDIA GPU",
    }
    worst = {"float32 forward": 2e-7, "bfloat16 backward": 4e-3}
    assert written["stages"]["cpu numerics"]["details"]["worst error"] == worst
    summary = result.summary()
    assert "worst error 4.0e-03" in summary
    assert "not run: the machine that tested it has no AMD or NVIDIA GPU" in summary
    skipped = len(verdict.TESTED[verdict.GPU])  # in each of the two environments
    assert f"{2 * (len(FILES) - skipped) + 1} passed, 0 failed, {2 * skipped} skipped" in summary


@pytest.mark.usefixtures("unreachable")
def test_packages_of_a_torch_are_removed_before_the_next_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All torches of the universal wheel, gigabytes each, would fill the disk."""
    data, seen, caches = versions.load(), [], []

    def install(_: object, source: verify.TorchSource, __: object, env: Path) -> tuple[float, dict[str, Any]]:
        env.mkdir(parents=True)
        assert list(env.parent.iterdir()) == [env], "the environment of another torch takes gigabytes too"
        if source.cache is not None:
            caches.append(source.cache)
            source.cache.mkdir(parents=True, exist_ok=True)
            (source.cache / source.requirement).touch()
            seen.append(sorted(kept.name for kept in source.cache.iterdir()))
        return 1.5, _report(_test("test_smoke.py"))

    _pretend(monkeypatch, _report(), _report(_test("test_smoke.py")))
    monkeypatch.setattr(verify, "_with_uv", install)
    monkeypatch.setattr(interpreters, "found", lambda python: {"3.11": "there", "3.12": "there"}.get(python))
    wheels = []
    for name in ("2.7.4", wheelhouse.NEWEST):
        machine, env = Machine(cores=1, available_mib=4096), {"PYTORCH_ROCM_ARCH": "gfx942"}
        made = plan.make_universal_plan(data, flash_attn=name, env=env, machine=machine)
        wheels.append((wheelhouse.write(tmp_path, cells.universal(data, name)), made, ()))
    for result in verify.verify_all(wheels, tmp_path, every=True):
        assert result.ok
        tested = [name for name in result.stages if name.startswith("Python")]
        assert "Python 3.11, torch 2.5.1" in tested
        assert len(wheels) * (len(tested) + 1) == len(seen) > len({*map(tuple, seen)}) > 5
    assert all(len(kept) == 1 for kept in seen)
    downloads = [kept for number, kept in enumerate(seen) if kept != seen[number - 1]]
    assert len(downloads) == len({*map(tuple, seen)}), "one download of each torch, for both wheels"
    assert not any(cache.exists() for cache in caches)


@pytest.mark.usefixtures("unreachable")
def test_release_notes_repeat_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    numerics: dict[str, Any] = {"error bfloat16 backward": 5e-3}
    on_gpu = [_test(file, **numerics) for file in verdict.TESTED[verdict.GPU]]
    report = {**_report(*on_gpu), "devices": [wheelhouse.MI300X] * 2}
    _pretend(monkeypatch, report, _report(_test("test_smoke.py")))
    verify.verify(path, fake_parts.plan("gfx90a", "gfx942"), tmp_path)
    (result,) = directory.read(tmp_path).wheels
    assert (result.gpus, result.on_amd_gpu) == (("AMD Instinct MI300X (gfx942)",), True)
    assert (result.verdict.gpu.status, result.worst_error, result.targets) == ("passed", 5e-3, ("gfx90a", "gfx942"))
    assert result.beside_pypis_torch


SELFTEST = """
import json, sys
checks = [{"check": "a", "ok": True}, {"check": "b", "ok": None}, {"check": "c", "ok": %s}]
report = {"ok": %s, "checks": checks, "machine": {"device": "AMD Instinct MI300X"}}
open(sys.argv[-1], "w").write(json.dumps(report))
sys.exit(%d)
"""


@pytest.mark.parametrize(("program", "status"), [
    (SELFTEST % (True, True, 0), "passed"),
    (SELFTEST % (False, False, 1), "failed"),
    ("raise SystemExit('no GPU')", "failed"),
])  # fmt: skip
def test_the_selftest_runs_where_a_gpu_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, status: str
) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    source = verify.TorchSource(requirement="torch==2.5.1+rocm6.2", index="https://example.org/rocm6.2", name="rocm6.2")
    monkeypatch.setattr(verify, "torch_source", lambda *_, **__: source)
    _pretend(monkeypatch, _report(), _report(_test("test_smoke.py")))
    env = tmp_path / "envs/torch2.5.1-rocm6.2-py3.11-pip"
    (env / "flash_attn").mkdir(parents=True)
    (env / "flash_attn/__init__.py").touch()
    (env / "flash_attn/selftest.py").write_text(program)
    (env / "bin").mkdir()
    (env / "bin/python").symlink_to(sys.executable)
    plan = fake_parts.plan("gfx90a", "gfx942")
    if status == "failed":
        with pytest.raises(VerifyFailed, match="selftest: failed"):
            verify.verify(path, plan, tmp_path, require_gpu=True)
    else:
        verify.verify(path, plan, tmp_path, require_gpu=True)
    result = verdict.read(path.with_name(f"{path.name}.verdict.json"))
    assert result.stages["selftest"].status == status
    if status == "passed":
        assert result.stages["selftest"].details == {"checks": 3, "passed": 2, "device": "AMD Instinct MI300X"}


@pytest.mark.usefixtures("unreachable")
def test_failing_test_is_named_after_the_verdict_is_written(
    tmp_path: Path, repaired: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, _report(_test("test_contents.py", "failed")), _report())
    with pytest.raises(VerifyFailed, match=r"code objects: failed\n(.*\n)*test_contents\.py::test_it"):
        verify.verify(repaired, fake_parts.plan("gfx90a"), tmp_path)
    written = json.loads((tmp_path / f"{NAME}.verdict.json").read_text())
    assert written["ok"] is False
    assert written["failures"] == ["test_contents.py::test_it"]
    assert written["stages"]["cpu numerics"]["status"] == "passed"


@pytest.mark.usefixtures("unreachable")
def test_installer_that_fails_is_quoted(tmp_path: Path, repaired: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "pip said: no matching distribution", _report())
    with pytest.raises(VerifyFailed, match="pip said: no matching distribution"):
        verify.verify(repaired, fake_parts.plan("gfx90a"), tmp_path)
    stages = json.loads((tmp_path / f"{NAME}.verdict.json").read_text())["stages"]
    assert stages["installed with pip"]["status"] == "failed"
    assert stages["import"]["status"] == "not run: the wheel could not be installed with pip"


@pytest.mark.usefixtures("unreachable")
def test_wheel_that_is_not_repaired_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), platform="linux_x86_64")
    _pretend(monkeypatch, _report(), _report())
    with pytest.raises(VerifyFailed, match="repaired: not run: the wheel is tagged linux_x86_64"):
        verify.verify(path, fake_parts.plan("gfx90a"), tmp_path)


def test_smoke_test_that_fails_under_uv_fails_the_wheel(
    tmp_path: Path, repaired: Path, monkeypatch: pytest.MonkeyPatch, unreachable: None
) -> None:
    assert unreachable is None
    _pretend(monkeypatch, _report(), _report(_test("test_smoke.py", "failed")))
    with pytest.raises(VerifyFailed, match=r"installed with uv: failed\n(.*\n)*test_smoke\.py::test_it"):
        verify.verify(repaired, fake_parts.plan("gfx90a"), tmp_path)


SILENCE = 0
CELL = Combination(python="3.11", torch="2.5.1", torch_index="rocm6.2")


class _Index(http.server.BaseHTTPRequestHandler):
    first: ClassVar[list[int]] = []  # answers of the first requests

    def do_GET(self) -> None:
        code = self.first.pop(0) if self.first else 200 if self.path == "/whl/rocm6.2/torch/" else 403
        if code == SILENCE:
            time.sleep(4 * verify._PROBE_SECONDS)
            return
        self.send_response(code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Index)
    monkeypatch.setattr(_Index, "first", [])
    monkeypatch.setattr(verify, "_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(verify, "_PAUSE_SECONDS", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/whl"
    monkeypatch.setattr(verify, "TORCH_INDEX", url)
    yield url
    server.shutdown()
    thread.join()
    server.server_close()


def test_torch_comes_from_the_rocm_index_if_it_answers(index: str) -> None:
    source = verify.torch_source(CELL)
    assert (source.requirement, source.index) == ("torch==2.5.1+rocm6.2", f"{index}/rocm6.2")
    assert verify._torch_words(source, None) == f"{index}/rocm6.2 torch==2.5.1+rocm6.2"


def test_torch_comes_from_pypi_where_the_index_refuses(index: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = Combination(python="3.12", torch="2.6.0", torch_index="rocm6.2.4")
    _Index.first = [404]
    for code in (404, 403):
        source = verify.torch_source(expected)
        assert (source.requirement, source.index, source.name) == ("torch==2.6.0", None, "pypi")
        assert source.why == f"the ROCm index answered {code}"
        note = f"note: {source.why}: testing with PyPI's torch 2.6.0, which sees no AMD GPU\n"
        assert capsys.readouterr().err == note
    with pytest.raises(
        VerifyFailed, match=r"no torch 2\.6\.0 for ROCm .* answered 403: http.*\nRun it again once"
    ) as caught:
        verify.torch_source(expected, require_gpu=True)
    assert f"{index}/rocm6.2.4/torch/" in caught.value.message


@pytest.mark.parametrize("hiccup", [500, 503, 429, SILENCE])
def test_a_failing_index_is_tried_again(
    index: str, hiccup: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _Index.first = [hiccup, hiccup]
    assert verify.torch_source(CELL, require_gpu=True).index == f"{index}/rocm6.2"
    assert capsys.readouterr() == ("", "")
    _Index.first = [hiccup, hiccup, hiccup]
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    why = f"answered {hiccup}" if hiccup else "could not be reached"
    assert verify.torch_source(CELL).why == f"the ROCm index {why}, 3 times"
    assert waits.count(verify._PAUSE_SECONDS) == 2
    assert capsys.readouterr().err.startswith(f"note: the ROCm index {why}, 3 times: testing with PyPI's")


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_a_machine_without_network_does_not_wait(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "TORCH_INDEX", f"{address}/whl")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waits"))
    assert verify.torch_source(CELL).why == "the ROCm index could not be reached"
    assert capsys.readouterr().err.startswith("note: the ROCm index could not be reached: testing with PyPI's")
    with pytest.raises(VerifyFailed, match="could not be reached"):
        verify.torch_source(CELL, require_gpu=True)


def test_clean_environment_has_nothing_that_reaches_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("UV_CACHE_DIR", "/kept")
    result = verify.clean_environment()
    assert not [name for name in result if name.startswith(("PYTHON", "VIRTUAL", "FLASH", "TRITON"))]
    assert result["UV_CACHE_DIR"] == "/kept"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The requests to uv, line by line. Its check finds a requirement that is not met."""
    tool, asked = tmp_path / "uv", tmp_path / "asked"
    tool.write_text(
        f'#!/bin/sh\necho "$PYTHONPATH$PYTHONNOUSERSITE $*" >>{asked}\n'
        '[ "$2" != check ] || { echo "flash-attn requires einops"; exit 1; }\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(packages, "uv", lambda: str(tool))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    return asked


@pytest.mark.parametrize("index", ["https://example.org/rocm6.2", None])
def test_torch_is_installed_from_its_index_alone(tmp_path: Path, asked: Path, index: str | None) -> None:
    source = verify.TorchSource(requirement="torch==2.5.1", index=index, name="")
    env = tmp_path / "env"
    python = verify.environment(source, Path("/python3.11"), env, locks.DIRECTORY / "pip.txt")
    assert python == env / "bin/python"
    install = f"1 pip install --python {python}"
    assert asked.read_text().splitlines() == [
        f"1 venv --clear --no-project --python /python3.11 {env}",
        *([f"{install} --index-url {index} torch==2.5.1"] if index else []),
        f"{install} torch==2.5.1",
        f"{install} --require-hashes -r {locks.DIRECTORY / 'wheel_tests.txt'} -r {locks.DIRECTORY / 'pip.txt'}",
    ]


def test_a_requirement_that_is_not_met_fails_the_installation(
    tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv installs into another directory, and does not use a cached wheel of that name."""
    monkeypatch.chdir(tmp_path)
    (env := tmp_path / "env").mkdir()
    with pytest.raises(VerifyFailed, match="uv pip check --python python` ended with 1:\nflash-attn requires einops"):
        verify.install(Path("python"), [Path(NAME)], env)
    first = asked.read_text().splitlines()[0]
    assert first.endswith(
        " --refresh-package flash-attn --refresh-package block-sparse-attn --refresh-package flash-attn-3"
        " --refresh-package flash-attn-4"
        " --refresh-package sageattention --refresh-package sglang-flash-rocm"
        f" --refresh-package spas-sage-attn --refresh-package vllm-flash-rocm {tmp_path / NAME}"
    )


@pytest.mark.parametrize(
    ("status", "written", "good"), [(0, True, True), (1, True, True), (5, True, False), (0, False, False)]
)
def test_a_run_of_tests_counts_with_its_report(tmp_path: Path, status: int, written: bool, good: bool) -> None:
    python = tmp_path / "python"
    write = "while [ $1 != --report ]; do shift; done; echo '{\"tests\": []}' >$2\n" if written else ""
    python.write_text(f"#!/bin/sh\necho no tests ran\n{write}exit {status}\n")
    python.chmod(0o755)
    if good:
        assert verify._tests(python, tmp_path, "tests") == {"tests": []}
    else:
        with pytest.raises(VerifyFailed, match=f"pytest ended with {status}:\nno tests ran"):
            verify._tests(python, tmp_path, "tests")


def test_no_test_report_is_written_under_an_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    before = path.with_name(f"{path.name}.verdict.json").read_bytes()
    platform = package_modules.module("core.platform").PLATFORM
    monkeypatch.setattr(type(platform), "emulator", lambda _: "rocjitsu")
    with pytest.raises(VerifyFailed, match="rocjitsu emulates the GPU of this process"):
        verify.verify(path, fake_parts.plan("gfx90a", "gfx942"), tmp_path)
    assert path.with_name(f"{path.name}.verdict.json").read_bytes() == before


def test_wheel_tests_import_nothing_of_the_repository() -> None:
    for path in verify.WHEEL_TESTS.glob("*.py"):
        assert "rocm_wheels" not in path.read_text().replace("rocm_wheels authors", ""), path.name


def test_report_of_the_wheel_tests(tmp_path: Path) -> None:
    """The contents tests on an unpacked wheel with invalid code objects, which they report."""
    launcher = fake_parts.library(tmp_path / "_launcher.abi3.so", "int answer(void) { return 42; }\n")
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    cell = fake_parts.plan("gfx90a", python=running, torch="2.9.1", rocm="6.4")
    stores = {"gfx90a": fake_parts.store(tmp_path, "gfx90a")}
    built = repair.repair(assemble.assemble(cell, stores, launcher, tmp_path / "raw"), tmp_path / "out")
    site = tmp_path / "site"
    shutil.unpack_archive(built, site, format="zip")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(verify.WHEEL_TESTS / "pytest.ini"), "--report", str(report)]
    done = subprocess.run(
        [*command, str(verify.WHEEL_TESTS / "test_contents.py")],
        env={**verify.clean_environment(), "PYTHONPATH": str(site), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(report.read_text())
    outcomes = {test["name"].partition("::")[2]: test["outcome"] for test in result["tests"]}
    assert outcomes.pop("test_code_objects_are_for_their_target") == "failed"
    assert set(outcomes.values()) == {"passed"}
    assert len(outcomes) == 9
    stages = verdict.tested_stages(result, "")
    assert stages["code objects"].status == "failed"
    assert stages["code objects"].details["bytes"] == {"gfx90a": stores["gfx90a"].stat().st_size}
    assert stages["import"].status == "not run: no test was collected"
    done = subprocess.run(
        [*command, "--minutes", "0.00001", str(verify.WHEEL_TESTS / "test_contents.py")],
        env={**verify.clean_environment(), "PYTHONPATH": str(site), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    assert {(test["outcome"], test["reason"]) for test in result["tests"]} == {("skipped", "1e-05 minutes are over")}
