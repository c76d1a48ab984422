"""Fixtures for tests of the installed flash_attn, and the report that becomes part of its verdict.

Run it as `pytest wheel_tests` in an environment that holds the wheel and wheel_tests/requirements.txt.
"""

from __future__ import annotations

import json
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from helpers import Device, devices


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path, help="write outcomes and measurements to this JSON file")
    parser.addoption("--minutes", type=float, help="skip the tests that have not begun after so many minutes")


def pytest_configure(config: pytest.Config) -> None:
    try:
        metadata.distribution("flash_attn")
    except metadata.PackageNotFoundError:
        pytest.exit("flash_attn is not installed here: pip install the wheel first", returncode=4)
    if report := config.getoption("--report"):
        config.pluginmanager.register(_Report(report), "flash_attn_report")
    if minutes := config.getoption("--minutes"):
        config.pluginmanager.register(_Limit(minutes), "flash_attn_limit")


class _Limit:
    """Skips tests once the time of the run is over."""

    def __init__(self, minutes: float) -> None:
        self.reason = f"{minutes:g} minutes are over"
        self.deadline = time.monotonic() + 60 * minutes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.deadline:
            pytest.skip(self.reason)


class _Report:
    """Collects the outcome and the measurements (record_property) of each test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test speaks through its call, or a set-up that skipped or broke; a teardown only by failing.
        if report.when != "call" and report.outcome == "passed":
            return
        if report.when == "teardown":
            self.tests = [test for test in self.tests if test["name"] != report.nodeid]
        reason = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        self.tests.append(
            {
                "name": report.nodeid,
                "file": Path(report.location[0]).name,
                "outcome": report.outcome,
                "seconds": round(report.duration, 3),
                "reason": reason,
                "properties": dict(report.user_properties),
            }
        )

    def pytest_sessionfinish(self) -> None:
        import torch

        content = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "devices": [device._asdict() for device in devices()],
            "tests": self.tests,
        }
        self.path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def dist() -> metadata.Distribution:
    """The installed distribution."""
    return metadata.distribution("flash_attn")


@pytest.fixture(scope="session")
def package(dist: metadata.Distribution) -> Path:
    """The directory of the installed import package."""
    return Path(str(dist.locate_file("flash_attn")))


@pytest.fixture(scope="session")
def build_info(package: Path) -> dict[str, Any]:
    """The build info of the wheel."""
    info: dict[str, Any] = json.loads((package / "_build_info.json").read_text(encoding="utf-8"))
    return info


@pytest.fixture(scope="session")
def fitting(build_info: dict[str, Any]) -> list[Device]:
    """The GPUs that the wheel has kernels for; skips without one."""
    found = devices()
    if not found:
        pytest.skip("the machine that tested it has no AMD or NVIDIA GPU")
    fit = [device for device in found if device.target in build_info["targets"]]
    if not fit:
        there = ", ".join(sorted({device.target for device in found}))
        pytest.skip(f"the machine that tested it has {there}, the wheel is for {', '.join(build_info['targets'])}")
    return fit
