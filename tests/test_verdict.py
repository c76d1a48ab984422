from __future__ import annotations

import json
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
    with pytest.raises(DataError, match="is not a verdict: it has no sha256, stages, targets, torch_source"):
        assets.collect(tmp_path)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"ok": "yes"}, "ok"),
        ({"targets": "gfx942"}, "targets"),
        ({"targets": ["gfx942", 942]}, "targets/942"),
        ({"stages": [], "torch_source": None}, "stages, torch_source"),
        ({"stages": {"gpu": "passed"}}, "stages/gpu"),
        ({"stages": {"gpu": {"status": "passed", "seconds": "7"}}}, "stages/gpu"),
        ({"stages": {"gpu": {"status": "passed", "details": {"devices": [{"name": "MI300X"}]}}}}, "stages/gpu"),
        ({"stages": {"cpu": {"status": "passed", "details": {"worst error": {"fp32": "1e-3"}}}}}, "stages/cpu"),
        ({"benchmarks": []}, "benchmarks"),
    ],
)
def test_fields_of_a_verdict_are_checked(tmp_path: Path, change: dict[str, Any], wrong: str) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    beside = path.with_name(path.name + ".verdict.json")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **change}))
    with pytest.raises(DataError, match=rf"is not a verdict: {wrong} has not the form that `build` writes"):
        assets.collect(tmp_path)


def test_gpu_stage_that_failed_fails_the_wheel() -> None:
    stages = {verdict.REPAIRED: Stage(status="passed"), verdict.GPU: Stage(status="failed")}
    assert not _verdict(stages).ok
    assert _verdict({**stages, verdict.GPU: Stage.not_run("no GPU")}).ok
    assert not _verdict({**stages, verdict.REPAIRED: Stage.not_run("why"), verdict.GPU: Stage(status="passed")}).ok


def test_a_stage_without_tests_has_not_run() -> None:
    stages = verdict.tested_stages({"tests": [], "devices": []}, "")
    assert {stage.status for stage in stages.values()} == {"not run: no test was collected"}


def _verdict(stages: dict[str, Stage]) -> Verdict:
    return Verdict(
        wheel="",
        sha256="",
        size=0,
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
