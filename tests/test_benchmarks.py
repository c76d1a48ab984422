"""The benchmarks on a CPU with tiny sizes: their output and files, not their speed."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--device", "cpu", "--batch", "1", "--heads", "2"]


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:  # noqa: ARG001
    """Makes the benchmarks and flash_attn importable, with one thread because other tests run in parallel."""
    for directory in (ROOT / "benchmarks", ROOT / "flash_attn_src"):
        monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "flash_attn_src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "")


@pytest.fixture
def transformer() -> ModuleType:
    return importlib.import_module("benchmark_fa2_vs_fa3_mlp_transformer")


@pytest.fixture
def flash() -> ModuleType:
    return importlib.import_module("benchmark_flash_attn")


def resolved(transformer: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """The configuration of a command line, without a measurement."""
    result: list[dict[str, Any]] = []
    resolve = transformer.resolve

    def stop(parsed: Any) -> None:
        result.append(resolve(parsed))
        raise SystemExit

    monkeypatch.setattr(transformer, "resolve", stop)
    with pytest.raises(SystemExit):
        transformer.main(["--device", "cpu", *arguments])
    monkeypatch.setattr(transformer, "resolve", resolve)
    return result[0]


def test_the_presets_of_the_transformer(transformer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("batch", "seqlen", "d_model", "heads", "layers", "warmup", "timed", "dtype")
    config = resolved(transformer, monkeypatch)
    assert config["preset"] == "mi300x"
    assert [config[name] for name in sizes] == [4, 4096, 1024, 16, 8, 20, 80, "bfloat16"]
    config = resolved(transformer, monkeypatch, "--preset", "default", "--d-model", "512", "--no-causal")
    assert [config[name] for name in sizes] == [4, 2048, 512, 16, 6, 10, 50, "bfloat16"]
    assert config["causal"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heads", "3"], "--d-model 1024 with --heads 3"),
        (["--heads", "2"], "multiple of 8 up to 256"),
        (["--layers", "0"], "--layers 0 is too small"),
        (["--timed", "3"], "--repeats 4 does not split 3"),
        (["--device", "tpu"], "RuntimeError|tpu"),
        (["--output-json", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
    ],
)
def test_the_transformer_benchmark_checks_its_options_first(
    transformer: ModuleType, arguments: list[str], said: str
) -> None:
    with pytest.raises((SystemExit, RuntimeError), match=said):
        transformer.main(["--device", "cpu", *arguments])


def test_the_transformer_benchmark_compares_with_sdpa(
    transformer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "results.json"
    sizes = ["--seqlen", "16", "--d-model", "16", "--layers", "1", "--vocab", "11", "--warmup", "1", "--timed", "5"]
    transformer.main([*TINY, *sizes, "--repeats", "2", "--output-json", str(written)])
    content = json.loads(written.read_text())
    assert content["benchmark"] == "mlp_transformer"
    assert content["config"]["layers"] == 1
    assert content["config"]["mlp_ratio"] == 4
    assert list(content["metrics"]) == ["sdpa", "fa3"]
    assert [len(each) for each in content["metrics"]["fa3"]["step_ms"]] == [2, 3]
    summary = content["summary"]
    assert summary["fa3"]["backend_symbol"] == "flash_attn.attention.backends.torch"
    assert summary["fa3"]["tokens_per_s"] == pytest.approx(16 * summary["fa3"]["steps_per_s"])
    # The same seed, model and tokens: after six steps the losses differ only by rounding.
    assert summary["fa3"]["loss"] == pytest.approx(summary["sdpa"]["loss"], rel=1e-2)
    assert "asks for the CK backend, which this wheel does not have" in summary["cannot_run"]["fa2"]
    times = [ms for each in content["metrics"]["fa3"]["step_ms"] for ms in each]
    assert content["samples"]["fa3 step ms"] == times
    assert summary["fa3"]["median_step_ms"] == statistics.median(times)
    captured = capsys.readouterr()
    for part in ("median step ms", "tokens/s", "peak memory MiB", "loss", "speed-up of FA3 (Triton) over SDPA"):
        assert part in captured.out
    assert "FA2 (CK) cannot run: RuntimeError: FLASH_ATTENTION_TRITON_AMD_ENABLE=FALSE" in captured.out
    assert "round 2 of 2, SDPA" in captured.err
    assert "say nothing about FA2 or FA3" in captured.err


def test_who_is_compared_with_whom(transformer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: set[str] = set()
    workers: list[Any] = []

    class Worker:
        def __init__(self, backend: str) -> None:
            self.backend, self.stopped = backend, False
            workers.append(self)

        def stop(self) -> None:
            self.stopped = True

    def warm(backend: str, *_: object) -> Worker:
        if backend in broken:
            raise transformer.CannotRun(f"{backend} is broken")
        return Worker(backend)

    monkeypatch.setattr(transformer, "warm", warm)
    for lost, expected in ((set(), ["fa2", "fa3"]), ({"fa3"}, ["sdpa", "fa2"]), ({"fa2"}, ["sdpa", "fa3"])):
        broken = lost
        workers.clear()
        with transformer.pair({}) as (pair, why):
            assert [worker.backend for worker in pair] == expected
            assert why == {name: f"{name} is broken" for name in lost}
        assert all(worker.stopped for worker in workers)
    for lost, said in (({"fa2", "fa3"}, "neither backend"), ({"fa2", "sdpa"}, r"compare FA3 \(Triton\) with")):
        broken = lost
        workers.clear()
        with pytest.raises(SystemExit, match=said), transformer.pair({}):
            pass
        assert all(worker.stopped for worker in workers)


def test_a_backend_that_dies_says_how(transformer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import sys; print('Memory access fault by GPU node-1', file=sys.stderr); sys.exit(7)")
    monkeypatch.setattr(transformer, "WORKER", script)
    with pytest.raises(transformer.CannotRun, match="ended with 7: Memory access fault by GPU node-1"):
        transformer.Worker("fa3", {}, tmp_path / "log")


def test_speed_up_and_spread(transformer: ModuleType) -> None:
    raw = {
        "fa2": {
            "symbol": "flash_attn_2_cuda",
            "step_ms": [[20.0, 22.0], [24.0]],
            "peak_memory_bytes": 4 << 20,
            "loss": 2.0,
        },
        "fa3": {
            "symbol": "x.interface_v2",
            "step_ms": [[10.0, 11.0], [8.0]],
            "peak_memory_bytes": 3 << 20,
            "loss": 2.5,
        },
    }
    result = transformer.summarize(raw, {"batch": 2, "seqlen": 100})
    assert result["fa2"]["median_step_ms"] == 22.0
    assert result["fa2"]["quartiles_step_ms"] == [21.0, 23.0]
    assert result["fa3"]["steps_per_s"] == 100.0
    assert result["fa3"]["tokens_per_s"] == 20000.0
    compared = result["comparison"]
    assert (compared["baseline"], compared["contender"]) == ("fa2", "fa3")
    assert compared["speed_up"] == 2.2
    assert compared["speed_up_rounds"] == [2.0, 3.0]
    assert (compared["memory_delta_mib"], compared["memory_delta_percent"]) == (-1.0, -25.0)
    assert compared["loss_difference"] == 0.5


def test_flash_against_standard_attention(
    flash: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = importlib.import_module("torch")
    standard = flash.standard

    def too_large(q: Any, *rest: Any) -> Any:
        if q.shape[1] > 32:
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 64 GiB")
        return standard(q, *rest)

    monkeypatch.setattr(flash, "standard", too_large)
    written = tmp_path / "results.json"
    lengths = ["--seqlens", "16", "32", "64", "--head-dim", "16", "--rounds", "2", "--dtype", "float32"]
    flash.main([*TINY, *lengths, "--causal", "--backward", "--json", str(written)])
    content = json.loads(written.read_text())
    rows = content["metrics"]
    assert [row["seqlen"] for row in rows] == [16, 32, 64]
    assert all(len(row["flash"]["ms"]) == 2 for row in rows)
    assert rows[2]["standard"] == {"why": "out of memory"}
    assert rows[2]["max_difference"] is None
    assert all(row["max_difference"] < 1e-5 for row in rows[:2])
    assert content["summary"][0]["speed_up"] == pytest.approx(
        statistics.median(rows[0]["standard"]["ms"]) / statistics.median(rows[0]["flash"]["ms"])
    )
    assert content["summary"][2]["speed_up"] is None
    assert list(content["samples"]) == ["flash 16 ms", "flash 32 ms", "flash 64 ms"]
    out = capsys.readouterr().out
    assert out.count("out of memory") == 1
    assert "forward and backward" in out


def test_plots_are_made_from_the_json_of_another_machine(flash: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {
        "seqlen": 128,
        "flash": {"ms": [1.0], "mib": 2.0},
        "standard": {"ms": [3.0], "mib": 8.0},
        "max_difference": 0.1,
    }
    lost = {**row, "seqlen": 32768, "standard": {"why": "out of memory"}, "max_difference": None}
    config = {"batch": 2, "heads": 16, "head_dim": 128, "dtype": "bfloat16", "causal": True, "backward": False}
    machine = {"device": "AMD Instinct MI300X", "torch": "2.5.1", "flash_attn": "2.8.3"}
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"metrics": [row, lost], "config": config, "environment": machine}))
    flash.main(["--plot-from", str(results), "--plot", str(tmp_path / "plot")])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "plot.svg").read_text()
    for part in ("AMD Instinct MI300X", "standard: out of memory", "32k", "Peak memory"):
        assert part in svg
    results.write_text("{}")
    with pytest.raises(SystemExit, match="is not what --json wrote"):
        flash.main(["--plot-from", str(results)])


def test_without_matplotlib_nothing_is_measured(
    flash: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(flash, "measure", lambda *_: pytest.fail("it measured"))
    with pytest.raises(SystemExit, match=r"(?s)--setup benchmarks.*--plot-from"):
        flash.main([*TINY, "--plot", str(tmp_path / "plot")])


def test_launch_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overhead = importlib.import_module("launch_overhead")
    overhead.main(["--device", "cpu", "--rounds", "1", "--json", str(tmp_path / "x.json")])
    out = capsys.readouterr().out
    assert "pure PyTorch" in out
    assert "SDPA" in out
    content = json.loads((tmp_path / "x.json").read_text())
    assert set(content["samples"]) == {f"pure PyTorch {way} us" for way in overhead.WAYS}
    assert len(content["samples"]["pure PyTorch backward us"]) == 20
    with pytest.raises(SystemExit, match="there is no flash_attn in it"):
        overhead.main(["--device", "cpu", "--upstream", str(tmp_path)])


def test_the_ways_to_launch_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, overhead = importlib.import_module("torch"), importlib.import_module("launch_overhead")
    seam, jit, store = (importlib.import_module(f"flash_attn.core.{name}") for name in ("device", "jit", "store"))
    for module, name in ((seam, "kernels"), (store, "open_store")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(seam, "of", lambda _: SimpleNamespace(target="gfx942"))
    device = torch.device("cuda:0")
    assert "no kernels for gfx942" in overhead.launching("store", device)
    monkeypatch.setattr(store, "open_store", lambda *_: "a store")
    ways = [overhead.launching(way, device) for way in ("store", "JIT")]
    result = []
    for way in ways:
        way.select()
        result.append(seam.kernels)
        assert store.open_store("gfx942") == ("a store" if way is ways[0] else None)
    assert result[0] is not result[1]
    monkeypatch.setattr(jit, "triton_problem", lambda: "Triton cannot be imported")
    assert overhead.launching("JIT", device) == "Triton cannot be imported"


@pytest.mark.long
def test_cold_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold = importlib.import_module("cold_start")
    cold.main(["--device", "cpu", "--rounds", "1", "--json", str(tmp_path / "x.json")])
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["summary"]["cannot_run"] == {}
    for way in ("pure PyTorch", "SDPA"):
        marks = [content["summary"][way][phase] for phase in cold.PHASES]
        assert marks == sorted(marks)
    assert "after device" in capsys.readouterr().out
    assert "nosuch" in cold.start("SDPA", "nosuch", tmp_path)


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("attention", "--rounds 0", "argument --rounds: '0' is not a whole number above 0"),
        ("cold_start", "--rounds 0", "argument --rounds: 0 is not a whole number above 0"),
        ("decode", "--rounds 0", "argument --rounds: "),
        ("features", "--rounds 0", "argument --rounds: "),
        ("fp8", "--rounds 0", "argument --rounds: "),
        ("launch_overhead", "--rounds few", "argument --rounds: 'few' is not a whole number above 0"),
        ("tune", "gfx942.zip --rounds -1", "argument --rounds: "),
        ("decode", "--json nowhere/x.json", "nowhere/x.json cannot be written"),
        ("fp8", "--json nowhere/x.json", "nowhere/x.json cannot be written"),
        ("decode", "--paged 48 --seqlen 96 1024", "--paged 48 does not divide --seqlen 1024"),
        ("decode", "--paged -8", "--paged -8 does not divide --seqlen 1024"),
        ("decode", "--batch 0", "argument --batch: '0' is not a whole number above 0"),
        ("build_cost", "--only nosuch", "argument --only: no kernel for gfx90a matches 'nosuch'"),
        ("build_cost", "--jobs 0", "argument --jobs: 0 is not a whole number above 0"),
    ],
)
def test_a_benchmark_checks_its_options_first(
    script: str, arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments.split()])
    with pytest.raises(SystemExit) as caught:
        module.main()
    told = capsys.readouterr()
    assert said in f"{caught.value} {told.err}"
    assert told.out == ""


HELP = """
import runpy, sys, warnings
sys.modules["flash_attn"] = None
for script in sys.argv[1:]:
    sys.argv, sys.path[0] = [script, "--help"], script.rpartition("/")[0]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(script, end.code)
"""


def test_help_needs_no_flash_attn() -> None:
    parts = ("kernel_calls", "measuring", "plotting", "transformer_step")
    scripts = sorted(str(path) for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in parts)
    done = subprocess.run([sys.executable, "-c", HELP, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith(str(ROOT))] == [
        f"{each} 0" for each in scripts
    ]
    assert done.stdout.count("usage: ") == len(scripts)


def test_without_the_packages_of_a_build_its_cost_is_not_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-I", str(ROOT / "benchmarks/build_cost.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("is not installed\nRun ./build_rocm.sh --setup, then this with build/env/bin/python.\n")


def test_without_flash_attn_a_benchmark_says_what_to_do() -> None:
    code = "import sys, runpy; sys.modules['flash_attn'] = None; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    place = ROOT / "benchmarks"
    command = [sys.executable, "-c", code, str(place / "layers.py")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "install a wheel, or set PYTHONPATH=flash_attn_src" in done.stderr
    assert "Traceback" not in done.stderr
