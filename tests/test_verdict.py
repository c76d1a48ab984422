from __future__ import annotations

import json
import random
import shutil
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import wheelhouse
from mutations import changed

from rocm_wheels.errors import DataError, PublishFailed, RocmWheelsError
from rocm_wheels.matrix.versions import load
from rocm_wheels.publish import admission, assets, directory, index, notes
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.publish.home import Home
from rocm_wheels.wheel import build, contents, verdict, verify
from rocm_wheels.wheel.verdict import Stage, Verdict

HOME = Home.of(repository="owner/name", url="https://x.org/")
MACHINE = {
    "device": "AMD Instinct MI300X",
    "torch": "2.5.1",
    "flash_attn": "2.8.3+rocm",
    "python": "3.11.7",
    "cuda": None,
}
COMPARED = {
    **dict.fromkeys(("device", "benchmark", "figure", "baseline_date", "status"), "x"),
    **dict.fromkeys(("baseline", "median", "ratio", "low", "high"), 1.5),
}
MEASURED = {"environment": MACHINE, "bound": 0.05, "regressions": 0, "comparisons": [COMPARED], "missing": ["x"]} | {
    "without_baseline": []
}


def test_verdict_json_is_checked(tmp_path: Path) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    beside = path.with_name(path.name + ".verdict.json")
    beside.write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        assets.collect(tmp_path)
    beside.write_text(json.dumps({"ok": True}))
    message = "is not a verdict as `build` writes it: wheel is missing; torch_source is missing; "
    with pytest.raises(DataError, match=message):
        assets.collect(tmp_path)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"ok": "yes"}, "ok: 'yes' has"),
        ({"targets": "gfx942"}, "targets: 'gfx942' is no list"),
        ({"targets": ["gfx942", 942]}, "targets/1: 942 has"),
        ({"stages": [], "torch_source": None}, "torch_source: None has another form; stages: list of 0 is no object"),
        ({"stages": {"gpu": "passed"}}, "stages/gpu: 'passed' is no object"),
        ({"stages": {"smoke": {"status": "passed"}}}, "stages/'smoke' is unknown"),
        ({"stages": {"gpu": {"status": "good"}}}, "stages/gpu/status: 'good' has"),
        ({"stages": {"gpu": {"status": "passed", "seconds": "7"}}}, "stages/gpu/seconds: '7' has"),
        (
            {"stages": {"gpu": {"status": "passed", "details": {"devices": [{"name": "MI300X"}]}}}},
            "stages/gpu/details/devices/0/target is missing",
        ),
        (
            {"stages": {"cpu numerics": {"status": "passed", "details": {"worst error": {"fp32": "1e-3"}}}}},
            "stages/cpu numerics/details/worst error/fp32: '1e-3' has",
        ),
        ({"stages": {"gpu": {"status": "passed", "details": {"\x00": 1}}}}, r"stages/gpu/details/'\\x00' is unknown"),
        ({"stages": {}, "extra": 1}, "'extra' is unknown"),
        ({"gpus": {"MI300X": {"stages": {}, "failures": []}}}, "gpus/MI300X/stages/gpu is missing"),
        ({"benchmarks": []}, "benchmarks: list of 0 is no object"),
        ({"benchmarks": {**MEASURED, "comparisons": [{}]}}, "benchmarks/comparisons/0/device is missing"),
        ({"benchmarks": {**MEASURED, "environment": {}}}, "benchmarks/environment/device is missing"),
        ({"size": 10**400}, "size: a number of more than 12 digits"),
        ({"stages": {"gpu": {"status": "passed", "seconds": 10**400}}}, "stages/gpu/seconds: a number"),
        ({"python": "\ud800"}, "python: "),
        ({"targets": ["gfx942\n"]}, r"targets/0: 'gfx942\\n' has"),
        ({"\ud800": 1}, r"'\\ud800' is unknown"),
        ({"commit": "main"}, "commit: 'main' has"),
        ({"size": True}, "size: True has"),
        ({"sha256": "0"}, "sha256: '0' has"),
        ({"beside": {"x.whl": ""}}, "beside/x.whl: '' has"),
    ],
)
def test_fields_of_a_verdict_are_checked(tmp_path: Path, change: dict[str, Any], wrong: str) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    beside = path.with_name(path.name + ".verdict.json")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **change}))
    with pytest.raises(DataError, match=f"as `build` writes it: {wrong}"):
        assets.collect(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"ok": NaN}', "is not JSON: NaN is not a number"),
        ("[" * 100_000, "is not JSON: "),
        ("[]", "is not a verdict as `build` writes it: it: list of 0 is no object"),
        ("[" * 200 + "]" * 200, "has more than 40 objects inside each other"),
        ('"\\xff', "is not JSON: "),
        (" " * (1 << 21), "has 2097152 bytes, it may have 1048576"),
    ],
    ids=["NaN", "nested", "list", "deep", "no text", "large"],
)
def test_a_text_that_is_no_verdict_is_one_message(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        verdict.parse("x.verdict.json", text.encode())


@pytest.mark.parametrize("status", ["failed", "not run: why", None])
def test_a_verdict_is_not_believed(tmp_path: Path, status: str | None) -> None:
    """It says ok, but one of its stages failed, did not run, or is missing."""
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


def test_a_written_verdict_reads_back_unchanged(tmp_path: Path) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), device=wheelhouse.MI300X)
    result = verdict.read(path.with_name(path.name + ".verdict.json"))
    for value in (result, replace(result, benchmarks=MEASURED), replace(result, beside={"x.whl": "0" * 64})):
        assert verdict.read(value.write(path)) == value


def test_gpu_stage_that_failed_fails_the_wheel() -> None:
    stages = {name: Stage(status="passed") for name in verdict.STAGES}
    assert not _verdict({**stages, verdict.GPU: Stage(status="failed")}).ok
    assert _verdict({**stages, verdict.GPU: Stage.not_run("no GPU")}).ok
    assert not _verdict({**stages, verdict.REPAIRED: Stage.not_run("why")}).ok
    assert not _verdict({verdict.GPU: Stage(status="passed")}).ok


def test_a_failed_test_fails_a_wheel_whose_stages_all_passed() -> None:
    """A test can fail outside of the files of a stage, such as a test of a combination."""
    passed = _verdict({name: Stage(status="passed") for name in verdict.STAGES})
    assert passed.ok
    failed = replace(passed, failures=("test_combinations.py::test_it",))
    assert failed.unmet() == []
    assert not failed.ok
    assert ": failed\n" in failed.summary()
    report = verdict.GpuReport(stages={verdict.GPU: Stage(status="passed")}, failures=("test_gpu.py::test_it",))
    assert not report.ok
    assert [name for name, _ in replace(passed, gpus={"MI300X": report}).unmet()] == ["gpu on MI300X"]


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


def test_any_change_of_a_verdict_is_read_or_is_an_error_of_ours(tmp_path: Path) -> None:
    """A report that can be read can be published: its notes and its index are rendered, and it is written again."""
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), device=wheelhouse.MI300X)
    beside = path.with_name(path.name + ".verdict.json")
    whole = json.loads(beside.read_text()) | {"benchmarks": MEASURED}
    read = 0
    for seed in range(250):
        beside.write_text(json.dumps(changed(whole, seed)))
        try:
            local = directory.read(tmp_path)
            verdict.read(beside).write(path)
        except DataError as error:
            str(error).encode()
            continue
        read += 1
        notes.render(local.wheels, tag="v1.0.0", index_url="https://x.org/", new="", repository="owner/name").encode()
        site = Catalogue(wheels=local.wheels)
        index.build(site, tmp_path / "site", versions=load(), home=HOME, files=local.files)
        shutil.rmtree(tmp_path / "site")
    assert read > 5


def _damaged(content: bytes, seed: int) -> bytes:
    """JSON with a changed value, or other bytes."""
    if content.startswith(b"{"):
        return json.dumps(changed(json.loads(content), seed)).encode()
    chance = random.Random(seed)
    place = chance.randrange(len(content))
    return content[:place] + chance.randbytes(3) + content[place + chance.randrange(4) :]


@pytest.mark.parametrize(
    "member", ["flash_attn/_build_info.json", "flash_attn-2.8.3+rocm62torch2.5triton.dist-info/RECORD"]
)
def test_any_damage_of_a_wheel_gives_a_clear_error(tmp_path: Path, member: str) -> None:
    path = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (wheel,) = directory.read(tmp_path).wheels
    for seed in range(100):
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content if name != member else _damaged(content, seed))
        with suppress(DataError, PublishFailed):
            admission.check(contents.read(path), wheel, commit=None)
        with suppress(RocmWheelsError):
            build.plan_of(path)
