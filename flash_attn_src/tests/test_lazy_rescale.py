"""`kernels.lazy_rescale` by the code of a GPU: a wave scales its output only where a maximum has grown by much."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn import flash_attn_func
from reference import attention

from amdgpu_simulator import gpu
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.isa import assembly, machine

# Head dim -> keys in a block of the forward kernel. On gfx1100 head dim 128 has 64 keys.
BLOCK = {64: 64, 128: 32}


def tensors(rises: list[float], dim: int, dtype: torch.dtype, rows: int = 70) -> list[torch.Tensor]:
    """q, k, v with a block of keys for each rise, and 9 keys more. In the units of exp2, a block's scores lie near the
    scores of the block before plus the rise, by softmax_scale = ln 2."""
    generator = torch.Generator().manual_seed(0)
    count = len(rises) * BLOCK[dim] + 9
    q, k, v = (torch.randn(1, n, 1, dim, generator=generator) for n in (rows, count, count))
    q, k = q / dim, k / 4
    q[..., :2] = 1.0
    height = torch.tensor([0.0, *rises]).cumsum(0).repeat_interleave(BLOCK[dim])[:count]
    k[0, :, 0, 0] = height.round()
    k[0, :, 0, 1] = height - height.round()
    return [x.to(dtype) for x in (q, k, v)]


def check(
    inputs: list[torch.Tensor], kernel: str, call: dict[str, Any], book: dict[str, Any], target: str = "gfx1201"
) -> None:
    with gpu.pretend(target) as launched, torch.no_grad():
        out, lse, _ = flash_attn_func(*inputs, softmax_scale=math.log(2), return_attn_probs=True, **call)
    assert launched == [kernel]
    book = {"softmax_scale": math.log(2), **book}
    (exact, logs), (rounded, _) = (attention(*inputs, dtype=dtype, **book) for dtype in (torch.float32, None))
    assert_close("out", out, exact, rough=rounded)
    assert_close("lse", lse, logs, tiny=1e-5)


@pytest.mark.parametrize(
    "rises",
    [[7.9] * 5, [8.1] * 5, [3.0] * 6, [-9.0] * 4, [0.0, 40.0, 0.0, 7.9, 7.9, -50.0, 90.0]],
    ids=["below", "above", "in three steps", "falling", "mixed"],
)
@pytest.mark.parametrize(
    ("dtype", "name", "dim"),
    [(torch.bfloat16, "bf16", 64), pytest.param(torch.float16, "fp16", 128, marks=pytest.mark.long)],
)
def test_growing_maxima(dtype: torch.dtype, name: str, dim: int, rises: list[float]) -> None:
    check(tensors(rises, dim, dtype), f"fwd-{name}-d{dim}", {}, {})


@pytest.mark.parametrize(("name", "dim"), [("bf16", 64), pytest.param("fp16", 128, marks=pytest.mark.long)])
def test_growing_maxima_on_rdna3(name: str, dim: int) -> None:
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    check(tensors([0.0, 40.0, 0.0, 7.9, 7.9, -50.0, 90.0], dim, dtype), f"fwd-{name}-d{dim}", {}, {}, "gfx1100")


@pytest.mark.parametrize(
    ("dim", "kind", "call", "book"),
    [
        (64, "", {"causal": True}, {"causal": True}),
        (64, "", {"window_size": (90, 30)}, {"window": (90, 30)}),
        (64, "-sink", {"s_aux": torch.tensor([30.0])}, {"s_aux": torch.tensor([30.0])}),
        (64, "-sink", {"s_aux": torch.tensor([-5.0])}, {"s_aux": torch.tensor([-5.0])}),
        pytest.param(128, "-softcap", {"softcap": 60.0}, {"softcap": 60.0}, marks=pytest.mark.long),
    ],
    ids=["causal", "window", "sink", "low sink", "softcap"],
)
def test_growing_maxima_with_options(dim: int, kind: str, call: dict[str, Any], book: dict[str, Any]) -> None:
    """With the causal mask, and with more queries than keys, the first rows see no key."""
    inputs = tensors([7.9, 8.1, 2.0, 7.0, 20.0], dim, torch.bfloat16, rows=400 if call.get("causal") else 130)
    check(inputs, f"fwd-bf16-d{dim}{kind}", call, book)


def test_blocks_whose_maxima_do_not_grow_scale_nothing() -> None:
    """They execute fewer vector instructions than the same number of blocks whose maxima grow."""
    counted: list[Record] = []

    def program(kernel: assembly.Kernel) -> machine.Program:
        counted.append(Record(kernel))
        return machine.Program(kernel, counted[-1])

    for rise in (7.9, 0.0, 8.5):
        with gpu.pretend("gfx1201", program=program), torch.no_grad():
            inputs = tensors([rise, *[0.0 if rise < 8.0 else rise] * 3], 64, torch.bfloat16)
            flash_attn_func(*inputs, softmax_scale=math.log(2))
    once, flat, growing = (record.cycles["vector"] for record in counted)
    assert once == flat < growing
