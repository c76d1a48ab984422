from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import wheelhouse
from fake_stages import Stages
from wheelhouse import CELL

import rocm_wheels
from rocm_wheels import cli
from rocm_wheels.cli import build
from rocm_wheels.environment import cache_directory
from rocm_wheels.errors import MissingTool, RocmWheelsError, VerifyFailed, exit_code
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.publish import which
from rocm_wheels.wheel import interpreters

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    return Stages(monkeypatch)


def test_tiles_prints_which_tile_each_score_modifier_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tiles", "gfx1100", "fwd", "d128"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["type", "modifier"]
    tiles = {tuple(row.split()[:2]): row.split()[2:5] for row in rows}
    assert tiles["bf16", "plain"] == ["128", "x", "64"]
    assert tiles["bf16", "softcap"] == ["128", "x", "32"]
    assert ("fp32", "softcap") not in tiles  # `any` serves it


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gfx11", "fwd", "d128"], "unknown GPU target gfx11\nchoose one of gfx900, "),
        (["gfx1100", "forward", "d128"], "unknown operation forward\nchoose one of fwd, "),
        (["gfx1100", "fwd", "128"], "fwd on gfx1100 has no size 128\nchoose one of d32, d64, "),
        (["gfx1100", "fp8-fwd", "d128"], "fp8-fwd on gfx1100 has no size d128\nchoose another GPU target"),
    ],
)
def test_tiles_lists_the_known_names(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tiles", *words]) != 0
    assert message in capsys.readouterr().err


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


def test_a_build_takes_the_plan_of_the_check(
    stages: Stages, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BUILD_TRITON_BACKEND", "true")
    monkeypatch.setenv("GPU_ARCHS", "gfx942")
    assert cli.main(["check", *CELL, "--dist", str(tmp_path / "dist")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [plan["label"] for plan in json.loads(out)] == ["rocm62torch2.5", "rocm62torch2.5triton"]

    def again(*_: object, **__: object) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr(build, "make_plan", again)
    monkeypatch.setenv("GPU_ARCHS", "gfx90a")
    command = ["build", *CELL, "--dist", str(tmp_path / "dist"), "--planned"]
    assert cli.main([*command, out]) == 0
    assert stages.calls.count("verify") == 2
    assert stages.compiled["targets"] == ("gfx942",)
    for text in ("", "[1]", "[{}]", out.replace('"jobs"', '"sjob"')):
        assert cli.main([*command, text]) == 10
        assert "--planned is not what `check` prints: " in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_at_once(
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
        (["2.8.3", "3.11", "2.6", "6.3"], 3, "Nearest combination that exists: 2.8.3 3.11 2.6.0 6.2\n"),
        (["3.11", "2.8.3", "2.5.1", "6.2"], 2, "\nThe order is: flash-attn python torch rocm.\n"),
        (["2.8.3", "3.11", "6.2", "2.5.1"], 2, "\nThe order is: flash-attn python torch rocm.\n"),
        ([*CELL, "--backend", "aiter"], 2, "error: backend 'aiter' is not known\nKnown backends: ck, triton."),
        (["2.8.3", "--backend", "foo"], 2, "error: backend 'foo' is not known\nKnown backends: ck, triton."),
        (["2.8.3", "--backend", "triton"], 10, "Leave it out: ./build_rocm.sh 2.8.3\n"),
        (["2.8.3", "--backend", "triton"], 10, ": ./build_rocm.sh 2.8.3 3.11 2.5.1 6.2 --backend triton\n"),
        (["2.8.3rc1"], 2, "error: flash-attn '2.8.3rc1' is not known\nNearest: 2.8.3. "),
        (["flash_attn==2.7.4"], 2, "error: flash-attn 'flash_attn==2.7.4' is not known\nNearest: 2.7.4. "),
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


def test_a_full_disk_is_reported_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert exit_code(run) == RocmWheelsError.exit_code
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert second == "Make room where it writes: --cache, --dist, --out, TMPDIR. Run it again."


@pytest.mark.parametrize("stage", ["repair", "verify", "compile"])
def test_a_full_disk_is_named(
    stages: Stages, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A write into an open file raises an OSError without a path, and a copy names its source."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    module, function = {"compile": ("compile.kernels", "compile_store")}.get(stage, (f"wheel.{stage}", stage))

    def fill(*_: object, **__: object) -> None:
        raise full

    monkeypatch.setattr(f"rocm_wheels.{module}.{function}", fill)
    out, cache = tmp_path / "out", tmp_path / "cache"
    assert cli.main(["build", *CELL, "--dist", str(out)]) == 1
    assert f"error: {out if stage == 'repair' else cache}: {full.strerror}\n" in capsys.readouterr().err
    assert stages.calls


def test_a_copy_to_a_full_disk_names_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a.whl", None, "dist/a.whl")

    assert exit_code(run) == 1
    assert capsys.readouterr().err.startswith(f"error: dist/a.whl: {os.strerror(errno.ENOSPC)}\n")


@pytest.mark.parametrize("option", ["--output", "--out"])
def test_every_verb_names_the_full_disk_of_its_output(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    verb, module = {
        "--output": (["unlabelled", "a.whl"], "wheels._unlabelled"),
        "--out": (["index"], "release._index"),
    }[option]
    monkeypatch.setattr(f"rocm_wheels.cli.{module}", fill)
    assert cli.main([*verb, option, str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: ")


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (["compile", "--target", "gfx942"], "Run it again: it goes on from the kernels that are compiled."),
        (["publish", "--tag", "v1.2.3"], "Run it again: it sends what the release lacks."),
        (["coverage"], "Run it again."),
    ],
)
def test_an_interrupted_verb_says_what_running_it_again_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: list[str], said: str
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"rocm_wheels.cli.{'kernels' if verb[0] == 'compile' else 'release'}._{verb[0]}", interrupted)
    assert cli.main(verb) == 130
    assert capsys.readouterr().err == f"error: interrupted\n{said}\n"


def test_an_older_python_gets_a_message() -> None:
    code = "import sys; sys.version_info = (3, 8, 1); import rocm_wheels"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: this needs Python 3.10 or newer, {sys.executable} is Python 3.8.1\nRun it ")


def test_every_error_has_its_own_exit_code() -> None:
    codes = [error.exit_code for error in RocmWheelsError.__subclasses__()]
    assert sorted(codes) == list(range(2, 12))


def test_a_build_through_cibuildwheel_has_the_same_stages(stages: Stages, tmp_path: Path) -> None:
    made = {}
    for options in ((), ("--cibuildwheel",)):
        stages.calls.clear()
        assert (
            cli.main(["build", wheelhouse.NEWEST, "--platform", "linux", "--dist", str(tmp_path / "out"), *options])
            == 0
        )
        made[options] = [call for call in stages.calls if not call.startswith("find ")]
    assert made["--cibuildwheel",][:3] == ["toolchain.check", "repair.check", "manylinux.check"]
    renamed = {"cibuildwheel": "assemble"}
    assert made[()] == [renamed.get(call, call) for call in made["--cibuildwheel",] if call != "manylinux.check"]
    assert "cibuildwheel" in made["--cibuildwheel",]


def test_a_universal_build_is_for_the_system_here_or_for_all(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = [
        "toolchain.check", "compile", "launcher for windows", "assemble", "repair for windows", "verify for windows",
    ]  # fmt: skip
    every = ["build", wheelhouse.NEWEST, "--dist", str(tmp_path / "out"), "--platform", "all"]
    assert cli.main(every[:-2]) == 0
    linux = [*stages.calls]
    stages.calls.clear()
    capsys.readouterr()
    assert cli.main(every) == 0
    assert stages.calls == [*linux, *windows]
    lines = capsys.readouterr().out.splitlines()
    wheel = f"flash_attn-{wheelhouse.NEWEST}+rocm-cp310-abi3-win_amd64.whl"
    assert lines[-5].startswith(f"{wheel} installs on Windows alone")
    assert lines[-4:-2] == [f'    python -m pip install "{wheel}"', ""]
    assert lines[-1].endswith(f" -m pip install {tmp_path}/out/{wheel.replace('win_amd64', wheelhouse.PLATFORM)}")
    assert f"wheel    {tmp_path / 'out' / wheel}" in lines
    assert f"verdict  {tmp_path / 'out' / wheel}.verdict.json" in lines
    for platform, calls in (("windows", windows), ("linux", linux)):
        stages.calls.clear()
        assert cli.main(["build", wheelhouse.NEWEST, "--platform", platform, "--dist", str(tmp_path / "out")]) == 0
        assert stages.calls == calls


def test_build_runs_the_stages_in_order(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.setattr("rocm_wheels.wheel.closing._environments", lambda _: [])
    monkeypatch.setattr("rocm_wheels.wheel.closing.interpreters.found", lambda _: Path("/somewhere/python"))
    pip = "flash-attn-env/bin/python -m pip install"
    assert cli.main(["build", *CELL, "--dist", str(tmp_path / "out"), "--packages"]) == 0
    assert stages.calls == [
        "toolchain.check",
        "repair.check",
        "find 3.11",
        "compile",
        "planner",
        "launcher",
        "assemble",
        "repair",
        *["interface"] * 7,
        "verify",
    ]
    targets = ("gfx90a", "gfx942")
    assert stages.compiled == {
        "targets": targets, "cache": tmp_path / "cache", "jobs": 1, "backend": "ck", "toolchain": "pypi", "without": [],
        "together": True,
    }  # fmt: skip
    wheel = tmp_path / f"out/flash_attn-{wheelhouse.NEWEST}+rocm62torch2.5-cp311-cp311-manylinux_2_17_x86_64.whl"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" for gfx90a, gfx942 (no GPU found here; PYTORCH_ROCM_ARCH chooses others), 1 jobs")
    testing_with = "  testing it in clean environments with Python 3.11, torch 2.5.1"
    (testing,) = (line for line in lines if line.startswith(testing_with))
    lines.remove(testing)
    assert [line.split()[0] for line in lines[1:13]] == [
        "check",
        "compile",
        "assemble",
        "repair",
        "block-sparse-attn",
        "flash-attn-3",
        "flash-attn-4",
        "sageattention",
        "sglang-flash-rocm",
        "spas-sage-attn",
        "vllm-flash-rocm",
        "verify",
    ]
    assert all(line.split()[2] == "s" for line in lines[1:13])
    assert lines[13:] == [
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
        f"beside   pip install {tmp_path / 'out/block_sparse_attn-0.1.0+rocm62torch2.5-py3-none-any.whl'}"
        "  # block-sparse-attn: the module block_sparse_attn",
        f"beside   pip install {tmp_path / 'out/flash_attn_3-3.0.0+rocm62torch2.5-py3-none-any.whl'}"
        "  # flash-attn-3: the module flash_attn_interface",
        f"beside   pip install {tmp_path / 'out/flash_attn_4-4.0.0+rocm62torch2.5-py3-none-any.whl'}"
        "  # flash-attn-4: the module flash_attn.cute",
        f"beside   pip install {tmp_path / 'out/sageattention-2.2.0+rocm62torch2.5-py3-none-any.whl'}"
        "  # sageattention: the module sageattention",
        f"beside   pip install {tmp_path / 'out/sglang_flash_rocm-0.1.0+rocm62torch2.5-py3-none-any.whl'}"
        "  # sglang-flash-rocm: the module sglang_flash_rocm",
        f"beside   pip install {tmp_path / 'out/spas_sage_attn-0.1.0+rocm62torch2.5-py3-none-any.whl'}"
        "  # spas-sage-attn: the module spas_sage_attn",
        f"beside   pip install {tmp_path / 'out/vllm_flash_rocm-0.1.0+rocm62torch2.5-py3-none-any.whl'}"
        "  # vllm-flash-rocm: the module vllm_flash_rocm",
        "",
        "Install it here, in a new environment:",
        f"    /somewhere/python -m venv flash-attn-env && {pip} torch==2.5.1+rocm6.2"
        f" --index-url https://download.pytorch.org/whl/rocm6.2 && {pip} {wheel}",
    ]
    assert not list((tmp_path / "cache").glob("work-*"))
    assert cli.main(["build", *CELL, "--dist", str(tmp_path / "one")]) == 0
    assert [path.name for path in (tmp_path / "one").glob("*.whl")] == [wheel.name]


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
    result = sorted(path.name.split("-")[1] for path in tmp_path.glob("flash_attn-*.whl"))
    assert result == [f"{wheelhouse.NEWEST}+{label}" for label in labels]


def test_docker_builds_each_wheel_by_its_own_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Plan] = []
    codes = iter((0, 0, 3))

    def run(plan: Plan, **_: object) -> int:
        ran.append(plan)
        return next(codes)

    monkeypatch.setattr("rocm_wheels.wheel.container.run", run)
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

    monkeypatch.setattr(sys.modules["rocm_wheels.compile.toolchain"], "check", check)
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
        "--prune",
    ]
    assert cli.main(["compile", *arguments, "--cache", str(tmp_path)]) == 0
    assert stages.compiled == {
        "targets": ("gfx942", "sm_90"), "cache": tmp_path, "jobs": 2, "shard": (2, 4), "only": "fwd*",
        "backend": "triton", "toolchain": "pypi", "tiles": True, "without": [], "prune": True,
    }  # fmt: skip
    assert capsys.readouterr().out.splitlines()[0] == f"gfx942  {tmp_path / 'gfx942.zip'}"
    assert cli.main(["compile", "--target", "gfx94a"]) == 4


def test_store(stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache, dist = tmp_path / "cache", tmp_path / "dist"
    where = ["--cache", str(cache), "--dist", str(dist)]
    assert cli.main(["store", "gfx942", "sm_90", "--only", "*-bf16-*", *where]) == 0
    assert (stages.compiled["targets"], stages.compiled["only"]) == (("gfx942", "sm_90"), "*-bf16-*")
    assert capsys.readouterr().out.splitlines() == [str(dist / "gfx942.zip"), str(dist / "sm_90.zip")]
    assert (dist / "gfx942.zip").read_bytes() == (cache / "gfx942.zip").read_bytes()
    assert stages.calls == ["compile"]
    assert cli.main(["store", "gfx942", "--backend", "ck", *where]) == 0
    assert stages.calls[1] == "compile"
    assert any("planner" in call for call in stages.calls[2:])
    assert cli.main(["store", "gfx94a", *where]) == 4


def test_a_store_is_complete_or_absent(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dist, written = tmp_path / "dist", Path.write_bytes

    def fill(path: Path, content: bytes) -> int:
        if path.parent != dist:
            return written(path, content)
        written(path, content[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", fill)
    assert cli.main(["store", "gfx942", "--cache", str(tmp_path / "cache"), "--dist", str(dist)]) == 1
    assert list(dist.iterdir()) == []
    assert capsys.readouterr().err.startswith(f"error: {dist}/gfx942.zip")
    assert stages.calls == ["compile"]


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
    assert cache_directory(os.environ) == tmp_path / "cache"
    monkeypatch.setenv("ROCM_WHEELS_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory(os.environ) == tmp_path / "rocm_wheels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory(os.environ) == tmp_path / ".cache/rocm_wheels"


def test_a_user_without_a_home(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example the numeric user of a container."""
    for name in ("HOME", "ROCM_WHEELS_CACHE", "XDG_CACHE_HOME", "PYENV_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    where = ["--dist", str(tmp_path)]
    assert cli.main(["plan", *CELL]) == 0
    assert cli.main(["build", *CELL, *where]) == 10
    assert "Set ROCM_WHEELS_CACHE to a directory, or HOME." in capsys.readouterr().err
    assert stages.calls == []
    assert cli.main(["build", *CELL, *where, "--cache", str(tmp_path)]) == 0
    assert list(interpreters._candidates("3.99"))


def test_help_reads_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rocm_wheels", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for text in ("plan", "build", "compile", "inspect", "build 2.8.3 3.11 2.5.1 6.2", "--shard 2/4"):
        assert text in done.stdout


def test_the_table_of_the_package_has_every_module_once() -> None:
    rows = [row.split("|")[1:3] for row in (rocm_wheels.__doc__ or "").splitlines() if row.startswith("| ")][1:]
    named = [
        f"{'' if stage.strip() == 'common' else f'{stage.strip()}/'}{name.strip()}.py"
        for stage, modules in rows
        for name in modules.split(",")
    ]
    package = ROOT / "rocm_wheels"
    assert sorted(named) == sorted(path.relative_to(package).as_posix() for path in package.rglob("[a-z]*.py"))


WHEEL = "flash_attn-2.8.3+rocm62torch2.5triton-cp311-cp311-manylinux_2_17_x86_64.whl"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", f"none/{WHEEL}"], f"error: none/{WHEEL}: No such file or directory\n"),
        (
            ["verify", WHEEL],
            f"error: {WHEEL} is not a wheel of that name: File is not a zip file\n",
        ),
        (["repair", WHEEL], f"error: {WHEEL} is not a wheel\nName one that was built with these sources.\n"),
        (
            ["index", "--dir", "dist", "--out", f"{WHEEL}/site", "--repo", "a/b"],
            f"error: {WHEEL}/site: Not a directory\n",
        ),
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


def test_a_path_that_the_console_cannot_show_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code page 437 has no Cyrillic letters."""
    target = tmp_path / "\u0416"
    (tmp_path / "source").mkdir()
    monkeypatch.setattr(which, "run", lambda _: print(target))
    for run in (partial(cli.main, ["merge", str(tmp_path / "source"), str(target)]), partial(which.main, [])):
        stdout = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(stdout, encoding="cp437", write_through=True))
        assert not run()
        assert rb"\u0416" in stdout.getvalue()
