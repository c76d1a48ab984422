"""benchmarks/trend.py: archive, baseline, intervals, exit code; and its summary in the notes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_parts
import pytest
import wheelhouse

from rocm_wheels import cli
from rocm_wheels.errors import DataError, VerifyFailed
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.publish import directory, measured, notes
from rocm_wheels.wheel import benchmark, build, interpreters, verify

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "trend.py"


def result(directory: Path, day: int, milliseconds: float, **changed: Any) -> Path:
    """The results of a benchmark on a day of November, with a spread of 1 %."""
    generator = random.Random(day)
    content = {
        "benchmark": "mlp_transformer",
        "environment": {
            "device": "AMD Instinct MI300X",
            "target": "gfx942",
            "date": f"2026-11-{day:02d}T03:41:00+00:00",
            "python": "3.12.1",
            "torch": "2.5.1+rocm6.2",
            "flash_attn": "2.8.3+rocm62torch2.5",
        },
        "config": {"batch": 4},
        "metrics": {},
        "summary": {},
        "samples": {
            "fa3 step ms": [milliseconds * generator.gauss(1, 0.01) for _ in range(40)],
            "fa3 peak MiB": [100.0],
        },
    }
    path = directory / f"{day}.json"
    path.write_text(json.dumps(content | changed), encoding="utf-8")
    return path


def trend(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--archive", directory / "archive", *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def test_a_regression_beyond_the_bound_fails(tmp_path: Path) -> None:
    done = trend(tmp_path, result(tmp_path, 1, 40.0))
    assert done.returncode == 0, done.stderr
    assert "mlp_transformer: no baseline yet" in done.stdout
    for day, milliseconds in ((2, 41.2), (3, 38.0)):  # 3 % up, 5 % down
        done = trend(tmp_path, result(tmp_path, day, milliseconds))
        assert done.returncode == 0, done.stdout
        assert "within the bound" in done.stdout
    done = trend(
        tmp_path, result(tmp_path, 4, 44.0), "--output-json", tmp_path / "trend.json", "--summary", tmp_path / "s.md"
    )
    assert done.returncode == 1
    assert "regression: mlp_transformer, fa3 step ms: 1.097 times 2026-11-01" in done.stderr
    actual = json.loads((tmp_path / "trend.json").read_text())
    assert actual["regressions"] == 1
    step, peak = actual["comparisons"]
    assert step["low"] < step["ratio"] < step["high"]
    assert step["low"] > 1.08
    assert step["high"] < 1.12
    assert step["baseline_date"].startswith("2026-11-01")
    assert (peak["low"], peak["high"], peak["status"]) == (1.0, 1.0, "within the bound")
    assert "**regression**" in (tmp_path / "s.md").read_text()
    assert len(list(tmp_path.glob("archive/AMD-Instinct-MI300X-gfx942/mlp_transformer-*/*.json"))) == 4
    assert trend(tmp_path, tmp_path / "4.json", "--bound", "15").returncode == 0


def test_the_interval_is_the_same_every_time_and_knows_the_spread(tmp_path: Path) -> None:
    result(tmp_path, 1, 40.0)
    slow = [40.0, 41.0, 60.0, 39.0, 58.0, 40.5]  # a higher mean, but not a higher median
    noisy = {"fa3 step ms": slow, "fa3 peak MiB": [100.0]}
    trend(tmp_path, tmp_path / "1.json")
    first = trend(tmp_path, result(tmp_path, 2, 0, samples=noisy))
    assert first.returncode == 0
    assert "fa3 step ms" in first.stdout
    assert trend(tmp_path, tmp_path / "2.json").stdout == first.stdout


def test_a_figure_that_is_gone_is_a_regression(tmp_path: Path) -> None:
    """A backend that no longer runs has no figure to compare."""
    trend(tmp_path, result(tmp_path, 1, 40.0))
    left = {"fa3 peak MiB": [100.0]}
    done = trend(tmp_path, result(tmp_path, 2, 0, samples=left), "--output-json", tmp_path / "trend.json", "--accept")
    assert done.returncode == 1
    assert "regression: mlp_transformer, fa3 step ms: the baseline has it" in done.stderr
    assert "**mlp_transformer, fa3 step ms: in the baseline, not in this run.**" in done.stdout
    assert json.loads((tmp_path / "trend.json").read_text())["missing"] == ["mlp_transformer, fa3 step ms"]
    assert trend(tmp_path, result(tmp_path, 3, 0, samples=left)).returncode == 0, "it was accepted"


def test_baselines_are_of_a_device_and_a_configuration(tmp_path: Path) -> None:
    trend(tmp_path, result(tmp_path, 1, 40.0))
    other = json.loads((tmp_path / "1.json").read_text())["environment"] | {"device": "AMD Instinct MI210"}
    for changed in ({"environment": other}, {"config": {"batch": 8}}):
        done = trend(tmp_path, result(tmp_path, 2, 80.0, **changed))
        assert done.returncode == 0
        assert "no baseline yet" in done.stdout
    done = trend(tmp_path, result(tmp_path, 3, 80.0), "--accept")
    assert done.returncode == 1, "what is accepted is compared first"
    assert trend(tmp_path, result(tmp_path, 4, 80.0)).returncode == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is no result"), ("{}", "it has no benchmark, environment"), ("[]", "is no result"), (None, "is no result")],
)
def test_invalid_results_are_refused_before_anything_is_archived(
    tmp_path: Path, content: str | None, said: str
) -> None:
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    done = trend(tmp_path, result(tmp_path, 1, 40.0), bad)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "archive").exists()
    done = trend(tmp_path, result(tmp_path, 1, 40.0, samples={"x ms": [0.0]}))
    assert "above 0" in done.stderr
    done = trend(tmp_path, result(tmp_path, 1, 40.0, environment={"device": "CPU", "date": "2026-11-01", "torch": "2"}))
    assert "it has no target of an environment, flash_attn of an environment" in done.stderr
    assert not (tmp_path / "archive").exists()


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for day, milliseconds in ((1, 40.0), (2, 46.0)):
        trend(tmp_path, result(tmp_path, day, milliseconds))
    done = trend(tmp_path, "--plot", tmp_path / "trend")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trend.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "trend.svg").read_text()
    assert "AMD Instinct MI300X, mlp_transformer" in svg
    assert "11-01" in svg


@pytest.fixture
def summary(tmp_path: Path) -> Path:
    trend(tmp_path, result(tmp_path, 1, 40.0))
    trend(tmp_path, result(tmp_path, 2, 44.0), "--output-json", tmp_path / "trend.json")
    return tmp_path / "trend.json"


def test_the_summary_gets_into_the_verdict_and_the_notes(
    tmp_path: Path, summary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dist = tmp_path / "dist"
    wheel = wheelhouse.write(dist, wheelhouse.cell("2.8.3 3.12 2.5.1 6.2", "ck"), device=wheelhouse.MI300X)
    other = wheelhouse.write(dist, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2", "ck"))
    common = ["publish", "--tag", "v1.0.0", "--dir", str(dist), "--repo", "owner/name", "--dry-run", "--benchmarks"]
    assert cli.main([*common, str(tmp_path / "none.json")]) == 0
    assert "benchmarks: of none of these wheels" in capsys.readouterr().out
    assert cli.main([*common, str(summary)]) == 0
    assert f"benchmarks: {wheel.name}" in capsys.readouterr().out
    verdicts = [json.loads(Path(f"{each}{VERDICT}").read_text()) for each in (wheel, other)]
    assert verdicts[0]["benchmarks"] == json.loads(summary.read_text())
    assert "benchmarks" not in verdicts[1]

    wheels = directory.read(dist).wheels
    page = notes.render(wheels, tag="v1.0", index_url="https://example.org/", new="", repository="owner/name")
    assert page.count("## Measured") == 1
    assert "on AMD Instinct MI300X, with torch 2.5.1+rocm6.2: 2 figures against their baseline, 1 of them" in page
    row = next(line for line in page.splitlines() if "fa3 step ms" in line)
    assert row.startswith("| mlp\\_transformer | fa3 step ms | 4")
    assert row.endswith("| regression |")
    assert "not in this run" not in page

    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json is not what benchmarks/trend\.py writes"):
        measured.attach(dist, tmp_path / "bad.json")


def test_benchmarks_run_where_the_wheel_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import sys, pathlib; print('measuring'); pathlib.Path(sys.argv[2]).write_text(sys.argv[1])"
    for name, text in (("one.py", script), ("two.py", "raise SystemExit('no GPU')"), ("three.py", script)):
        (tmp_path / name).write_text(text)
    installed: list[Path] = []

    def environment(_source: object, _python: Path, env: Path) -> Path:
        env.mkdir()
        return Path(sys.executable)

    monkeypatch.setattr(build, "plan_of", lambda _: fake_parts.plan("gfx942"))
    monkeypatch.setattr(interpreters, "find", lambda _: Path(sys.executable))
    monkeypatch.setattr(verify, "torch_source", lambda _, require_gpu: require_gpu or pytest.fail("without ROCm"))
    monkeypatch.setattr(verify, "environment", environment)
    monkeypatch.setattr(verify, "install", lambda _python, wheels, _env: installed.extend(wheels))
    monkeypatch.setattr(benchmark, "SCRIPTS", tmp_path)
    monkeypatch.setattr(benchmark, "SUITE", (("one.py", "--json"), ("three.py", "--json")))
    output = tmp_path / "results"
    actual = benchmark.run(tmp_path / "a.whl", cache=tmp_path / "cache", output=output)
    assert [path.name for path in actual] == ["one.json", "three.json"]
    assert actual[0].read_text() == "--json"
    assert installed == [tmp_path / "a.whl"]
    assert "measuring" in capfd.readouterr().out
    monkeypatch.setattr(benchmark, "SUITE", (("two.py", "--json"), ("one.py", "--json")))
    actual[0].unlink()
    with pytest.raises(VerifyFailed, match=r"two\.py: Command"):
        benchmark.run(tmp_path / "a.whl", cache=tmp_path / "cache", output=output)
    assert actual[0].is_file(), "the others run all the same"


# Prints what scripts say of themselves, in one process.
HELP = """
import contextlib, runpy, sys
for script in sys.argv[1:]:
    sys.argv, sys.path[0] = [script, "--help"], script.rpartition("/")[0]
    with contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
"""


def test_the_benchmark_suite_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parent.parent / "flash_attn_src"))
    scripts = [str(benchmark.SCRIPTS / script) for script, _ in benchmark.SUITE]
    done = subprocess.run([sys.executable, "-c", HELP, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text, (script, flag) in zip(done.stdout.split("usage: ")[1:], benchmark.SUITE, strict=True):
        assert text.startswith(script)
        assert f"{flag} FILE" in text
