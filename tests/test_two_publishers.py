"""Two runs publish under one tag at the same time, one of them perhaps on a laptop: sums and test reports stay
correct.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import fake_parts
import pytest
import wheelhouse
from fake_github import Hub
from publishing import publish
from wheelhouse import COMMIT, MI300X

from rocm_wheels.errors import PublishFailed
from rocm_wheels.publish import assets, github, measured
from rocm_wheels.wheel import verdict
from rocm_wheels.wheel.verdict import FAILED, GPU, PASSED, Stage, Verdict

CELL = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
OTHER = wheelhouse.cell("2.8.3 3.12 2.5.1 6.2", "ck")


def make(directory: Path, case: str, second: bool) -> Path:
    """Writes the files of the first or the second run."""
    device = MI300X if second and case == "one met a GPU" else None
    payload = "changed = 1\n" if second and case == "other contents" else ""
    cells = {"other contents": (CELL, OTHER), "one met a GPU": (CELL,), "other wheels": (OTHER if second else CELL,)}[
        case
    ]
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
    found = {}
    for release in hub.releases.values():
        if release["draft"]:
            continue
        content = {asset["name"]: hub.content[asset["id"]] for asset in release["assets"]}
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
        assert content[assets.SUMS] == assets.sums(digests).content
        for name in content:
            if name.endswith(".whl"):
                found[name] = verdict.parse(name, content[f"{name}.verdict.json"])
                assert found[name].sha256 == digests[name], "the verdict is about this wheel"
                assert f"{name}.metadata" in content
    return found


@pytest.mark.parametrize("case", ["other contents", "one met a GPU", "other wheels"])
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
        assert [attempt(hub, dist) for dist in (second, first)] == ["", ""], "run again, both end well"
        verdicts = check_consistent(hub)
        assert len(verdicts) == (2 if case == "other wheels" else 1)
        if case == "one met a GPU":
            assert all(each.gpu.status == PASSED for each in verdicts.values())
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


def test_not_run_replaces_no_failure_on_a_gpu(hub: Hub, tmp_path: Path) -> None:
    wheel = wheelhouse.write(tmp_path, CELL)
    publish(hub, tmp_path)
    failed = json.loads(wheel.with_name(f"{wheel.name}.verdict.json").read_text())
    failed["ok"], failed["stages"][GPU] = False, {"status": FAILED, "seconds": 1.0, "details": {}}
    (release,) = hub.releases.values()
    asset = next(each for each in release["assets"] if each["name"].endswith(".verdict.json"))
    hub.content[asset["id"]] = content = json.dumps(failed).encode()
    asset["digest"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    with pytest.raises(PublishFailed, match="says that it failed on a GPU") as error:
        publish(hub, tmp_path)
    assert "verify --require-gpu" in error.value.remedy
    assert hub.content[asset["id"]] == content


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
    assert other.with_gpu_of(measured_there).gpu == not_run, "it is about another file"
    failed = Verdict(**{**vars(other), "sha256": wheel.name, "stages": {GPU: Stage(status=FAILED)}})
    now = Verdict(**{**vars(other), "sha256": wheel.name})
    assert not now.with_gpu_of(failed).ok, "a failure is not forgotten"


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
