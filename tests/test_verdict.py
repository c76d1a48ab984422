from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import wheelhouse

from rocm_wheels.errors import DataError
from rocm_wheels.publish import assets
from rocm_wheels.wheel import verdict, verify
from rocm_wheels.wheel.verdict import Stage, Verdict


def test_verdict_json_is_checked(tmp_path: Path) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    beside = path.with_name(path.name + ".verdict.json")
    beside.write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        assets.collect(tmp_path)
    beside.write_text(json.dumps({"ok": True}))
    with pytest.raises(DataError, match="is not a verdict: it has no cell, commit, contents, failures, platform, "):
        assets.collect(tmp_path)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"ok": "yes"}, "ok"),
        ({"targets": "gfx942"}, "targets"),
        ({"targets": ["gfx942", 942]}, "targets/942"),
        ({"stages": [], "torch_source": None}, "torch_source, stages"),
        ({"stages": {"gpu": "passed"}}, "stages/gpu"),
        ({"stages": {"gpu": {"status": "passed", "seconds": "7"}}}, "stages/gpu"),
        ({"stages": {"gpu": {"status": "passed", "details": {"devices": [{"name": "MI300X"}]}}}}, "stages/gpu"),
        (
            {"stages": {"cpu numerics": {"status": "passed", "details": {"worst error": {"fp32": "1e-3"}}}}},
            "stages/cpu numerics",
        ),
        ({"stages": {}, "extra": 1}, "extra"),
        ({"benchmarks": []}, "benchmarks"),
        ({"commit": "main"}, "commit"),
        ({"size": True}, "size"),
        ({"sha256": "0"}, "sha256"),
        ({"beside": {"x.whl": ""}}, "beside"),
    ],
)
def test_fields_of_a_verdict_are_checked(tmp_path: Path, change: dict[str, Any], wrong: str) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    beside = path.with_name(path.name + ".verdict.json")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **change}))
    with pytest.raises(DataError, match=rf"is not a verdict: {wrong} has not the form that `build` writes"):
        assets.collect(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"ok": NaN}', "is not JSON: NaN is not a number"),
        ("[" * 100_000, "is not JSON: "),
        ("[]", "is not a verdict: it has no fields"),
        (" " * (1 << 21), "is not a verdict: it has 2097152 bytes"),
    ],
    ids=["NaN", "nested", "list", "large"],
)
def test_a_text_that_is_no_verdict_is_one_message(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        verdict.parse("x.verdict.json", text.encode())


@pytest.mark.parametrize("status", ["failed", "not run: why", None])
def test_a_verdict_is_not_believed(tmp_path: Path, status: str | None) -> None:
    """It says ok, but one of its stages failed, did not run, or is not there."""
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    beside = path.with_name(path.name + ".verdict.json")
    content = json.loads(beside.read_text())
    if status is None:
        del content["stages"]["import"]
    else:
        content["stages"]["import"]["status"] = status
    beside.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"says ok: true, but import: {status or 'not run: not recorded'}"):
        assets.collect(tmp_path)
    content["ok"] = False
    beside.write_text(json.dumps(content))
    with pytest.raises(DataError, match="did not pass its tests"):
        assets.collect(tmp_path)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), device=wheelhouse.MI300X)
    found = verdict.read(path.with_name(path.name + ".verdict.json"))
    for value in (found, replace(found, benchmarks={"bound": 0.05}), replace(found, beside={"x.whl": "0" * 64})):
        assert verdict.read(value.write(path)) == value


def test_gpu_stage_that_failed_fails_the_wheel() -> None:
    stages = {name: Stage(status="passed") for name in verdict.STAGES}
    assert not _verdict({**stages, verdict.GPU: Stage(status="failed")}).ok
    assert _verdict({**stages, verdict.GPU: Stage.not_run("no GPU")}).ok
    assert not _verdict({**stages, verdict.REPAIRED: Stage.not_run("why")}).ok
    assert not _verdict({verdict.GPU: Stage(status="passed")}).ok


def test_a_stage_without_tests_has_not_run() -> None:
    stages = verdict.tested_stages({"tests": [], "devices": []}, "")
    assert {stage.status for stage in stages.values()} == {"not run: no test was collected"}


def _verdict(stages: dict[str, Stage]) -> Verdict:
    return Verdict(
        wheel="",
        sha256="",
        size=0,
        contents="",
        commit="",
        cell={},
        targets=(),
        torch_source="",
        python="",
        platform="",
        stages=stages,
        tests={},
        failures=(),
    )


def test_every_wheel_test_speaks_for_a_stage() -> None:
    files = [name for names in verdict.TESTED.values() for name in names]
    assert {path.name for path in verify.WHEEL_TESTS.glob("test_*.py")} == {*files, verify.SMOKE}
