"""What benchmarks/tune.py times a kernel in: calls that take this kernel, of every operation that is searched."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from flash_attn.core import device, jit
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.variants import Variant

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (row.name, kind)
        for row in OPERATIONS.values()
        if row.searched
        for kind in ("plain", "blocks", "any")
        if kind in row.kinds
    ],
)
@pytest.mark.usefixtures("fresh_kernels")
def test_calls_take_the_kernel(op: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tune, kernel_calls = (importlib.import_module(name) for name in ("tune", "kernel_calls"))
    sizes = OPERATIONS[op].sizes
    size = 256 if 256 in sizes else sizes[-1]  # of few heads
    variant = Variant(op, "fp8e4nv" if op == "fp8-fwd" else "fp16", size, kind)
    # The interpreter's own target has no kernel with INT8 queries.
    gpu = device.using(jit.Interpreter("gfx1201")) if op == "int8-fwd" and DEVICE.type == "cpu" else nullcontext()
    with gpu:
        timed = kernel_calls.calls(variant, DEVICE, 32)
        assert len(timed) == 3
        tile = tune.Tile(variant.name, None, device.kernel(DEVICE.index if DEVICE.index is not None else -1, variant))
        tune.check_taken(variant, tile, timed)


def test_other_operations_have_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    kernel_calls = importlib.import_module("kernel_calls")
    with pytest.raises(NotImplementedError, match="append-fp16-d64: no call for it"):
        kernel_calls.calls(Variant("append", "fp16", 64, "plain"), DEVICE)
