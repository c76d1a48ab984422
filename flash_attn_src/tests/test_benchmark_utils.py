"""flash_attn.utils.benchmark: which calls it makes and what it prints. torch.utils.benchmark does the measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn.utils import benchmark

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Function:
    """Computes 2 * x, and counts calls of its forward and backward."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.seen: list[float] = []

    def __call__(self, x: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, None]:
        self.forwards += 1
        y = 2 * x * factor
        if y.requires_grad:
            y.register_hook(self._count)
        return y, None

    def _count(self, gradient: torch.Tensor) -> None:
        self.backwards += 1
        self.seen.append(float(gradient.sum()))


@pytest.mark.parametrize(
    ("name", "titles", "backward"),
    [
        ("forward", ["Forward"], False),
        ("backward", ["Backward"], True),
        ("combined", ["Forward + Backward"], True),
        ("fwd_bwd", ["Forward", "Backward"], True),
        ("all", ["Forward", "Backward", "Forward + Backward"], True),
    ],
)
def test_each(name: str, titles: list[str], backward: bool, capsys: pytest.CaptureFixture[str]) -> None:
    function, x = Function(), torch.ones(3, requires_grad=True, device=DEVICE)
    grad = {"grad": torch.full((3,), 5.0, device=DEVICE)} if backward else {}
    result = getattr(benchmark, f"benchmark_{name}")(function, x, repeats=4, desc="it", factor=3.0, **grad)
    pairs: Any = [result] if len(titles) == 1 else result
    assert len(pairs) == len(titles)
    assert all(timer.timeit and measurement.mean > 0 for timer, measurement in pairs)
    assert function.forwards >= 4 * (name != "backward")
    assert function.backwards >= 4 * backward
    assert set(function.seen) == ({15.0} if backward else set())
    if backward:  # each step's alone
        assert x.grad.tolist() == [30.0] * 3
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.endswith(" pass")] == [f"it - {each} pass" for each in titles]
    getattr(benchmark, f"benchmark_{name}")(function, x, repeats=1, verbose=False, **grad)
    assert capsys.readouterr().out == ""


def test_a_gradient_of_another_shape() -> None:
    for name in ("backward", "combined", "all"):
        with pytest.raises(ValueError, match=r"grad: got shape \(2,\), wanted \(3,\)"):
            getattr(benchmark, f"benchmark_{name}")(
                Function(), torch.ones(3, requires_grad=True), grad=torch.ones(2), repeats=1
            )


@GPU
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # by torch itself
def test_memory_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated() / (1000 << 20)
    used = benchmark.benchmark_memory(lambda y: y.expand(100, -1).contiguous(), x, desc="copies")
    assert used - before == pytest.approx(0.4)
    benchmark.pytorch_profiler(Function(), x, backward=True, trace_filename=str(tmp_path / "trace.json"))
    assert "elementwise_kernel" in (tmp_path / "trace.json").read_text()
    assert "copies max memory:" in capsys.readouterr().out
