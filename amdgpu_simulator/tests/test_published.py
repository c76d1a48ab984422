"""Published speeds of kernels beside the clock's: the model of a whole GPU, errors and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from amdgpu_simulator import measure, published, published_kernels
from amdgpu_simulator.clock.record import Executed
from amdgpu_simulator.decoding import GPUS
from amdgpu_simulator.published import Compared, Figure
from amdgpu_simulator.published_kernels import Run
from amdgpu_simulator.tests.test_timeline import END, NOTHING


def compared(name: str, speed: float, clock: float, *, fit: bool = False, tokens: int = 1024) -> Compared:
    figure = Figure(1, 8, tokens, speed)
    return Compared(kernel=name, family="some", target="gfx1201", fit=fit, figure=figure, clock=clock)


def test_only_pairs_of_one_shape_that_differ_have_an_order() -> None:
    result = [
        compared("a", 10, 12),
        compared("b", 20, 11),  # the clock ranks it below a
        compared("c", 22, 30),  # 10 % from b on the GPU
        compared("d", 40, 50, tokens=2048),  # another shape
    ]
    assert published.ranks(result, fit=False) == (1, 2)
    assert published.ranks(result, fit=True) == (0, 0)


def test_summary_keeps_fitted_figures_apart() -> None:
    result = [compared("a", 10, 12, fit=True), compared("b", 20, 10), compared("c", 20, 22), compared("d", 10, 9)]
    lines = list(published.summary(result))[2:]
    assert lines == [
        "| some, fit | 1 | 20 | 20 | 0 of 0 |",
        "| some, held out | 3 | 10 | 50 | 3 of 4 |",
        "| all, fit | 1 | 20 | 20 | 0 of 0 |",
        "| all, held out | 3 | 10 | 50 | 3 of 4 |",
    ]


def test_at_most_half_of_the_figures_are_fitted() -> None:
    rows = published._rows(())
    fitted = [row for row in rows if row["fit"]]
    assert 0 < sum(len(row["figures"]) for row in fitted) <= sum(len(row["figures"]) for row in rows) / 2
    assert {row["name"] for row in fitted} == {f"gcnasm v{version}" for version in (0, 2, 4, 6, 8, 10)}


def work(cycles: int) -> list[list[Executed]]:
    """A work group of a wave that occupies its vector unit for so many cycles, and waits for the result."""
    return [[Executed("vector", cycles, (), (1,), NOTHING), Executed("vector", 1, (1,), (), NOTHING), END]]


ROW: dict[str, Any] = {
    "name": "some", "family": "some", "target": "gfx1201", "fit": False, "rows": 16, "lengths": [128, 256],
    "head_dim": 128, "order": "rows", "cache": 72,
}  # fmt: skip


def speed(figure: Figure, resident: int = 4, **changes: Any) -> float:
    runs = [Run(group=work(1000 * length), resident=resident, units=None) for length in ROW["lengths"]]
    return published._speed({**ROW, **changes}, runs, figure)


def test_a_work_group_processor_runs_its_share_of_a_launch() -> None:
    """A wave has a SIMD for 1000 cycles per key, and each of 32 work group processors has 4 SIMDs."""
    gpu = GPUS["gfx1201"]
    waves = 2 * 32 * 4096 // 16
    seconds = waves / (gpu.units * 4) * 4096 * 1000 / gpu.clock / 1e9
    operations = 4 * 2 * 32 * 4096**2 * 128
    assert speed(Figure(2, 32, 4096, 1.0)) == pytest.approx(operations / seconds / 1e12, rel=0.01)


def test_work_groups_of_many_heads_read_from_memory() -> None:
    """Without a cache that holds the keys and values of all heads, the bandwidth of the memory is the limit."""
    fast = [Run(group=work(10 * length), resident=16, units=None) for length in ROW["lengths"]]
    figure = Figure(4, 16, 4096, 1.0)
    near = published._speed({**ROW, "order": "rows"}, fast, figure)
    far = published._speed({**ROW, "order": "heads"}, fast, figure)
    # 16 rows read 512 bytes for each key, and need 4 * 16 * 128 operations
    assert far == pytest.approx(GPUS["gfx1201"].bandwidth * 4 * 16 * 128 / 512 / 1e3)
    assert near > 2 * far


def test_a_launch_that_leaves_places_empty_takes_as_long_as_a_work_group() -> None:
    gpu = GPUS["gfx1201"]
    seconds = 1024 * 1000 / gpu.clock / 1e9
    assert speed(Figure(1, 1, 1024, 1.0)) == pytest.approx(4 * 1024**2 * 128 / seconds / 1e12, rel=0.01)


def test_a_busy_gpu_has_no_tail() -> None:
    """A SIMD begins its next wave as soon as a place is free."""
    assert measure.steady(work(1000), 4, "gfx1201") * 4 == pytest.approx(1000, rel=0.01)
    assert measure.steady(work(9000), 8, "gfx1201") * 4 == pytest.approx(9000, rel=0.05)


def test_loops_run_at_the_peak() -> None:
    (row,) = published._rows(["WMMA bf16"])
    (result,) = published.compare({**row, "lengths": [128, 192]}, Path())
    assert result.clock == pytest.approx(64 * 1024 * 2.97 / 1e3, rel=0.05)


def test_a_directory_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has none of the files of published\.toml, such as gcnasm-v0\.s"):
        list(published.table(tmp_path, ["gcnasm"]))
    with pytest.raises(ValueError, match=r"no kernel of published\.toml begins with nothing"):
        list(published.table(tmp_path, ["nothing"]))


def test_a_wrong_text_is_refused(tmp_path: Path) -> None:
    """A kernel that stores nothing is not the one whose speed was published."""
    (row,) = published._rows(["gcnasm v0"])
    text = published_kernels._loop({"instruction": "v_exp_f32", "target": "gfx1201"}, 1)
    (tmp_path / row["file"]).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="gcnasm v0: the result of its text is wrong"):
        published_kernels.run(row, tmp_path, 128)
