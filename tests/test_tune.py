"""The search for tiles: candidates by the real compiler, then the results of benchmarks/tune.py for given times."""

from __future__ import annotations

import importlib
import json
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rocm_wheels.compile import kernels, sources, units
from rocm_wheels.errors import CompileFailed

ROOT = Path(__file__).resolve().parent.parent
NAME = "fwd-fp16-d32"
OWN, WIDE, SMALL = (f"{NAME}@{tile}" for tile in ("128x64-w4-s2", "128x128-w4-s2", "64x64-w4-s1-waves_per_eu2"))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiles of one kernel. A fourth tile, of 24 rows, does not compile."""
    with pytest.MonkeyPatch.context() as patch:
        config = sources.module("kernels.tuning").Config
        small = config(64, 64, 4, 1, options=(("waves_per_eu", 2),))
        few = [config(128, 64, 4, 2), config(128, 128, 4, 2), small, config(24, 64, 4, 2)]
        patch.setattr(sources.module("kernels.launches"), "candidates", lambda *_: few)
        cache = tmp_path_factory.mktemp("cache")
        return kernels.compile_store(["gfx942"], cache=cache, jobs=2, only=NAME, tiles=True)["gfx942"]


def test_candidates_are_kernels_of_a_store(archive: Path) -> None:
    with zipfile.ZipFile(archive) as store:
        result = json.loads(store.read("manifest.json"))["kernels"]
    assert sorted(result) == sorted((OWN, WIDE, SMALL))
    assert {name: (entry["constants"]["BLOCK_M"], entry["constants"]["BLOCK_N"]) for name, entry in result.items()} == {
        OWN: (128, 64), WIDE: (128, 128), SMALL: (64, 64)
    }  # fmt: skip
    assert result[SMALL]["options"] == {"num_warps": 4, "num_stages": 1, "waves_per_eu": 2}
    assert len({entry["sha256"] for entry in result.values()}) == 3


def test_the_first_candidate_is_the_kernel_of_the_wheel() -> None:
    (own,) = units.find(["gfx942"], only=NAME)
    first, *others = units.find(["gfx942"], only=NAME, tiles=True)
    assert first.name.startswith(f"{NAME}@")
    assert first.key == own.key
    assert len({unit.name for unit in others}) == len({unit.key for unit in others}) == len(others) > 20


def test_casts_have_no_candidates() -> None:
    assert units.find(["gfx942"], only="fp8-cast*", tiles=True) == []


def test_composable_kernel_is_not_searched() -> None:
    with pytest.raises(CompileFailed, match="the tiles of ck cannot be searched"):
        units.find(["gfx942"], backend="ck", tiles=True)


class Gpu:
    """A GPU on which the installed tile takes a given time and gives a given result."""

    def __init__(self, times: dict[str, float], wrong: str = "", refused: str = "", other: bool = False) -> None:
        """other: calls run another kernel than the installed one."""
        self.times, self.wrong, self.refused, self.other = times, wrong, refused, other
        self.current = OWN
        self.launch: Any = None

    def install(self, _: object, tile: Any) -> None:
        self.current, self.launch = tile.name, tile.kernel.launch

    def call(self) -> list[Any]:
        torch = importlib.import_module("torch")
        if not self.other:
            self.launch()
        if self.current == self.refused:
            raise RuntimeError("out of shared memory")
        return [torch.ones(3) * (1.0 + 0.1 * (self.current == self.wrong))]

    def replayed(self, _call: object, _repeats: int) -> Any:
        name = self.current
        return lambda: self.times[name]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for directory in (ROOT / "benchmarks", ROOT / "flash_attn_src"):
        monkeypatch.syspath_prepend(str(directory))
    return importlib.import_module("tune")


def kernel(*_: object) -> SimpleNamespace:
    """The kernel for a code object of the archive."""
    return SimpleNamespace(block_m=64, block_n=64, num_xcds=1, arguments=None, launch=lambda: None)


def run(
    tune: ModuleType, gpu: Gpu, archive: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str,
    target: str = "gfx942", given: Path | None = None,
) -> None:  # fmt: skip
    """Runs the search with a wheel that has the archive's kernel. given: results in place of the archive."""
    device, store, stored = (
        importlib.import_module(f"flash_attn.core.{name}") for name in ("device", "store", "stored")
    )
    installed = SimpleNamespace(kernels={NAME: store.Store(archive).kernels[OWN]})
    tuning = importlib.import_module("flash_attn.kernels.tuning")
    monkeypatch.setattr(tuning, "config", lambda *_: tuning.Config(128, 64, 4, 2))
    monkeypatch.setattr(device, "of", lambda _: SimpleNamespace(target=target))
    monkeypatch.setattr(stored, "StoreKernel", kernel)
    monkeypatch.setattr(store, "open_store", lambda _: installed)
    monkeypatch.setattr(tune, "install", gpu.install)
    monkeypatch.setattr(tune, "calls", lambda *_: {"full": gpu.call, "causal": gpu.call})
    monkeypatch.setattr(tune.measuring, "replayed", gpu.replayed)
    monkeypatch.setattr(tune.measuring, "chosen_device", lambda _: None)
    monkeypatch.setattr(tune.measuring, "installed", lambda: "2.8.3")
    monkeypatch.setattr(tune.measuring, "environment", lambda _: {"device": "fake"})
    monkeypatch.setattr(tune.torch.cuda, "get_device_name", lambda: "fake")
    tune.main([str(given or archive), *arguments])


def test_the_fastest_tile_is_a_row(
    tune: ModuleType, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gpu = Gpu({OWN: 2.0, WIDE: 1.9, SMALL: 1.0})
    run(tune, gpu, archive, monkeypatch, "--json", str(tmp_path / "found.json"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{NAME}: 3 tiles"
    assert [line.split()[0] for line in lines[2:5]] == ["2.000", "1.053", "1.000"]
    assert lines[5] == "('fwd', 16, 32) plain: C(64, 64, 4, 1, options=(('waves_per_eu', 2),))  # 2.000"
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["metrics"][0]["best"][0]["calls"] == {"full": 2.0, "causal": 2.0}


def test_a_tile_that_is_wrong_or_does_not_run_is_no_row(
    tune: ModuleType, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu({OWN: 2.0, WIDE: 1.0, SMALL: 1.0}, wrong=WIDE, refused=SMALL)
    run(tune, gpu, archive, monkeypatch)
    text = capsys.readouterr().out
    assert f"{WIDE}: a wrong result, left out" in text
    assert f"{SMALL}: out of shared memory" in text
    assert text.splitlines()[-1] == "no row changes: nothing is 1.02 times as fast as it is"


def test_a_call_of_another_kernel_is_not_timed(
    tune: ModuleType, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="nothing was timed"):
        run(tune, Gpu({}, other=True), archive, monkeypatch)
    assert f"{NAME}: the call 'full' takes another kernel" in capsys.readouterr().out


def test_an_archive_of_another_gpu_or_other_sources_is_refused(
    tune: ModuleType, archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu({})
    with pytest.raises(SystemExit, match=r"No such file.*give what `compile --tiles` printed"):
        run(tune, gpu, archive, monkeypatch, given=tmp_path / "gfx90a.zip")
    with pytest.raises(SystemExit, match="is for gfx942, this GPU is gfx90a"):
        run(tune, gpu, archive, monkeypatch, target="gfx90a")
    other = tmp_path / "gfx942.zip"
    with zipfile.ZipFile(archive) as store, zipfile.ZipFile(other, "w") as changed:
        manifest = json.loads(store.read("manifest.json"))
        manifest["kernels"][WIDE]["params"] += "i"
        changed.writestr("manifest.json", json.dumps(manifest))
    with pytest.raises(SystemExit, match=f"{WIDE} is not of the sources of the flash_attn here"):
        run(tune, gpu, archive, monkeypatch, given=other)


def test_elements_that_a_kernel_does_not_write_are_errors(tune: ModuleType) -> None:
    """Where it did not write, an earlier result remains."""
    torch = importlib.import_module("torch")
    result = torch.arange(4.0)
    expected = [result.clone()]
    assert not tune.right(lambda: [result], expected, 0.01)
    assert tune.right(lambda: [result.copy_(expected[0])], expected, 0.01)
