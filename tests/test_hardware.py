"""Reports of the selftest: a plausible report is stored and shown, every other report is refused with a reason."""

from __future__ import annotations

import copy
import datetime
import functools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wheelhouse
from mutations import changed

from rocm_wheels import cli
from rocm_wheels.cli import release as release_cli
from rocm_wheels.compile import sources
from rocm_wheels.errors import DataError
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.publish import coverage, hardware
from rocm_wheels.publish import report as reports
from rocm_wheels.wheel import contents

TODAY = datetime.date(2026, 12, 24)
CASES = sources.module("diagnosis.selftest.cases")


@functools.cache
def record() -> str:
    """RECORD of the wheel that `wheel` writes."""
    with tempfile.TemporaryDirectory() as directory:
        path = wheelhouse.write(Path(directory), wheelhouse.cell("2.8.3 3.11 2.5.1 6.2", "ck"))
        return contents.read(path).record.decode()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2", "ck"))


def report() -> dict[str, Any]:
    """The report of a selftest in which everything passes on an MI300X."""
    checks = []
    for case in CASES.cases():
        line = {"check": case.name, "group": case.group, "ok": True, "limits": list(case.limits), "failure": ""}
        line |= {"forward": case.limits[0] / 3, "backward": case.limits[1] / 3, "notes": [], "seconds": 0.1}
        checks.append(line)
    speed = [
        {"shape": shape.name, "forward_ms": shape.flops * 2e-12, "backward_ms": shape.flops * 6e-12, "sdpa": ""}
        for shape in CASES.SPEEDS
    ]
    return {
        "format": CASES.FORMAT,
        "date": "2026-12-01",
        "ok": True,
        "trouble": "",
        "wheel": {
            "version": "2.8.3",
            "label": "rocm62torch2.5",
            "targets": ["gfx90a", "gfx942"],
            "contents": sources.module("diagnosis.selftest.wheel").contents(record()),
            "sha256": "",
            "damaged": [],
        },
        "machine": {
            "device": "AMD Instinct MI300X",
            "target": "gfx942",
            "architecture": "gfx942:sramecc+:xnack-",
            "driver": "6.10.5",
            "python": "3.11.9",
            "torch": "2.5.1+rocm6.2",
            "hip": "6.2.41133-dd7f95766",
            "variables": {},
        },
        "checks": checks,
        "speed": speed,
    }


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "report.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_report_is_kept(tmp_path: Path, wheel: Path, data: Versions) -> None:
    run = hardware.check(written(tmp_path, report()), wheel, data, TODAY)
    assert (run.device, run.target, run.wheel, run.ok) == ("AMD Instinct MI300X", "gfx942", wheel.name, True)
    assert run.passed == len(CASES.cases())
    assert run.summary.endswith(f"torch 2.5.1+rocm6.2, 2026-12-01: {run.passed} checks passed")
    kept = tmp_path / "hardware.json"
    kept.write_text("[]")
    assert hardware.add(kept, run) == [run] == hardware.load(kept)
    assert hardware.add(kept, run) == [run]  # the same run replaces its own entry
    other = report()
    other["machine"]["torch"] = "2.6.0+rocm6.2.4"
    assert len(hardware.add(kept, hardware.check(written(tmp_path, other), wheel, data, TODAY))) == 2
    assert set(hardware.verified(hardware.load(kept))) == {"gfx942"}


def test_a_failed_report_is_kept_and_verifies_nothing(tmp_path: Path, wheel: Path, data: Versions) -> None:
    content = report()
    content["checks"][3] |= {"ok": False, "forward": None, "backward": None, "failure": "signal 11"}
    content["speed"][0] = {"shape": content["speed"][0]["shape"], "failure": "OutOfMemoryError"}
    content |= {"ok": False, "trouble": "it ended"}
    content["wheel"]["damaged"] = ["flash_attn/core/api.py"]
    run = hardware.check(written(tmp_path, content), wheel, data, TODAY)
    name, shape = content["checks"][3]["check"], content["speed"][0]["shape"]
    assert run.failed == (name, shape, "it ended", "damaged: flash_attn/core/api.py")
    assert hardware.verified([run]) == {}
    assert f"4 failed: {name}" in run.summary


def test_a_report_of_firstlight_is_kept(tmp_path: Path, wheel: Path, data: Versions) -> None:
    shapes = [{"shape": "1 24 4096 128 full", "failure": "OutOfMemoryError: no memory"}]
    content = report() | {"firstlight": 1, "troubles": {}, "shapes": shapes, "probes": [], "providers": []}
    assert hardware.check(written(tmp_path, content), wheel, data, TODAY).ok  # too large for the GPU is no failure
    shapes.append({"shape": "1 16 8192 128 full", "failure": "RuntimeError: lost"})
    content |= {"ok": False, "troubles": {"probes": "interrupted"}}
    run = hardware.check(written(tmp_path, content), wheel, data, TODAY)
    assert run.failed == ("probes: interrupted", "1 16 8192 128 full")


def test_a_gpu_that_pretends_to_be_another_verifies_no_target(tmp_path: Path, wheel: Path, data: Versions) -> None:
    content = report()
    content["machine"]["variables"] = {"HSA_OVERRIDE_GFX_VERSION": "9.4.2"}
    run = hardware.check(written(tmp_path, content), wheel, data, TODAY)
    assert run.override == "9.4.2"
    assert hardware.verified([run]) == {}


def test_a_gpu_may_run_the_code_of_its_family(tmp_path: Path, wheel: Path, data: Versions) -> None:
    content = report()
    content["wheel"]["targets"] = ["gfx942", "gfx11-generic"]
    content["machine"] |= {"target": "gfx1103", "architecture": "gfx1103", "hip": "6.4.43482"}
    content["machine"]["device"] = "AMD Radeon 780M Graphics"
    assert hardware.check(written(tmp_path, content), wheel, data, TODAY).target == "gfx1103"
    content["machine"]["hip"] = "6.2.41133"
    with pytest.raises(DataError, match="loads nothing of the wheel"):
        hardware.check(written(tmp_path, content), wheel, data, TODAY)


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one value of a report."""

    def change(content: dict[str, Any]) -> None:
        place: Any = content
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value

    return change


FALSE: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (put("format", value=99), "has format 99, this command reads format 1"),
    (put("wheel", "contents", value="f00"), "wheel/contents: 'f00' is not the digest of flash_attn-2.8.3"),
    (put("machine", "target", value="sm_90"), "machine/target: 'sm_90' is no AMD GPU"),
    (put("machine", "target", value="cpu"), "machine/target: 'cpu' is no AMD GPU"),
    (put("machine", "target", value="gfx1100"), "loads nothing of the wheel, which is for gfx90a, gfx942"),
    (put("machine", "hip", value=None), "this torch is not for ROCm"),
    (put("machine", "architecture", value="gfx90a"), "machine/architecture: 'gfx90a' is no gfx942"),
    (put("date", value="soon"), "date: 'soon' has another form"),
    (put("date", value="2026-13-01"), "date: '2026-13-01' is no date"),
    (put("date", value="2027-01-01"), "is not between 2026-11-01 and today"),
    (put("date", value="2025-01-01"), "is not between 2026-11-01 and today"),
    (put("checks", value=[]), "checks: 0 is no number of different checks"),
    (lambda content: content["checks"].__setitem__(1, content["checks"][0]), "is no number of different checks"),
    (
        lambda content: put("checks", value=[x for x in content["checks"] if x["group"] != "varlen"])(content),
        "['varlen'] are groups without a check",
    ),
    (put("checks", 0, "limits", value=[1.0, 1.0]), "[1.0, 1.0] are no limits"),
    (put("checks", 0, "forward", value=-1.0), "checks/0/forward: -1.0 has another form"),
    (put("checks", 0, "forward", value="small"), "checks/0/forward: 'small' has another form"),
    (put("checks", 0, "forward", value=0.5), "did not pass"),
    (put("checks", 0, "forward", value=0.0), "0.0 is no error of a rounded result"),
    (put("checks", 0, "ok", value=False), "ok: True does not fit what it says of its checks: 1 failed"),
    (put("speed", 0, "forward_ms", value=1e-6), "ms is faster than any GPU"),
    (put("speed", 0, "backward_ms", value=0), "ms is faster than any GPU"),
    (put("speed", 0, "shape", value="1 1 1 1 full"), "is no shape of the selftest"),
    (lambda content: content.pop("machine"), "has not the form that the selftest writes: machine is missing"),
    (put("machine", "variables", value=None), "has not the form"),
    (put("machine", "target", value="gfx11-generic"), "is no AMD GPU that a wheel is for"),
    (put("machine", "device", value="NVIDIA H100 80GB HBM3"), "is no name of an AMD GPU"),
    (put("machine", "device", value="AMD Radeon RX 7900 XTX"), "is gfx1100, and machine/target says gfx942"),
    (put("machine", "device", value="AMD Radeon RX 9999"), "is a Radeon, and that target an Instinct"),
    (put("machine", "device", value="AMD Instinct MI210"), "is gfx90a, and machine/target says gfx942"),
    (put("machine", "variables", value={"HSA_OVERRIDE_GFX_VERSION": "9.0.10"}), "makes no gfx942"),
    (put("machine", "variables", value={"HSA_OVERRIDE_GFX_VERSION": "all"}), "makes no gfx942"),
    (put("machine", "architecture", value="gfx942x"), "is no gfx942"),
    (put("checks", 0, "forward", value=10**400), "a number of more than 12 digits has another form"),
    (put("speed", 0, "forward_ms", value=10**400), "speed/0/forward_ms"),
    (put("speed", 0, "forward_ms", value=True), "speed/0/forward_ms"),
    (put("checks", 0, "ok", value=1), "checks/0/ok"),
    (put("checks", 0, "limits", value=[0.1, 10**400]), "checks/0/limits/1"),
    (put("more", value=1), "'more' is unknown"),
    (put("machine", "emulator", value="rocjitsu"), "emulated this GPU: such a run is no run on hardware"),
    (put("wheel", "damaged", value=["x"] * 10_001), "wheel/damaged: list of 10001"),
]
# Text that a page would render as something else, or that is not valid in any field.
HOSTILE: list[Any] = [
    *("a @octocat", "AMD\nfake", "AMD\r", "AMD \x1b[31m", "AMD \u202e", "AMD \ud800", " AMD", "AMD ", "", "AMD" * 200),
    *(
        "AMD [x](https://evil)",
        "AMD https://evil",
        "AMD www.evil.org",
        "<img src=x>",
        "AMD `x`",
        "AMD | x |",
        "AMD &#64;x",
    ),
    *(None, 7, True, [], {}, ["AMD"], 10**400),
]
SHOWN = [
    *(("machine", name) for name in ("device", "target", "architecture", "driver", "python", "torch")),
    *(("wheel", name) for name in ("version", "contents", "label")),
    *(
        ("checks", 0, "check"),
        ("checks", 0, "group"),
        ("speed", 0, "shape"),
        ("wheel", "damaged", 0),
        ("trouble",),
        ("date",),
    ),
]


@pytest.mark.parametrize("place", SHOWN, ids=lambda place: "/".join(map(str, place)))
def test_text_from_outside_is_a_plain_line(tmp_path: Path, wheel: Path, data: Versions, place: tuple[Any, ...]) -> None:
    for value in HOSTILE:
        if value == "" and place[-1] in ("trouble", "driver", "label", "contents"):
            continue
        content = report()
        content["wheel"]["damaged"] = ["flash_attn/core/api.py"]
        put(*place, value=value)(content)
        with pytest.raises(DataError) as error:
            hardware.check(written(tmp_path, content), wheel, data, TODAY)
        assert len(str(error.value).splitlines()) == 2, "one line, and the remedy"
        assert str(error.value).isprintable() or "\n" in str(error.value)
        str(error.value).encode()


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"format": 1, "x": ' + "[" * 50_000, "9" * 5000, "1e999", "NaN", "\x00"]
)
def test_json_that_exhausts_a_reader(tmp_path: Path, wheel: Path, data: Versions, content: str) -> None:
    with pytest.raises(DataError):
        hardware.check(written(tmp_path, content), wheel, data, TODAY)
    (tmp_path / "report.json").write_bytes(b" " * (1 << 21))
    with pytest.raises(DataError, match="it may have"):
        hardware.check(tmp_path / "report.json", wheel, data, TODAY)


def test_any_change_of_a_report_is_accepted_or_is_an_error_of_ours(tmp_path: Path, wheel: Path, data: Versions) -> None:
    kept = tmp_path / "hardware.json"
    for seed in range(600):
        kept.write_text("[]")
        content = changed(report(), seed)
        try:
            run = hardware.check(written(tmp_path, json.dumps(content)), wheel, data, TODAY)
        except DataError as error:
            str(error).encode()
            continue
        assert hardware.add(kept, run) == hardware.load(kept), "what is kept can be read"


@pytest.mark.parametrize(
    ("device", "target", "good"),
    [
        ("AMD Radeon Graphics", "gfx1103", True),
        ("AMD Radeon RX 7900 XT/7900 XTX", "gfx1100", True),
        ("AMD Radeon PRO W7900", "gfx1100", True),
        ("AMD Radeon PRO W7900", "gfx1101", False),
        ("AMD Radeon(TM) 8060S Graphics", "gfx1151", True),
        ("AMD Instinct MI300X OAM", "gfx942", True),
        ("AMD Instinct MI250X/MI250", "gfx90a", True),
        ("Radeon RX 6700 XT", "gfx1031", True),
        ("gfx1036", "gfx1036", True),
        ("Device 73bf", "gfx1030", True),
        ("AMD Instinct MI300X", "gfx1100", False),
        ("GeForce RTX 4090", "gfx1100", False),
    ],
)
def test_the_name_of_a_gpu_fits_its_target(data: Versions, device: str, target: str, good: bool) -> None:
    assert (reports.wrong_device(device, target, data) == "") is good


def test_the_output_of_the_selftest_is_valid(tmp_path: Path) -> None:
    """With the selftest's own functions, on this machine."""
    names = ("report", "machine", "wheel", "command", "worker")
    selftest = {name: sources.module(f"diagnosis.selftest.{name}") for name in names}
    steps = selftest["worker"].steps(False, 2)
    lines = [selftest["command"]._lost(step, "the process ended") for step in steps]
    lines += [{"shape": "8 16 4096 128 causal", "forward_ms": 1.5, "backward_ms": None} | {
        "sdpa_forward_ms": None, "sdpa_backward_ms": None, "sdpa": "no kernel"}]  # fmt: skip
    content = selftest["report"].build(
        selftest["machine"].facts(None),
        selftest["wheel"].facts() | {"gpu_backend": "triton"},
        [line for line in lines if "check" in line],
        [line for line in lines if "shape" in line],
        "the process of the selftest ended 3 times: the remaining steps did not run",
    )
    assert reports.read(written(tmp_path, content)) == json.loads(json.dumps(content))


@pytest.mark.parametrize(("change", "message"), FALSE, ids=[message[:40] for _, message in FALSE])
def test_impossible_reports_are_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path, wheel: Path, data: Versions
) -> None:
    content = copy.deepcopy(report())
    change(content)
    with pytest.raises(DataError) as error:
        hardware.check(written(tmp_path, content), wheel, data, TODAY)
    assert message in str(error.value)


def test_files_that_are_something_else(tmp_path: Path, wheel: Path, data: Versions) -> None:
    for text in ("[", "[]", "7"):
        with pytest.raises(DataError):
            hardware.check(written(tmp_path, text), wheel, data, TODAY)
    with pytest.raises(DataError, match="is no wheel"):
        hardware.check(written(tmp_path, report()), tmp_path / "none.whl", data, TODAY)
    for text in ("{}", '[{"date": 1}]', "["):
        (tmp_path / "hardware.json").write_text(text)
        with pytest.raises(DataError, match="is no list of runs"):
            hardware.load(tmp_path / "hardware.json")


PLACES = (coverage.GPUS, coverage.INSTALL, coverage.STATUS)


def test_the_command_renews_the_readme(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs" / "badges").mkdir(parents=True)
    for name in ("published", "hardware"):
        (tmp_path / "docs" / f"{name}.json").write_text("[]")
    (tmp_path / "CHANGELOG.md").write_text("".join(coverage.STATUS))
    (tmp_path / "README.md").write_text("".join(f"{begin}\n{end}\n" for begin, end in PLACES))
    (tmp_path / coverage.VERSIONS_PAGE).write_text("\n".join(coverage.COVERAGE))
    monkeypatch.setattr(release_cli, "ROOT", tmp_path)
    content = report() | {"date": datetime.date.today().isoformat()}
    assert cli.main(["hardware", str(written(tmp_path, content)), "--wheel", str(wheel)]) == 0
    said = capsys.readouterr().out
    assert "AMD Instinct MI300X (gfx942)" in said
    assert "README.md" in said
    page = (tmp_path / "README.md").read_text()
    ran = f"AMD Instinct MI300X, {content['date']}"
    assert f"| gfx90a, gfx942, gfx950 | PyTorch, ROCm 7.2 | CK and Triton | {ran} |" in page
    page = (tmp_path / coverage.VERSIONS_PAGE).read_text()
    rows = dict(re.findall(r"^\| (torch|Python|ROCm|flash-attn) \|.*\| ([^|]*) \|$", page, re.MULTILINE))
    assert rows == {"torch": "2.5", "Python": "3.11", "ROCm": "6.2", "flash-attn": "2.8.3"}
    assert "nothing has been run on an AMD GPU" not in page
    assert 'aria-label="run on AMD GPUs: 1 model"' in (tmp_path / "docs/badges/amd.svg").read_text()
    content["machine"]["hip"] = None
    assert cli.main(["hardware", str(written(tmp_path, content)), "--wheel", str(wheel)]) == DataError.exit_code
    assert "this torch is not for ROCm" in capsys.readouterr().err


def run_of(
    device: str, target: str, date: str, *failed: str, torch: str = "2.9.1", wheel: str = "w1.whl"
) -> hardware.Run:
    return hardware.Run(
        date=date, device=device, target=target, override="", wheel=wheel, sha256=wheel, flash_attn="2.8.3",
        python="3.12.1", torch=torch, hip="6.4.1", driver="6.8", passed=60, failed=failed, speed=(),
    )  # fmt: skip


def test_only_the_same_gpu_answers_a_failed_run(data: Versions, tmp_path: Path) -> None:
    kept = tmp_path / "hardware.json"
    kept.write_text("[]")
    failed = run_of("AMD Instinct MI300X", "gfx942", "2026-12-02", "varlen")
    for run in (
        failed,
        run_of("AMD Instinct MI300A", "gfx942", "2026-12-03"),  # another GPU of the same target
        run_of("AMD Instinct MI300X", "gfx942", "2026-12-04", torch="2.5.1"),  # another torch
        run_of("AMD Instinct MI300X", "gfx942", "2026-12-01"),  # sent later, made before
    ):
        hardware.add(kept, run)
    runs = hardware.load(kept)
    assert failed in runs
    assert hardware.unanswered(runs) == [failed]
    assert hardware.failures_by_wheel(runs) == {"w1.whl": "AMD Instinct MI300X (2026-12-02)"}
    verified = hardware.verified(runs)
    (row,) = (each for each in coverage._gpus(data, verified, hardware.unanswered(runs)) if "gfx942" in each["target"])
    assert row["verified"] == "AMD Instinct MI300X, 2026-12-04; failed: AMD Instinct MI300X, 2026-12-02"
    hardware.add(kept, run_of("AMD Instinct MI300X", "gfx942", "2026-12-05", wheel="w2.whl"))
    assert hardware.unanswered(hardware.load(kept)) == [], "the next wheel answers it"
