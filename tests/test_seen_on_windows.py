"""What the job `windows` of build.yml saw reaches the test report, the notes and the page to choose a wheel on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import wheelhouse

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import universal
from rocm_wheels.publish import directory, index, measured, notes
from rocm_wheels.publish.home import Home
from rocm_wheels.wheel import verdict

SYSTEM = "Windows-2025Server-10.0.26100-SP0"
SEEN = {"python": "3.12.10", "torch": "2.9.1+cpu", "checks": 61}


def write(directory: Path) -> Path:
    return wheelhouse.write(directory, universal(versions.load(), "2.8.3"), platform="win_amd64", targets=("gfx1201",))


def report(path: Path, installer: str, **changes: Any) -> dict[str, Any]:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "installer": installer,
        "system": SYSTEM,
        "wheels": [{"wheel": path.name, "sha256": sha256, **SEEN, **changes}],
    }


def put(reports: Path, installer: str, content: dict[str, Any]) -> None:
    reports.mkdir(exist_ok=True)
    (reports / f"windows-{installer}.json").write_text(json.dumps(content))


def test_the_notes_and_the_page_say_what_passed_there(tmp_path: Path) -> None:
    wheel, reports = write(tmp_path / "dist"), tmp_path / "reports"
    assert measured.seen_on_windows(wheel.parent, reports) == [], "no such job ran"
    for installer in ("uv", "pip"):
        put(reports, installer, report(wheel, installer))
    assert measured.seen_on_windows(wheel.parent, reports) == [wheel.name]
    (listed,) = directory.read(wheel.parent).wheels
    assert (listed.backend, listed.ran_on, listed.platform) == ("triton", "CPU of Windows (pip, uv)", "windows")
    stage = listed.verdict.stages[verdict.WINDOWS]
    assert stage.details["pip"] == f"{SYSTEM}, Python 3.12.10, torch 2.9.1+cpu: 61 checks passed"
    page = notes.render([listed], tag="v1.0.0", index_url="https://x.org/", new="", repository="owner/name")
    assert "| 2.8.3 for Windows | 3.10+ | triton |" in page
    assert "| CPU of Windows (pip, uv) |" in page
    assert f"- 2.8.3+rocm by `pip`: {SYSTEM}, Python 3.12.10, torch 2.9.1+cpu: 61 checks passed" in page
    assert "curl.exe -sSfO https://x.org/which.py\n    python which.py" in page
    home = Home.of(repository="owner/name", url="https://x.org/")
    assert "Passed its tests on CPU of Windows (pip, uv)" in index.chooser(
        [listed], versions=versions.load(), home=home
    )


def test_a_report_without_the_run_on_windows_does_not_erase_it(tmp_path: Path) -> None:
    wheel, reports = write(tmp_path / "dist"), tmp_path / "reports"
    before = verdict.beside(wheel)
    put(reports, "pip", report(wheel, "pip"))
    measured.seen_on_windows(wheel.parent, reports)
    seen = verdict.beside(wheel)
    assert before is not None
    assert seen is not None
    assert before.with_reports_of(seen) == seen
    assert replace(before, sha256="0" * 64).with_reports_of(seen).stages == before.stages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "is not about"),
        ({"wheel": "../x.whl"}, "is not what wheel_tests/on_windows.py writes"),
        ({"checks": -1}, "is not what wheel_tests/on_windows.py writes"),
        ({"more": 1}, "is not what wheel_tests/on_windows.py writes"),
    ],
)
def test_a_report_about_something_else_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    wheel = write(tmp_path / "dist")
    put(tmp_path / "reports", "pip", report(wheel, "pip", **change))
    with pytest.raises(DataError, match=message):
        measured.seen_on_windows(wheel.parent, tmp_path / "reports")


def test_the_job_writes_what_publishing_reads(
    tmp_path: Path, wheel_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its installations and its selftest are replaced; the report is its own."""
    script, wheel = wheel_script("on_windows"), write(tmp_path / "artifacts/wheel")
    monkeypatch.setattr(script, "run", lambda *_, **__: None)
    monkeypatch.setattr(script, "check", lambda *_: dict(SEEN))
    monkeypatch.setattr(script.platform, "platform", lambda: SYSTEM)
    written = tmp_path / "upload/windows-pip.json"
    assert script.main(["--installer", "pip", "--report", str(written), str(tmp_path / "artifacts")]) == 0
    assert json.loads(written.read_text()) == report(wheel, "pip")
    assert measured.seen_on_windows(wheel.parent, written.parent) == [wheel.name]


def test_the_selftest_is_counted(
    tmp_path: Path, wheel_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = wheel_script("on_windows")
    machine = {"python": "3.12.10", "torch": "2.9.1+cpu"}
    checks = [{"ok": True}, {"ok": True}, {"ok": None}]

    class Doctor:
        returncode, stdout = 1, json.dumps({"findings": [{"key": "torch-cpu"}]})

    def run(command: list[Any], **_: Any) -> None:
        command[-1].write_text(json.dumps({"machine": machine, "checks": checks}))

    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: Doctor)
    monkeypatch.setattr(script, "run", run)
    assert script.check(Path("python"), tmp_path) == {**machine, "checks": 2}
