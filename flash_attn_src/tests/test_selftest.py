"""python -m flash_attn.selftest: it passes here, it fails if a result is wrong, and its report has no personal data."""

from __future__ import annotations

import base64
import getpass
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flash_attn
import pytest
import torch
from flash_attn.core import build_info, device
from flash_attn.diagnosis import endings
from flash_attn.diagnosis.selftest import attention, cases, checks, command, layers, properties, report, wheel, worker
from flash_attn.kernels.variants import Variant

_SOURCE = Path(__file__).resolve().parent.parent
_CASES = {case.name: case for case in cases.cases()}


def first(check: str, dtype: str = "bf16") -> cases.Case:
    """The first case of a check that runs on a CPU."""
    return next(case for case in cases.cases() if case.check == check and case.on_cpu and case.dtype == dtype)


def test_the_cases_are_whole() -> None:
    every = cases.cases()
    assert len(_CASES) == len(every)
    assert {case.check for case in every} == set(checks.CHECKS)
    assert {case.group for case in every} == {case.group for case in every if case.on_cpu} == set(cases.GROUPS)
    assert len(cases.SPEEDS) == 6
    assert len({shape.name for shape in (*cases.SPEEDS, *cases.CPU_SPEEDS)}) == 7


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], str]:
    """A whole run on the CPU, its report, and the report's text."""
    path = tmp_path_factory.mktemp("selftest") / "report.json"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("FLASH_ATT", "TRITON"))}
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn.selftest", "--cpu", "--json", path],
        env={**variables, "PYTHONPATH": str(_SOURCE), "OMP_NUM_THREADS": "1", "HSA_OVERRIDE_GFX_VERSION": "10.3.0"},
        capture_output=True,
        text=True,
        check=False,
    )
    text = path.read_text(encoding="utf-8") if path.exists() else "{}"
    return done, json.loads(text), text


def test_everything_is_right_on_a_cpu(run: tuple[subprocess.CompletedProcess[str], dict[str, Any], str]) -> None:
    done, result, text = run
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything is right" in done.stdout
    assert result["ok"] is True
    assert [line["check"] for line in result["checks"]] == [
        case.name for case in cases.cases(cases.CPU_REPEATS) if case.on_cpu
    ]
    assert all(line["ok"] for line in result["checks"])
    assert [line["shape"] for line in result["speed"]] == [shape.name for shape in cases.CPU_SPEEDS]
    assert all(line["forward_ms"] > 0 and line["backward_ms"] > 0 for line in result["speed"])
    assert result["machine"]["torch"] == torch.__version__
    assert result["machine"]["variables"] == {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}
    assert len(text) < 60_000 / 2  # a full report has 2.3 times as many lines, and an issue takes 65536 characters
    assert "sent" not in done.stdout
    assert "paste" not in done.stdout  # a run on a CPU proves nothing that others need


def test_the_kernels_that_ran_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the kernels of this check are named, not those of earlier checks."""

    def computed(*_: Any) -> tuple[float, float]:
        device.kernels[0, Variant("fwd", "bf16", 64, "causal")] = SimpleNamespace(launch=None)
        device.kernels[0, "ck-fwd-bf16-d64"] = SimpleNamespace(launch=None)
        device.kernels[0, "ck"] = True
        return 1e-3, 1e-3

    monkeypatch.setattr(checks, "run", computed)
    device.kernels[0, "an earlier one"] = SimpleNamespace(launch=None)
    line = worker.checked(first("attention"), "cpu")
    device.clear_kernels()
    assert line["kernels"] == ["ck-fwd-bf16-d64", Variant("fwd", "bf16", 64, "causal").name]


def test_a_report_contains_no_personal_data(run: tuple[subprocess.CompletedProcess[str], dict[str, Any], str]) -> None:
    text = run[2]
    for name in (platform.node(), str(Path.home()), str(_SOURCE), sys.executable):
        assert name not in text
    if getpass.getuser() != "root":
        assert getpass.getuser() not in text


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("OSError: /home/me/env/lib/x.so: no such file", "OSError: .../x.so: no such file"),
        ("no ~/secret/place here", "no .../place here"),
        ("a 1/2 and gfx942:sramecc+:xnack-", "a 1/2 and gfx942:sramecc+:xnack-"),
    ],
)
def test_messages_lose_their_directories(said: str, shown: str) -> None:
    assert worker.private(said) == shown
    assert len(worker.private("x" * 10_000)) == 300


def slightly_wrong(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, and a tenth of its largest value more in one place."""
    change = torch.zeros_like(tensor)
    change.view(-1)[-1] = tensor.detach().abs().max() / 10
    return tensor + change


@pytest.mark.parametrize(
    ("check", "module", "name"),
    [
        ("attention", attention._api, "flash_attn_func"),
        ("dominated", attention._api, "flash_attn_func"),
        ("packed", attention._api, "flash_attn_varlen_func"),
        ("cache", attention._api, "flash_attn_with_kvcache"),
        ("latent", attention._api, "flash_attn_with_kvcache"),
        ("rotary", layers, "apply_rotary_emb"),
        ("rms_norm", layers, "rms_norm_fn"),
        ("layer_norm", layers, "layer_norm_fn"),
    ],
)
@pytest.mark.parametrize("way", ["forward", "backward", "nan"])
def test_a_wrong_result_fails(check: str, module: Any, name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., torch.Tensor] = getattr(module, name)

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        out = right(*args, **options)
        if way == "backward":
            out = out.clone()
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient * 1.1)
            return out
        return slightly_wrong(out) if way == "forward" else out * float("nan")

    monkeypatch.setattr(module, name, wrong)
    line = worker.checked(first(check), "cpu")
    if way == "backward" and check in ("cache", "latent"):  # they have none
        assert line["ok"] is True
        return
    assert line["ok"] is False
    assert line["failure"] == (
        "the result holds values that are not finite" if way == "nan" else "the error is larger than allowed"
    )
    assert (line["forward"] is None) == (way == "nan")


def test_a_cache_that_changes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flash_attn.flash_attn_with_kvcache

    def careless(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, **options: Any) -> Any:
        out = right(q, k_cache, v_cache, *args, **options)
        v_cache[0, 0] = 0
        return out

    monkeypatch.setattr(flash_attn, "flash_attn_with_kvcache", careless)
    assert "keys or values of cache 0 have changed" in worker.checked(first("cache"), "cpu")["failure"]


def test_dropout_that_is_no_dropout_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flash_attn.flash_attn_func
    said = []
    for change in ({"dropout_p": 0.12}, {"dropout_p": 0.0}):
        monkeypatch.setattr(flash_attn, "flash_attn_func", lambda *a, c=change, **o: right(*a, **{**o, **c}))
        said.append(worker.checked(first("dropout"), "cpu")["failure"])

    def unseeded(*args: Any, **options: Any) -> Any:
        torch.seed()
        return right(*args, **options)

    monkeypatch.setattr(flash_attn, "flash_attn_func", unseeded)
    said.append(worker.checked(first("dropout"), "cpu")["failure"])
    assert [each.startswith("AssertionError: 0.") for each in said] == [True, True, False]
    assert "the same seed drops other weights" in said[2]


def test_bits_that_differ_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flash_attn.flash_attn_func
    calls: list[int] = []

    def drifting(*args: Any, **options: Any) -> Any:
        calls.append(0)
        return right(*args, **options) * (1 + 0.01 * len(calls))

    monkeypatch.setattr(properties._api, "flash_attn_func", drifting)
    assert "out differs between two runs" in worker.checked(first("repeats"), "cpu")["failure"]


def flushed(tensor: torch.Tensor) -> torch.Tensor:
    """As the matrix instructions of MI200 take fp16: subnormal numbers are 0."""
    return torch.where(tensor.abs() < torch.finfo(torch.float16).tiny, 0.0, tensor)


def attention_of_mi200(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, s_aux: torch.Tensor | None = None
) -> torch.Tensor:
    """Weights relative to the largest score of their row, and gradients of the result, are flushed."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -1e30)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.float()[None, :, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    out = torch.einsum("bhqk,bkhd->bqhd", flushed(weights)[..., : k.shape[1]], v.float())
    out = (out / weights.sum(-1).transpose(1, 2)[..., None]).to(q.dtype)
    out.register_hook(flushed)
    return out


@pytest.mark.parametrize("name", ["dout of 1e-5, dim 64", "one dominating key, dim 64", "dominating sinks, dim 64"])
def test_the_flush_of_mi200_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = _CASES["causal dim 64 fp16"]
    monkeypatch.setattr(attention._api, "flash_attn_func", attention_of_mi200)
    assert worker.checked(ordinary, "cpu")["ok"] is True  # which other checks do not see
    line = worker.checked(_CASES[f"{name} fp16"], "cpu")
    assert line["failure"] == "the error is larger than allowed"
    assert max(line["forward"], line["backward"]) > 0.5


@pytest.mark.parametrize("fault", ["one bit of out", "NaN in lse", "every run wrong", "none"])
def test_a_forward_that_changes_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gfx1150 did: NaN in the log-sum-exp of some runs. Many runs are needed to see it, so all are looked at."""
    right, runs = flash_attn.flash_attn_func, 0

    def changing(*args: Any, **options: Any) -> Any:
        nonlocal runs
        runs += 1
        out, lse, mask = right(*args, **options)
        if fault == "one bit of out" and runs == 7:
            out.view(torch.int32).view(-1)[5] ^= 1
        if fault == "NaN in lse" and runs == 7:
            lse[0, 0, 3] = float("nan")
        return out * 1.1 if fault == "every run wrong" else out, lse, mask

    monkeypatch.setattr(properties._api, "flash_attn_func", changing)
    case = replace(first("steady", "fp32"), options={"head_dim": 80, "times": 7})
    line = worker.checked(case, "cpu")
    assert runs == 7
    assert line["ok"] is (fault == "none")
    expected = {"one bit of out": "out differs in 1 values", "NaN in lse": "the log-sum-exp differs in 1 values"}
    assert expected.get(fault, "the error is larger" if fault == "every run wrong" else "") in line["failure"]


def test_a_gpu_runs_the_forward_a_thousand_times() -> None:
    (on_gpu,) = (step.what for step in worker.steps(False, cases.REPEATS) if "equal bits in 1000 runs" in step.name)
    assert isinstance(on_gpu, cases.Case)
    assert (on_gpu.dtype, dict(on_gpu.options)) == ("fp32", {"head_dim": 80, "times": 1000})


def test_checks_that_a_gpu_does_not_support_are_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("FP8: gfx90a has no such matrix units")

    monkeypatch.setattr(flash_attn, "flash_attn_fp8_func", cannot)
    line = worker.checked(first("fp8"), "cpu")
    assert line["ok"] is None
    assert not report.failed(line)
    assert "not for this GPU" in report.table(a_report([line]))


def a_report(lines: list[dict[str, Any]], speed: Any = (), trouble: str = "", damaged: Any = ()) -> dict[str, Any]:
    machine = {"hip": "6.2", "cuda": None, "torch": "2.5.1+rocm6.2", "device": "MI300X", "architecture": "gfx942"}
    wheel_ = {"version": "2.8.3", "label": "rocm", "gpu_backend": "ck", "damaged": list(damaged)}
    return report.build(machine, wheel_, lines, speed, trouble)


@pytest.mark.parametrize(
    ("flops", "text"), [(2.7e14, " 270.0 TFLOP/s"), (4.2e10, "  42.0 GFLOP/s"), (3e6, "   3.0 MFLOP/s")]
)
def test_no_speed_is_rounded_to_zero(flops: float, text: str) -> None:
    assert report._rate(flops) == text


def test_the_table_says_what_failed() -> None:
    good = {"check": "a", "group": "masks", "ok": True, "forward": 6e-3, "backward": None, "limits": [1.2e-2, 2.4e-2]}
    bad = {**good, "check": "b", "ok": False, "forward": None, "failure": "the process ended with signal 11"}
    slow = {"shape": cases.SPEEDS[0].name, "failure": "OutOfMemoryError: no"}
    fast = {"shape": cases.SPEEDS[1].name, "forward_ms": 1.0, "backward_ms": 4.0, "sdpa": "no kernel"}
    fast |= {"sdpa_forward_ms": None, "sdpa_backward_ms": None}
    result = a_report([good, bad], [slow, fast], damaged=["flash_attn/api.py"])
    assert result["ok"] is False
    page = report.table(result)
    for words in (
        "2.8.3+rocm",
        "1 of 2",
        "50 %",
        "FAILED  b: the process ended with signal 11",
        "FAILED  4 16 4096 128 full: OutOfMemoryError: no",
        "274.9 TFLOP/s",
        "cannot run",
        "FAILED  flash_attn/api.py is not the file of the wheel: reinstall it",
    ):
        assert words in page
    assert a_report([good])["ok"] is True
    assert a_report([])["ok"] is False
    assert a_report([good], trouble="it ended")["ok"] is False


def _python(tmp_path: Path, script: str) -> str:
    """A stand-in for the interpreter of the worker; $4 is the number of steps that are done."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_step_that_ends_the_process_fails_and_the_rest_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = worker.steps(True, 2)[:4]
    monkeypatch.setattr(command, "steps", lambda *_: planned)
    line = '{"check": "x", "ok": true}'
    script = f"""
echo '{{"begin": "x"}}'
echo '{line}'
if [ "$6" = 0 ]; then echo "/home/me/x.cpp: memory access fault" >&2; kill -11 $$; fi
echo '{line}'
"""
    monkeypatch.setattr(command.sys, "executable", _python(tmp_path, script))
    lines, trouble = command.run("cpu")
    assert [each["ok"] for each in lines] == [True, False, True, True]
    assert lines[1]["check"] == planned[1].name
    assert lines[1]["failure"] == "the process ended with signal 11 (SIGSEGV): .../x.cpp: memory access fault"
    assert trouble == ""


def test_three_ends_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.sys, "executable", _python(tmp_path, "exit 3"))
    lines, trouble = command.run("cpu")
    assert [each["failure"] for each in lines] == ["the process ended with exit code 3"] * 3
    assert "ended 3 times" in trouble


def test_a_silent_step_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "steps", lambda *_: worker.steps(True, 2)[:1])
    monkeypatch.setattr(command, "_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(command.sys, "executable", _python(tmp_path, "sleep 60"))  # a child
    started = time.monotonic()
    lines, _ = command.run("cpu")
    assert lines[0]["failure"] == "it printed nothing for 0.5 s"
    assert time.monotonic() - started < 30


def test_a_child_of_a_dead_worker_does_not_delay_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's compiler, for example. The child keeps the pipes open."""
    monkeypatch.setattr(command, "steps", lambda *_: worker.steps(True, 2)[:1])
    monkeypatch.setattr(command.sys, "executable", _python(tmp_path, "sleep 60 &\nkill -11 $$"))
    started = time.monotonic()
    lines, _ = command.run("cpu")
    assert lines[0]["failure"] == "the process ended with signal 11 (SIGSEGV)"
    assert time.monotonic() - started < 30


def test_how_a_process_ended() -> None:
    assert endings.ending(-9) == "signal 9 (SIGKILL)"
    assert endings.ending(-99) == "signal 99"
    assert endings.ending(3221225477) == "0xC0000005 (access violation)"
    assert endings.ending(0xC0000142) == "0xC0000142"
    assert endings.ending(3) == "exit code 3"


def test_no_step_begins_after_its_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = worker.steps(True, 2)[:3]
    monkeypatch.setattr(command, "steps", lambda *_: steps)
    lines = [line for step in steps for line in ({"begin": step.name}, {"check": step.name, "ok": True})]
    clock = iter((0.0, 1.0, 59.0, 61.0))
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(command, "lines_of", lambda *_: iter(lines))
    done, trouble = command.run("cpu", minutes=1)
    assert [line["check"] for line in done] == [step.name for step in steps[:2]]
    assert trouble == "1 minutes are over: 1 of 3 steps did not run"


@pytest.mark.skipif(sys.platform != "linux", reason="rocjitsu runs on Linux alone")
def test_an_emulated_gpu_is_named_and_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator's library is preloaded, as its command line does it. Any library of that name stands for it."""
    compiled = next(Path(torch.__file__).parent.glob("lib/libshm.so"))
    copied = tmp_path / "librocjitsu.so"
    copied.write_bytes(compiled.read_bytes())
    code = (
        "import json; from flash_attn.diagnosis.selftest import machine, worker;"
        " shapes = [step.name for step in worker.steps(False, 2) if not hasattr(step.what, 'group')];"
        " print(json.dumps([machine.facts(None).get('emulator'), len(shapes)]))"
    )
    variables = {**os.environ, "PYTHONPATH": str(_SOURCE), "LD_LIBRARY_PATH": str(compiled.parent)}
    result = {}
    for preloaded in ("", str(copied)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**variables, "LD_PRELOAD": preloaded},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        result[bool(preloaded)] = json.loads(done.stdout)
    assert result == {False: [None, len(cases.SPEEDS)], True: ["rocjitsu", 0]}
    monkeypatch.setattr(type(command.PLATFORM), "emulator", lambda _: "rocjitsu")
    given: list[Any] = []
    monkeypatch.setattr(command, "steps", lambda on_cpu, repeats: given.append((on_cpu, repeats)) or [])
    command.run("0")
    assert given == [(False, cases.CPU_REPEATS)]


def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--gpu", "7"], "--gpu 7: torch sees "),
        (["--repeats", "1"], "--repeats 1: two runs are the fewest"),
        (["--minutes", "0"], "--minutes 0: give a number above 0"),
        (["--json", str(tmp_path / "none" / "x.json")], "none/x.json: No such file or directory, give a file that can"),
        (["--json", str(tmp_path)], ": Is a directory, give a file that can"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(options)
        assert words in capsys.readouterr().err


_RECORD = """\
flash_attn/__init__.py,sha256=AAA,10
flash_attn-2.8.3+rocm.dist-info/METADATA,sha256=BBB,20
flash_attn-2.8.3+rocm.dist-info/RECORD,,
"""


def test_the_digest_is_of_the_wheel_and_not_of_the_installer() -> None:
    digest = wheel.contents(_RECORD)
    installed = (
        "flash_attn-2.8.3+rocm.dist-info/INSTALLER,sha256=CCC,4\nflash_attn/__pycache__/__init__.cpython-311.pyc,,\n"
        "flash_attn-2.8.3+rocm.dist-info/direct_url.json,sha256=DDD,4\n" + "\n".join(reversed(_RECORD.splitlines()))
    )
    assert wheel.contents(installed) == digest
    assert wheel.contents(_RECORD.replace("AAA", "AAB")) != digest


def test_an_installed_wheel_is_compared_with_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "api.py").write_text("right")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"right").digest()).rstrip(b"=").decode()
    record = f"flash_attn/api.py,sha256={digest},5\nflash_attn/gone.py,sha256={digest},5\n"
    texts = {"RECORD": record, "direct_url.json": '{"archive_info": {"hashes": {"sha256": "f00"}}}'}
    there = SimpleNamespace(read_text=texts.get, locate_file=tmp_path.joinpath)
    monkeypatch.setattr(wheel.metadata, "distribution", lambda _: there)
    build = replace(build_info.BuildInfo(), label="rocm", targets=("gfx942",))
    monkeypatch.setattr(wheel.build_info, "load", lambda: build)
    assert wheel.facts()["contents"] == ""  # another flash_attn than this one is installed
    monkeypatch.setattr(wheel, "_is_imported", lambda _: True)
    result = wheel.facts()
    assert result["contents"] == wheel.contents(record)
    assert result["sha256"] == "f00"
    assert result["damaged"] == ["flash_attn/gone.py"]
    (tmp_path / "flash_attn" / "api.py").write_text("wrong")
    assert wheel.facts()["damaged"] == ["flash_attn/api.py", "flash_attn/gone.py"]


def test_the_address_for_reports_comes_from_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(_: str) -> Any:
        raise metadata.PackageNotFoundError

    urls = ["Documentation, https://x/", "Repository, https://github.com/owner/name/"]
    monkeypatch.setattr(wheel.metadata, "metadata", lambda _: SimpleNamespace(get_all=lambda _: urls))
    assert wheel.repository() == "https://github.com/owner/name"
    monkeypatch.setattr(wheel.metadata, "metadata", lambda _: SimpleNamespace(get_all=lambda _: None))
    assert wheel.repository() == ""
    monkeypatch.setattr(wheel.metadata, "metadata", lacking)
    assert wheel.repository() == ""
