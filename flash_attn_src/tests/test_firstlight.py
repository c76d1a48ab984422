"""python -m flash_attn.firstlight on a stand-in for a GPU: what it prints, what it writes, and what it keeps."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flash_attn
import pytest
import torch
from flash_attn.attention.backends import choice
from flash_attn.core import build_info
from flash_attn.diagnosis.firstlight import command, probes, shapes, text, worker
from flash_attn.diagnosis.firstlight import providers as measured
from flash_attn.diagnosis.selftest import cases, machine, wheel
from flash_attn.diagnosis.selftest import command as selftest
from flash_attn.kernels import probe, providers
from flash_attn.kernels.tuning import fixed

NS = {"vector": 2.0, "trans": 9.5, "shared": 31.0, "cached": 50.0, "level 2": 150.0, "memory": 300.0, "barrier": 8.0}


def launched(asked: probes.Probe, turns: int) -> float:
    """Nanoseconds of a launch on a GPU with the times of NS, 100 TFLOP/s and 500 GB/s."""
    if asked.loop == "products":
        return 5000 + 2 * 32**3 * asked.per_unit * 64 * turns / 100e3
    if asked.loop == "streams":
        return 5000 + 4 * probes.STREAM * asked.per_unit * 64 * turns / 500
    return 5000 + NS[asked.name] * asked.instructions * turns


def test_the_probes_give_the_times_of_the_gpu() -> None:
    lines = {line.pop("probe"): line for line in probes.run(launched, 64)}
    assert lines == {
        **{name: {"ns": time} for name, time in NS.items()},
        "matrix rate": {"tflops": 100.0},
        "bandwidth": {"gbps": 500.0},
    }
    assert all(line.get("ns", 0) is None for line in probes.run(lambda *_: 1.0, 64) if "ns" in line)


def test_the_table_of_probes_is_the_kernels() -> None:
    assert (probes.CHAIN, probes.STREAM) == (probe.CHAIN, probe.STREAM)
    assert {fixed.CONFIGS["probe", kind].block_m for kind in probes.BLOCK} == set(probes.BLOCK.values())
    assert {one.kind for one in probes.PROBES} == set(probes.BLOCK)
    assert set(probes.LOOPS) < set(probe.probe.arg_names)
    assert text.frequency(2.0, "gfx1100") == 2.5
    assert text.frequency(2.0, "gfx942") == 2.0


def rows(forward: str) -> list[dict[str, Any]]:
    taken = dict(part.split(" ") for part in forward.split(", "))
    why = "measured here: " + ", ".join(f"{name} {float(taken[name]):.3f} ms" for name in sorted(taken, key=taken.get))
    ranked = tuple(sorted(taken, key=lambda name: float(taken[name])))
    row = providers.Row("gfx942", "fwd", ("bf16",), (65, 128), ("causal",), 129, ranked, why)
    return [json.loads(json.dumps(row._asdict()))]


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """An MI300X whose parts answer with what the fixture's dictionary says."""
    shape = shapes.shapes("gfx942")[-1].name
    speed = {"sdpa": "", "backward_ms": 30.0, "sdpa_backward_ms": 60.0}
    answers: dict[str, Any] = {
        "selftest": [
            {
                "check": "causal dim 64", "group": "masks", "ok": True, "forward": 1e-3, "backward": 1e-3,
                "limits": [1e-2, 1e-2], "kernels": [], "notes": [], "failure": "", "seconds": 0.1,
            },
            {"shape": cases.SPEEDS[0].name, "forward_ms": 2.0, "sdpa_forward_ms": 1.0, **speed},
        ],
        "probes": probes.run(launched, 64),
        "shapes": [{"shape": shape, "forward_ms": 10.0, "sdpa_forward_ms": 20.0, **speed}],
        "providers": rows("asm 1.2, triton 1.0, ck 3.0"),
        "driver": "6.12.12",
    }  # fmt: skip

    def lines_of(module: str, _gpu: str, part: str) -> Iterator[dict[str, Any]]:
        assert module == worker.__name__
        yield from answers[part]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    facts = {
        "device": "AMD Instinct MI300X", "target": "gfx942", "architecture": "gfx942:sramecc+", "torch": "2.9.0",
        "hip": "7.0", "cuda": None,
    }  # fmt: skip
    for module, name, value in (
        (flash_attn, "backend_info", lambda: {"targets": ["gfx942"], "gpu_backend": "ck"}),
        (machine, "facts", lambda _: dict(facts)),
        (machine, "chosen", lambda _: 0),
        (machine, "target", lambda _: "gfx942"),
        (wheel, "facts", lambda: {"version": "2.8.3", "label": "", "damaged": []}),
        (selftest, "run", lambda *_: (answers["selftest"], "")),
        (selftest, "lines_of", lines_of),
        (choice, "machine", lambda _: {"wheel": "1", "gpu": "MI300X", "driver": answers["driver"], "hip": "7.0"}),
    ):
        monkeypatch.setattr(module, name, value)
    yield answers
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    choice._measured.cache_clear()
    choice.find.cache_clear()


def test_a_run_says_what_a_user_wants(gpu: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert command.main(["--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "masks                   1 of 1            10 %" in said
    assert "exchange through LDS                                      31.0 ns       62 cycles of 2.00 GHz" in said
    assert "bandwidth                                                500.0 GB/s" in said
    assert "879.6 TFLOP/s forward; published: 585 (AITER assembly" in said
    assert f"slower than SDPA by 2.00: forward of {cases.SPEEDS[0].name}. Keep SDPA for such calls" in said
    assert "faster here: fwd bf16 d128 causal: triton 1.000 ms, asm 1.200 ms, ck 3.000 ms" in said
    assert "-m flash_attn.firstlight --keep` lets calls take them" in said
    report = json.loads(path.read_text(encoding="utf-8"))
    assert (report["firstlight"], report["ok"], report["probes"]) == (command.FORMAT, True, gpu["probes"])
    assert str(Path.home()) not in path.read_text(encoding="utf-8")
    gpu["probes"] = [*gpu["probes"][:2], {"end": "the process ended with SIGSEGV"}]
    assert command.main(["--json", str(path)]) == 1
    assert "FAILED  probes: the process ended with SIGSEGV" in capsys.readouterr().out


def test_a_shape_that_fails_is_not_right_and_one_without_memory_is(
    gpu: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--json", str(tmp_path / "report.json")]
    gpu["shapes"][0] = {"shape": gpu["shapes"][0]["shape"], "failure": "OutOfMemoryError: 2 GiB"}
    assert command.main(arguments) == 0
    assert "not measured: it needs more memory than the GPU has free" in capsys.readouterr().out
    gpu["shapes"][0]["failure"] = "RuntimeError: lost"
    assert command.main(arguments) == 1


def test_ctrl_c_and_the_end_of_the_minutes_keep_what_was_measured(
    gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lines = tmp_path / "report.json", selftest.lines_of

    def interrupted(module: str, index: str, part: str) -> Iterator[dict[str, Any]]:
        yield next(iter(lines(module, index, part)))
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "lines_of", interrupted)
    assert command.main(["--json", str(path)]) == 1
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["probes"] == gpu["probes"][:1]
    assert report["troubles"] == dict.fromkeys(worker.PARTS, selftest.INTERRUPTED)
    assert "FAILED  shapes: interrupted" in capsys.readouterr().out
    monkeypatch.setattr(selftest, "lines_of", lines)
    assert command.main(["--json", str(path), "--minutes", "1e-9"]) == 1
    report = json.loads(path.read_text(encoding="utf-8"))
    assert (report["probes"], report["shapes"]) == (gpu["probes"][:1], [])
    assert "minutes of --minutes are over" in report["troubles"]["providers"]


def test_a_file_with_some_kernels_is_for_its_gpu(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu
    monkeypatch.setattr(build_info, "load", lambda: build_info.BuildInfo(some_kernels=True))
    monkeypatch.setattr(machine, "target", lambda _: "gfx1201")
    with pytest.raises(SystemExit):
        command.main([])
    assert "this file is for gfx942, and GPU 0 is a gfx1201" in capsys.readouterr().err


def test_choices_are_kept_for_this_machine_alone(gpu: dict[str, Any], tmp_path: Path) -> None:
    call = ("gfx942", "fwd", "bf16", 128, "causal", 4096)
    arguments = ["--json", str(tmp_path / "report.json"), "--keep"]
    command.main(arguments[:-1])
    assert choice.find(*call).sources[0] == "asm"  # nothing is kept that the user did not ask for
    command.main(arguments)
    assert choice.find(*call).sources == ("triton", "asm", "ck")
    _forget()
    gpu["driver"] = "6.14.1"
    with pytest.warns(RuntimeWarning, match="measured before driver changed.*firstlight --keep"):
        assert choice.find(*call).sources[0] == "asm"
    gpu["providers"] = rows("asm 1.02, triton 1.0, ck 3.0")  # within the noise
    choice.cache_file("gfx942").unlink()
    _forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        command.main(arguments)
    assert not choice.cache_file("gfx942").exists()


def test_a_machine_without_a_gpu_is_sent_to_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([])
    assert "flash_attn.doctor" in capsys.readouterr().err


def test_providers_are_ranked_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider without a kernel for a call is left out of its row."""
    from flash_attn.attention.backends import torch as served

    class Asm:
        forward = staticmethod(served.forward)

        def backward(self, gradients: Any) -> None:
            raise NotImplementedError(gradients)

    backends = {"asm": Asm(), "ck": SimpleNamespace(**vars(served)), "triton": SimpleNamespace(**vars(served))}
    speeds = {id(backends["asm"]): 1.0, id(backends["ck"]): 3.0, id(backends["triton"]): 2.0}

    def milliseconds(call: Any, *_: Any) -> float:
        call()
        return speeds[id(call.args[0])]

    for name, value in {"TOKENS": 8, "DIMS": (64, 128), "providers": lambda: backends}.items():
        monkeypatch.setattr(measured, name, value)
    monkeypatch.setattr(measured.speed, "milliseconds", milliseconds)
    rows = list(measured.rows("gfx942", "cpu"))
    assert len(rows) == 2 * 2 * 3 * 2
    assert rows[0].sources == ("asm", "triton", "ck")
    assert rows[0].why == "measured here: asm 1.000 ms, triton 2.000 ms, ck 3.000 ms"
    assert rows[1][:6] == ("gfx942", "bwd", ("bf16",), (1, 64), ("plain",), 129)
    assert rows[1].sources == ("triton", "ck")
    assert {row.dims for row in rows} == {(1, 64), (65, 128)}
