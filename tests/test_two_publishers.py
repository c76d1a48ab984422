"""Two runs publish under one tag at the same time, one of them perhaps on a laptop: sums and test reports stay
correct.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_parts
import pytest
import wheelhouse
from fake_github import Hub
from publishing import publish, state
from wheelhouse import COMMIT, H200, MI300X, W7900

from rocm_wheels.errors import PublishFailed
from rocm_wheels.publish import assets, github, measured
from rocm_wheels.wheel import verdict
from rocm_wheels.wheel.verdict import FAILED, GPU, PASSED, Stage, Verdict

CELL = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
OTHER = wheelhouse.cell("2.8.3 3.12 2.5.1 6.2", "ck")


def make(directory: Path, case: str, second: bool) -> Path:
    """Writes the files of the first or the second run."""
    devices = {"one met a GPU": (None, MI300X), "both met a GPU": (W7900, MI300X)}
    device = devices.get(case, (None, None))[second]
    payload = "changed = 1\n" if second and case == "other contents" else ""
    cells = {"other contents": (CELL, OTHER), "other wheels": (OTHER if second else CELL,)}.get(case, (CELL,))
    for cell in cells:
        wheelhouse.write(directory, cell, payload=payload, device=device)
    return directory


def attempt(hub: Hub, dist: Path) -> str:
    """Publishes. Returns the message of the failure with its remedy, "" on success."""
    try:
        publish(hub, dist)
    except PublishFailed as error:
        return str(error)
    return ""


def check_consistent(hub: Hub) -> dict[str, Verdict]:
    """Checks that the public files are consistent: sums, test reports, metadata. Returns the reports by wheel."""
    result = {}
    for release in hub.releases.values():
        if release["draft"]:
            continue
        content = {asset["name"]: hub.content[asset["id"]] for asset in release["assets"]}
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
        assert content[assets.SUMS] == assets.sums(digests).content
        for name in content:
            if name.endswith(".whl"):
                result[name] = verdict.parse(name, content[f"{name}.verdict.json"])
                assert result[name].sha256 == digests[name], "the verdict is about this wheel"
                assert f"{name}.metadata" in content
    return result


@pytest.mark.parametrize(
    "case",
    [
        "other contents",
        "one met a GPU",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("both met a GPU", "other wheels")),
    ],
)
def test_a_second_run_begins_at_any_point_of_the_first(
    hub: Hub, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(github, "TIMEOUT_SECONDS", (5.0, 60.0))  # a request waits for the whole second run
    first, second = (make(tmp_path / name, case, name == "second") for name in ("first", "second"))
    ends = set()
    for point in range(1, 50, 6):
        hub.releases.clear()
        hub.tags.clear()
        messages: list[str] = []
        hub.requests = 0

        def begin(number: int, moment: str, point: int = point, messages: list[str] = messages) -> None:
            if (number, moment) == (point, "before"):
                messages.append(attempt(hub, second))

        hub.on_request = begin
        messages.append(attempt(hub, first))
        hub.on_request = lambda number, moment: None  # noqa: ARG005
        if len(messages) == 1:  # the first run ended before
            messages.insert(0, attempt(hub, second))
        check_consistent(hub)
        ends.add(tuple(bool(each) for each in messages))
        if case == "other contents":
            assert any(messages), "both cannot succeed"
            continue
        again = [attempt(hub, dist) for dist in (second, first, second)]
        assert again[1:] == ["", ""], "run again, both end well"
        assert again[0] == "" or (case == "other wheels" and "lacks 1 of 2 wheels" in again[0]), "a part stays a draft"
        verdicts = check_consistent(hub)
        assert len(verdicts) == (2 if case == "other wheels" else 1)
        if case == "one met a GPU":
            assert all(each.gpu.status == PASSED for each in verdicts.values())
        if case == "both met a GPU":
            assert [len(each.passed_on) for each in verdicts.values()] == [2]
    assert (False, True) in ends or case == "other wheels", "at some point the second one wins"


def test_not_run_replaces_no_report_of_a_gpu(hub: Hub, tmp_path: Path) -> None:
    """For both orders of two runs, in a draft and in a public release."""
    gpu = wheelhouse.write(tmp_path / "gpu", CELL, device=MI300X)
    cpu = wheelhouse.write(tmp_path / "cpu", CELL)
    assert gpu.read_bytes() == cpu.read_bytes()
    for order in ((gpu, cpu), (cpu, gpu), (gpu, cpu, gpu, cpu)):
        for draft in (False, True):
            hub.releases.clear()
            hub.tags.clear()
            for wheel in order:
                publish(hub, wheel.parent)
                for release in hub.releases.values():
                    release["draft"] = draft
            publish(hub, cpu.parent)
            assert check_consistent(hub)[gpu.name].gpu.status == PASSED


def put_report(hub: Hub, wheel: Path, report: Verdict) -> bytes:
    """Replaces the test report of the wheel in the release, as somebody with write access can. Returns its bytes."""
    (release,) = hub.releases.values()
    asset = next(each for each in release["assets"] if each["name"] == f"{wheel.name}.verdict.json")
    hub.content[asset["id"]] = content = report.as_json().encode()
    asset["digest"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return content


def report_of(wheel: Path, device: dict[str, Any] | None, status: str = PASSED) -> Verdict:
    """The test report of the wheel by a machine with that GPU."""
    result = verdict.read(wheelhouse.write_verdict(wheel, device=device))
    gpu = Stage(status=status, details=result.gpu.details)
    return replace(result, stages={**result.stages, GPU: gpu}) if device else result


@pytest.mark.parametrize("device", [None, H200, W7900], ids=["no GPU", "H200", "W7900"])
def test_only_the_same_gpu_answers_a_failure(hub: Hub, tmp_path: Path, device: dict[str, Any] | None) -> None:
    wheel = wheelhouse.write(tmp_path, CELL, device=device)
    publish(hub, tmp_path)
    content = put_report(hub, wheel, report_of(wheel, MI300X, FAILED))
    report_of(wheel, device).write(wheel)
    with pytest.raises(PublishFailed, match=r"says that it failed on AMD Instinct MI300X \(gfx942\)\n") as error:
        publish(hub, tmp_path)
    assert "verify --require-gpu" in error.value.remedy
    (release,) = hub.releases.values()
    assert content in [hub.content[asset["id"]] for asset in release["assets"]]
    report_of(wheel, MI300X).write(wheel)
    publish(hub, tmp_path)
    assert check_consistent(hub)[wheel.name].passed_on == ("AMD Instinct MI300X (gfx942)",)


@pytest.mark.parametrize("draft", [True, False])
def test_the_reports_of_several_gpus_are_kept(hub: Hub, tmp_path: Path, draft: bool) -> None:
    """Also if a later run met another GPU or none, and if the same GPU reports again."""
    wheel = wheelhouse.write(tmp_path, CELL)
    for device in (MI300X, None, W7900, H200, MI300X, None):
        report_of(wheel, device).write(wheel)
        publish(hub, tmp_path)
        for release in hub.releases.values():
            release["draft"] = draft
    publish(hub, tmp_path)
    result = check_consistent(hub)[wheel.name]
    assert sorted(result.passed_on) == [
        "AMD Instinct MI300X (gfx942)",
        "AMD Radeon PRO W7900 (gfx1100)",
        "NVIDIA H200 (sm_90)",
    ]
    assert result.ok
    assert "AMD Radeon PRO W7900 (gfx1100)" in state(hub)["body"], "the notes name it"


def test_reports_of_several_gpus_on_a_disk(tmp_path: Path) -> None:
    wheel = wheelhouse.write(tmp_path, CELL)
    failed, passed = report_of(wheel, MI300X, FAILED), report_of(wheel, W7900)
    for merged in (passed.with_reports_of(failed), failed.with_reports_of(passed)):
        assert not merged.ok
        assert merged.passed_on == ("AMD Radeon PRO W7900 (gfx1100)",)
        assert verdict.read(merged.write(wheel)) == merged
        assert not verdict.read(merged.write(wheel)).with_reports_of(report_of(wheel, H200)).ok
        answered = report_of(wheel, MI300X).with_reports_of(merged)
        assert answered.ok
        assert len(answered.passed_on) == 2
    nameless = replace(failed, stages={**failed.stages, GPU: Stage(status=FAILED)})
    assert not passed.with_reports_of(nameless).ok, "nobody knows which GPU it was"
    assert not replace(passed, failures=("test_gpu.py::test_x",)).ok, "all stages passed, and a test failed"


def test_the_report_of_a_gpu_survives_on_a_disk(tmp_path: Path) -> None:
    """In the test reports of the GPU job, and when a wheel is verified again on a machine without a GPU."""
    wheel = wheelhouse.write(tmp_path / "dist", CELL, device=MI300X)
    measured_there = verdict.beside(wheel)
    assert measured_there is not None
    lost = tmp_path / "verdicts"
    wheelhouse.write(lost, CELL).unlink()
    assert measured.adopt(tmp_path / "dist", lost) == [wheel.name]
    kept = verdict.beside(wheel)
    assert kept is not None
    assert kept.gpu == measured_there.gpu
    not_run = Stage.not_run("no GPU")
    other = Verdict(**{**vars(measured_there), "sha256": "0" * 64, "stages": {**measured_there.stages, GPU: not_run}})
    assert other.with_reports_of(measured_there).gpu == not_run, "it is about another file"
    failed = Verdict(**{**vars(other), "sha256": wheel.name, "stages": {GPU: Stage(status=FAILED)}})
    now = Verdict(**{**vars(other), "sha256": wheel.name})
    assert not now.with_reports_of(failed).ok, "a failure is not forgotten"


def test_a_crate_and_a_store_that_are_public_stay(hub: Hub, tmp_path: Path) -> None:
    store = fake_parts.store(tmp_path, "gfx942")
    wheelhouse.write(tmp_path, CELL, stores=[store])
    fake_parts.crate(tmp_path, COMMIT)
    publish(hub, tmp_path)
    (release,) = hub.releases.values()
    before = {asset["name"]: asset["digest"] for asset in release["assets"]}
    fake_parts.crate(tmp_path, COMMIT, **{"src/lib.rs": "// packed by another cargo"})
    publish(hub, tmp_path)
    assert {asset["name"]: asset["digest"] for asset in release["assets"]} == before


def dated(report: Verdict, time: str, name: str | None = None) -> Verdict:
    """The report of a GPU at a time, by another name of the device; "" for a GPU without a name."""
    details = {**report.gpu.details, "time": time, "run": ""}
    if name is not None:
        details["devices"] = [{"name": name, "target": MI300X["target"]}] if name else []
    return replace(report, stages={**report.stages, GPU: replace(report.gpu, details=details)})


@pytest.mark.parametrize("name", [None, "", "Instinct MI300X", "AMD Instinct MI300X VF", "AMD Radeon Graphics"])
def test_the_newest_report_of_a_gpu_wins(tmp_path: Path, name: str | None) -> None:
    """In both orders, whatever the driver called the GPU that failed. An older pass erases no newer failure."""
    wheel = wheelhouse.write(tmp_path, CELL)
    failed = replace(report_of(wheel, MI300X, FAILED), failures=("test_gpu.py::test_x", "test_import.py::test_y"))
    passed = report_of(wheel, MI300X)
    for times, ok in ((("2026-11-01", "2026-11-02"), True), (("2026-11-02", "2026-11-01"), False)):
        old, new = dated(failed, times[0], name), dated(passed, times[1])
        if name is not None and not ok:
            new = dated(passed, times[1], name)  # a failure of the GPU whose pass has this name
        for merged in (old.with_reports_of(new), new.with_reports_of(old)):
            assert (merged.gpu.status == PASSED) is ok
            assert ("test_gpu.py::test_x" in merged.failures) is not ok
            assert verdict.parse("x", merged.as_json().encode()) == merged


def test_a_pass_of_another_gpu_answers_no_failure(tmp_path: Path) -> None:
    wheel = wheelhouse.write(tmp_path, CELL)
    failed = dated(report_of(wheel, MI300X, FAILED), "2026-11-01")
    for other in (
        dated(report_of(wheel, W7900), "2026-11-02"),
        dated(report_of(wheel, MI300X), "2026-11-02", "MI325X"),
    ):
        assert not failed.with_reports_of(other).ok
    nameless = dated(failed, "2026-11-01", "")
    assert not nameless.with_reports_of(dated(report_of(wheel, H200), "2026-11-02")).ok, "it was an AMD GPU"


def test_a_report_of_a_gpu_has_its_time_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_RUN_ID", "1234")
    monkeypatch.setenv("GITHUB_RUN_ATTEMPT", "2")
    test = {"file": "test_gpu.py", "outcome": PASSED, "seconds": 1.0, "properties": {}, "name": "x", "reason": ""}
    details = verdict.tested_stages({"tests": [test], "devices": [MI300X]}, "")[GPU].details
    assert details["run"] == "00000000000000001234.0002"
    assert str(details["time"]).endswith("+00:00")
