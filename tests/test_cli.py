from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import wheelhouse

import rocm_wheels
from rocm_wheels import cli, names
from rocm_wheels.errors import MissingTool, RocmWheelsError, VerifyFailed, exit_code
from rocm_wheels.plan import Plan
from rocm_wheels.versions import Versions

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "build_rocm.sh"
CELL = (wheelhouse.NEWEST, "3.11", "2.5.1", "6.2")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        *("PYTORCH_ROCM_ARCH", "GPU_ARCHS", "MAX_JOBS"),
        *("BUILD_TRITON_BACKEND", "FLASH_ATTENTION_TRITON_AMD_ENABLE", "SOURCE_DATE_EPOCH"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROCM_WHEELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rocm_wheels.machine.detect_targets", lambda: ())


class Verdict:
    ok = True

    def summary(self) -> str:
        return "passed\n  tests: 12 passed"


class Stages:
    """Stands in for the modules that compile, assemble, repair and verify, and records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.failure: RocmWheelsError | None = None
        self.compiled: dict[str, object] = {}
        self.reported = Path()
        modules: dict[str, dict[str, Callable[..., object]]] = {
            "toolchain": {"check": self.note("toolchain.check")},
            "kernels": {"compile_store": self.compile_store},
            "launcher": {"build": self.launcher},
            "ck_planner": {"build": self.planner},
            "wheel": {"assemble": self.assemble, "assemble_interface": self.assemble_interface},
            "interpreters": {"find": self.find},
            "repair": {"check": self.note("repair.check"), "repair": self.repair},
            "verify": {"verify": self.verify},
            "inspect_store": {"report": self.report},
        }
        for module, functions in modules.items():
            fake = SimpleNamespace(**functions)
            monkeypatch.setitem(sys.modules, f"rocm_wheels.{module}", fake)
            monkeypatch.setattr(rocm_wheels, module, fake, raising=False)

    def note(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)

    def find(self, version: str) -> Path:
        self.calls.append(f"find {version}")
        return Path("/somewhere/python")

    def compile_store(self, targets: Sequence[str], *, cache: Path, **options: object) -> dict[str, Path]:
        self.calls.append("compile")
        self.compiled = {"targets": tuple(targets), "cache": cache, **options}
        return {target: self.file(cache / f"{target}.zip") for target in targets}

    def launcher(self, output: Path, *, cache: Path) -> Path:
        assert cache.is_dir()
        self.calls.append("launcher")
        return self.file(output / "_launcher.abi3.so")

    def planner(self, output: Path, *, cache: Path) -> Path:
        assert cache.is_dir()
        self.calls.append("planner")
        return self.file(output / "_ck_planner.so")

    def assemble(
        self, plan: Plan, stores: Mapping[str, Path], launcher: Path, output: Path, *, planner: Path | None
    ) -> Path:
        assert (planner is not None) == (plan.cell.backend == "ck")
        assert set(stores) == set(plan.targets)
        assert launcher.is_file()
        self.calls.append("assemble")
        return self.file(output / plan.wheel)

    def assemble_interface(self, plan: Plan, output: Path) -> Path:
        self.calls.append("interface")
        return self.file(output / names.interface_wheel_name(plan.cell))

    def repair(self, wheel: Path, output: Path) -> Path:
        assert wheel.is_file()
        self.calls.append("repair")
        return self.file(output / wheel.name.replace("-linux_", "-manylinux_2_17_"))

    def verify(self, wheel: Path, plan: Plan, work: Path, *, beside: Sequence[Path]) -> Verdict:
        assert all(path.is_file() for path in (wheel, *beside))
        assert work.is_dir()
        assert plan.cell.rocm == "6.2"
        self.calls.append("verify")
        if self.failure:
            raise self.failure
        return Verdict()

    def report(self, path: Path) -> str:
        self.reported = path
        return "gfx942  12 kernels"

    @staticmethod
    def file(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 3000)
        return path


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    return Stages(monkeypatch)


def test_plan_prints_json_and_its_notes_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["plan", *CELL]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["label"] == "rocm62torch2.5"
    assert err == ""
    assert cli.main(["build", "--plan", *CELL]) == 0
    assert capsys.readouterr() == (out, err)
    monkeypatch.setenv("GPU_ARCHS", "gfx1100")
    assert cli.main(["plan", *CELL]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["label"] == "rocm62torch2.5triton"
    assert err == "note: the ck backend has no kernels for gfx1100: this builds the triton wheel\n"


def test_check_is_silent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["check", *CELL, "--dist", str(tmp_path / "dist")]) == 0
    assert capsys.readouterr() == ("", "")


def test_what_cannot_be_written_is_refused_at_once(
    stages: Stages, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "inside"
    for verb in (["check"], ["build"], ["build", "--docker"]):
        assert cli.main([*verb, *CELL, "--dist", str(place)]) == 10
        message = f"error: the directory of the wheel {place} cannot be written: Not a directory\nGive --dist"
        assert capsys.readouterr().err.startswith(message)
    monkeypatch.setenv("ROCM_WHEELS_CACHE", str(place))
    for verb in (["check", *CELL], ["build", *CELL], ["compile", "--target", "gfx942"]):
        assert cli.main(verb) == 10
        message = f"error: the cache {place} cannot be written: Not a directory\nSet ROCM_WHEELS_CACHE, or give --cache"
        assert capsys.readouterr().err.startswith(message)
    assert stages.calls == []


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["latest", *CELL[1:]], 2, f"error: flash-attn 'latest' is not known\nNearest: {wheelhouse.NEWEST}."),
        (["2.8.3", "3.11", "2.6", "6.3"], 3, "Nearest cell that exists: 2.8.3 3.11 2.6.0 6.2\n"),
        (["3.11", "2.8.3", "2.5.1", "6.2"], 2, "\nThe order is: flash-attn python torch rocm.\n"),
        (["2.8.3", "3.11", "6.2", "2.5.1"], 2, "\nThe order is: flash-attn python torch rocm.\n"),
        ([*CELL, "--backend", "aiter"], 2, "error: backend 'aiter' is not known\nKnown backends: ck, triton."),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "build"])
def test_a_refusal_has_its_exit_code_and_no_traceback(
    capsys: pytest.CaptureFixture[str], verb: str, arguments: list[str], code: int, text: str
) -> None:
    assert cli.main([verb, *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err


def test_a_full_disk_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert exit_code(run) == RocmWheelsError.exit_code
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("Make room for --cache, --dist and TMPDIR")


def test_every_error_has_its_own_exit_code() -> None:
    codes = [error.exit_code for error in RocmWheelsError.__subclasses__()]
    assert sorted(codes) == list(range(2, 12))


def test_build_runs_the_stages_in_order(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    assert cli.main(["build", *CELL, "--dist", str(tmp_path / "out")]) == 0
    assert stages.calls == [
        "toolchain.check",
        "repair.check",
        "find 3.11",
        "compile",
        "planner",
        "launcher",
        "assemble",
        "repair",
        "interface",
        "verify",
    ]
    targets = ("gfx90a", "gfx942")
    assert stages.compiled == {
        "targets": targets, "cache": tmp_path / "cache", "jobs": 3, "backend": "ck", "toolchain": "pypi"
    }  # fmt: skip
    wheel = tmp_path / f"out/flash_attn-{wheelhouse.NEWEST}+rocm62torch2.5-cp311-cp311-manylinux_2_17_x86_64.whl"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" for gfx90a, gfx942 (all common targets), 3 jobs")
    (testing,) = (line for line in lines if line.startswith("  testing it in two clean environments with torch 2.5.1"))
    lines.remove(testing)
    assert [line.split()[0] for line in lines[1:7]] == ["check", "compile", "assemble", "repair", "interface", "verify"]
    assert all(line.split()[2] == "s" for line in lines[1:7])
    assert lines[7:] == [
        "",
        "passed",
        "  tests: 12 passed",
        "",
        f"wheel    {wheel}",
        "size     3 KiB",
        "targets  gfx90a, gfx942",
        f"verdict  {wheel}.verdict.json",
        "python   3.11",
        "torch    pip install torch==2.5.1+rocm6.2 --index-url https://download.pytorch.org/whl/rocm6.2",
        f"install  pip install {wheel}",
        f"FA3      pip install {tmp_path / 'out/flash_attn_3-3.0.0+rocm62torch2.5-py3-none-any.whl'}"
        "  # flash-attn-3: the module flash_attn_interface",
    ]
    assert not list((tmp_path / "cache").glob("work-*"))


@pytest.mark.parametrize(
    ("variable", "labels"),
    [
        ("BUILD_TRITON_BACKEND", ["rocm62torch2.5", "rocm62torch2.5triton"]),
        ("FLASH_ATTENTION_TRITON_AMD_ENABLE", ["rocm62torch2.5triton"]),
    ],
)
def test_the_triton_wheel_too_or_alone(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, labels: list[str]
) -> None:
    monkeypatch.setenv(variable, "TRUE")
    assert cli.main(["build", *CELL, "--dist", str(tmp_path)]) == 0
    assert stages.calls.count("verify") == len(labels)
    found = sorted(path.name.split("-")[1] for path in tmp_path.glob("flash_attn-*.whl"))
    assert found == [f"{wheelhouse.NEWEST}+{label}" for label in labels]


def test_docker_builds_each_wheel_by_its_own_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Plan] = []
    codes = iter((0, 0, 3))

    def run(plan: Plan, **_: object) -> int:
        ran.append(plan)
        return next(codes)

    monkeypatch.setattr("rocm_wheels.container.run", run)
    monkeypatch.setenv("BUILD_TRITON_BACKEND", "true")
    command = ["build", *CELL, "--dist", str(tmp_path), "--docker"]
    assert cli.main(command) == 0
    assert [(plan.cell.backend, plan.targets) for plan in ran] == [
        ("ck", ("gfx90a", "gfx942")),
        ("triton", ("gfx90a", "gfx942", "gfx1030", "gfx1100")),
    ]
    assert capsys.readouterr().out.startswith("note: BUILD_TRITON_BACKEND: ")
    assert cli.main(command) == 3
    assert len(ran) == 3, "nothing after one that failed"


def test_a_bad_verdict_fails_the_build(stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages.failure = VerifyFailed("a kernel of gfx942 does not load", remedy="see the verdict")
    assert cli.main(["build", *CELL, "--dist", str(tmp_path)]) == 9
    out, err = capsys.readouterr()
    assert "install " not in out
    assert err == "error: a kernel of gfx942 does not load\nsee the verdict\n"
    assert len(list(tmp_path.glob("flash_attn-*.whl"))) == 1


def test_an_error_of_a_stage_stops_the_build(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(plan: Plan) -> None:
        raise MissingTool(f"{plan.compiler} is not installed", remedy="Run build_rocm.sh.")

    monkeypatch.setattr(sys.modules["rocm_wheels.toolchain"], "check", check)
    assert cli.main(["build", *CELL, "--dist", str(tmp_path)]) == 5
    assert capsys.readouterr().err == "error: ziglang 0.15.2 is not installed\nRun build_rocm.sh.\n"
    assert stages.calls == []


def test_compile(stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--target",
        "sm_90",
        "--target",
        "gfx942:xnack-",
        "--shard",
        "2/4",
        "--only",
        "fwd*",
        "--jobs",
        "2",
        "--tiles",
    ]
    assert cli.main(["compile", *arguments, "--cache", str(tmp_path)]) == 0
    assert stages.compiled == {
        "targets": ("gfx942", "sm_90"), "cache": tmp_path, "jobs": 2, "shard": (2, 4), "only": "fwd*",
        "backend": "triton", "toolchain": "pypi", "tiles": True,
    }  # fmt: skip
    assert capsys.readouterr().out.splitlines()[0] == f"gfx942  {tmp_path / 'gfx942.zip'}"
    assert cli.main(["compile", "--target", "gfx94a"]) == 4


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1", "a/b", "1/"])
def test_a_shard_is_checked(shard: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["compile", "--target", "gfx942", "--shard", shard])
    assert caught.value.code == 2
    assert f"'{shard}' is not i/n with 1 <= i <= n" in capsys.readouterr().err


def test_inspect(stages: Stages, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "some.whl"]) == 0
    assert stages.reported == Path("some.whl")
    assert capsys.readouterr().out == "gfx942  12 kernels\n"
    assert cli.main(["inspect", "some.whl", "gfx90a.zip"]) == 0
    assert capsys.readouterr().out == "some.whl:\ngfx942  12 kernels\n\ngfx90a.zip:\ngfx942  12 kernels\n"


def test_the_default_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cli.default_cache() == tmp_path / "cache"
    monkeypatch.setenv("ROCM_WHEELS_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.default_cache() == tmp_path / "rocm_wheels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.default_cache() == tmp_path / ".cache/rocm_wheels"


def test_help_reads_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rocm_wheels", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for text in ("plan", "build", "compile", "inspect", "build 2.8.3 3.11 2.5.1 6.2", "--shard 2/4"):
        assert text in done.stdout


def test_the_table_of_the_package_has_every_module_once() -> None:
    rows = [row.split("|")[2] for row in (rocm_wheels.__doc__ or "").splitlines() if row.startswith("| ")][1:]
    named = sorted(name.strip() for row in rows for name in row.split(",") if not name.endswith(".toml"))
    assert named == sorted(path.stem for path in (ROOT / "rocm_wheels").glob("[a-z]*.py"))


STDLIB_ONLY = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from rocm_wheels.cli import main
code = main()
tops = {name.partition(".")[0] for name in sys.modules}
print(sorted(tops - set(sys.stdlib_module_names) - {"__main__", "rocm_wheels"}), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no TOML reader of its own")
def test_plan_needs_the_standard_library_only(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", STDLIB_ONLY, str(ROOT), "check", *CELL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "[]\n")


@pytest.mark.parametrize(
    ("verb", "group"),
    [
        (["inspect", "some.whl"], "build"),
        (["compile", "--target", "gfx942"], "build"),
        (["build", *CELL], "build"),
        (["environment", *CELL], ""),
        (["index", "--dir", "dist", "--out", "site", "--repo", "o/n"], "release"),
    ],
)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no TOML reader of its own")
def test_a_python_without_the_packages_is_told_the_command(verb: list[str], group: str, tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-I", "-c", STDLIB_ONLY, str(ROOT), *verb]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (5 if group else 0)
    assert "Traceback" not in done.stderr
    remedy = {
        "build": "--setup, then this with build/env/",
        "release": "--setup release, then this with build/env-release/",
    }
    assert not group or f"\nRun ./build_rocm.sh {remedy[group]}bin/python.\n" in done.stderr


def script(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_script_prints_the_plan_from_any_directory(tmp_path: Path) -> None:
    done = script(*CELL, "--plan", cwd=tmp_path, GPU_ARCHS="gfx942", PYTHONPATH="/nowhere", PYTHONHOME="/nowhere")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["targets"] == ["gfx942"]


def test_script_refuses_before_it_installs_anything(tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(ROOT / "rocm_wheels", copy / "rocm_wheels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SCRIPT, copy)
    done = subprocess.run(
        [copy / SCRIPT.name, "2.8.3", "3.11", "2.6", "6.3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr.startswith("error: torch 2.6.0 has no wheels for ROCm 6.3")
    assert not (copy / "build").exists()


def test_script_checks_the_places_it_writes_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = script(*CELL, cwd=tmp_path, ROCM_WHEELS_CACHE=str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (10, "")
    assert done.stderr.startswith(f"error: the cache {tmp_path / 'file'} cannot be written: ")
    assert not (tmp_path / "dist").exists()


def test_script_usage(tmp_path: Path) -> None:
    done = script(cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: build_rocm.sh <flash-attn> <python> <torch> <rocm>")
    usage = done.stderr
    done = script("--help", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, usage, "")
    assert "PYTORCH_ROCM_ARCH" in usage


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (CELL[:2], "the following arguments are required: torch, rocm"),
        ((*CELL, "--bogus"), "unrecognized arguments: --bogus"),
        ((*CELL, "--backend"), "argument --backend: expected one argument"),
        ((*CELL, "--pl"), "unrecognized arguments: --pl"),
        ((*CELL, "--cache", ""), "argument --cache: the name of the directory is empty"),
    ],
)
def test_a_wrong_command_line_gets_the_usage_of_the_script(arguments: Sequence[str], what: str, tmp_path: Path) -> None:
    done = script(*arguments, cwd=tmp_path)
    own, *_ = script("--help", cwd=tmp_path).stdout.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{own}\n       build_rocm.sh --help\nbuild_rocm.sh: error: {what}\n"


def _fake_path(directory: Path, **programs: str) -> str:
    """A PATH with the system's basic tools, and these shell scripts before them; no other Python."""
    directory.mkdir()
    for name in ("bash", "dirname", "cat"):
        found = shutil.which(name)
        assert found
        (directory / name).symlink_to(found)
    for name, body in programs.items():
        path = directory / name
        path.write_text(f"#!{directory}/bash\n{body}\n")
        path.chmod(0o755)
    return str(directory)


WHEEL = "flash_attn-2.8.3+rocm62torch2.5triton-cp311-cp311-manylinux_2_17_x86_64.whl"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", f"none/{WHEEL}"], f"error: none/{WHEEL}: No such file or directory\n"),
        (
            ["verify", WHEEL],
            f"error: {WHEEL} is not a wheel that was built with these sources: File is not a zip file\n",
        ),
        (["repair", WHEEL], f"error: {WHEEL} is not a wheel\nName one that was built with these sources.\n"),
        (["index", "--dir", "dist", "--out", f"{WHEEL}/site", "--repo", "a/b"], f"error: {WHEEL}: File exists\n"),
        (["notes", "--tag", "v1", "--repo", "a/b", "--new", WHEEL], f"error: {WHEEL} cannot be read: 'utf-8' codec"),
    ],
)
def test_a_bad_file_is_one_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / WHEEL).write_bytes(b"no wheel \xff")
    wheelhouse.write(tmp_path / "dist", wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    assert cli.main(arguments) > 0
    assert message in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error() -> None:
    """`rocm_wheels ... | head`"""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "rocm_wheels", "plan", "2.8.3", "3.11", "2.5.1", "6.2"]
    done = subprocess.run(command, cwd=ROOT, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_script_takes_another_python_where_python3_is_too_old(tmp_path: Path) -> None:
    path = _fake_path(tmp_path / "bin", **{"python3": "exit 1", "python3.12": f'exec {sys.executable} "$@"'})
    done = subprocess.run(
        [tmp_path / "bin/bash", SCRIPT, *CELL, "--plan"], env={"PATH": path, "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["label"] == "rocm62torch2.5"


def test_script_says_which_python_it_needs(tmp_path: Path) -> None:
    path = _fake_path(tmp_path / "bin", python3='[[ $1 == --version ]] && echo "Python 3.8.1"; exit 1')
    done = subprocess.run(
        [tmp_path / "bin/bash", SCRIPT, *CELL],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "error: no Python from 3.10 to 3.14 is on PATH (python3: Python 3.8.1" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


# Makes an environment as `python -m venv` does, with a Python that only writes down how it is called.
FAKE_PYTHON = r"""
case "$*" in
    "-I -m venv --clear "*)
        [[ -z ${NO_ENSUREPIP:-} || $* == *--without-pip* ]] || exit 1
        venv="${!#}"
        rm -rf "$venv" && mkdir -p "$venv/bin"
        cp "$0" "$venv/bin/python" ;;
    *sysconfig*) dirname "$0" ;;
    *realpath*) realpath "$0" ;;
    *sys.executable*) echo "$0" ;;
    "-I --version") echo "Python 3.11.9" ;;
    *"-m pip"* | *"rocm_wheels build"*)
        echo "$*" >>"$LOG"
        [[ $* != *"rocm_wheels build"* || -z ${HELD:-} ]] || readlink /proc/$$/fd/* >>"$HELD"
        sleep "${SLOW:-0}"
        [[ -z ${FAIL:-} || $* != *"--group"* ]] || exit 1 ;;
    *) exec PYTHON "$@" ;;
esac
"""


@dataclass
class Checkout:
    """A copy of the script and of what it reads, with a fake python3 on PATH."""

    root: Path
    env: dict[str, str]
    log: Path

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Builds the README's cell; the calls of pip and of the build are in `calls` afterwards."""
        self.log.write_text("")
        return subprocess.run(
            [self.root / SCRIPT.name, *CELL],
            cwd=self.root.parent, env={**self.env, **env}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "repository"
    shutil.copytree(ROOT / "rocm_wheels", root / "rocm_wheels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (SCRIPT.name, "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    python.write_text("#!/usr/bin/env bash\n" + FAKE_PYTHON.replace("PYTHON", sys.executable))
    python.chmod(0o755)
    log = tmp_path / "log"
    path = f"{python.parent}:{os.environ['PATH']}"
    return Checkout(root, {"PATH": path, "LOG": str(log), "HOME": str(tmp_path)}, log)


def test_script_makes_its_environment_once_and_builds(checkout: Checkout, data: Versions) -> None:
    build = f"-I -m rocm_wheels build --dist {checkout.root}/dist {' '.join(CELL)}"
    quiet = "install --quiet --disable-pip-version-check"
    made = [
        f"-I -m pip {quiet} pip=={data.build.pip}",
        f"-I -m pip {quiet} --group {checkout.root}/pyproject.toml:build",
        build,
    ]
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert checkout.calls == made
    assert done.stdout.startswith("environment ")
    assert done.stdout.endswith("s  repository/build/env, made with Python 3.11.9\n")
    assert (checkout.root / "build/env/bin/rocm_wheels.pth").read_text() == "../../../../..\n"

    done = checkout.run()
    assert checkout.calls == [build]
    assert done.stdout.endswith("s  repository/build/env, unchanged\n")

    with (checkout.root / "pyproject.toml").open("a") as pyproject:
        pyproject.write("# changed\n")
    checkout.run()
    assert checkout.calls == made


def test_an_activated_environment_on_the_same_python_makes_none_anew(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run()
    activated = tmp_path / "activated/bin"
    activated.mkdir(parents=True)
    (activated / "python3").symlink_to(tmp_path / "bin/python3")
    done = checkout.run(PATH=f"{activated}:{checkout.env['PATH']}")
    assert done.stdout.endswith("s  repository/build/env, unchanged\n")


# Makes real environments, in which pip installs nothing.
PYTHON_WITHOUT_PIP = r"""
case "$*" in
    "-I -m venv --clear "*)
        PYTHON -I -m venv --clear --without-pip "${!#}"
        cd "${!#}"/lib/python*/site-packages
        mkdir pip
        touch pip/__{init,main}__.py ;;
    *sys.executable*) echo "$0" ;;
    *) exec PYTHON "$@" ;;
esac
"""


@pytest.mark.parametrize("group", ["build", "release"])
def test_an_environment_finds_the_tools_whatever_the_path_and_the_locale(
    checkout: Checkout, tmp_path: Path, group: str
) -> None:
    fake = "#!/usr/bin/env bash\n" + PYTHON_WITHOUT_PIP.replace("PYTHON", sys.executable)
    (tmp_path / "bin/python3").write_text(fake)
    root = checkout.root.rename(tmp_path / "dépôt")
    env = {**checkout.env, "LC_ALL": "C"}
    subprocess.run([root / SCRIPT.name, "--setup", group], env=env, capture_output=True, check=True)
    python = root / "build" / ("env" if group == "build" else f"env-{group}") / "bin/python"
    imported = "import rocm_wheels; print(ascii(rocm_wheels.__file__))"
    done = subprocess.run([python, "-I", "-c", imported], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == f"{str(root / 'rocm_wheels/__init__.py')!a}\n", done.stderr


@pytest.mark.parametrize("group", ["relase", "../../x", "--docker"])
def test_script_makes_no_environment_of_a_group_that_is_not_there(checkout: Checkout, group: str) -> None:
    setup = [str(checkout.root / SCRIPT.name), "--setup", group]
    done = subprocess.run(setup, env=checkout.env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith(f"error: --setup: there is no dependency group '{group}'\nKnown: build, release, ")
    assert not (checkout.root / "build").exists()


def test_script_makes_a_broken_environment_anew(checkout: Checkout) -> None:
    done = checkout.run(FAIL="1")
    assert done.returncode == 1
    assert len(checkout.calls) == 2
    checkout.run()
    assert len(checkout.calls) == 3


def test_scripts_that_start_together_make_one_environment(checkout: Checkout, tmp_path: Path) -> None:
    held = tmp_path / "held"
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: checkout.run(SLOW="0.2", HELD=str(held)), range(3)))
    assert [each.returncode for each in done] == [0, 0, 0], [each.stderr for each in done]
    assert sorted("unchanged" in each.stdout for each in done) == [False, True, True]
    assert sum("--group" in call for call in checkout.calls) == 1
    assert "env.lock" not in held.read_text(), "a build keeps the next one waiting"


def test_script_lends_its_pip_to_an_environment_without_one(checkout: Checkout, data: Versions) -> None:
    done = checkout.run(NO_ENSUREPIP="1")
    assert done.returncode == 0, done.stderr
    assert f"--python {checkout.root}/build/env/bin/python install" in checkout.calls[1]
    assert checkout.calls[1].endswith(f"pip=={data.build.pip}")
