"""torch.utils.flop_counter over these kernels: the counts of PyTorch's math path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash_attn
import pytest
import torch
from flash_attn import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_for_sdpa,
)
from flash_attn.sdpa import attention as door
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

attend = torch.nn.functional.scaled_dot_product_attention
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def _count(work: Callable[[], torch.Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        out = work()
        if out.requires_grad:
            out.float().sum().backward()
    return counter.get_total_flops()


def _leaf(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, torch.float16).requires_grad_(grad)


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """PyTorch's math path of tensors in the layout of flash_attn."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(9, 7)}], ids=["full", "causal", "mask"]
)
def test_sdpa(monkeypatch: pytest.MonkeyPatch, grad: bool, options: dict[str, Any]) -> None:
    if not GPU:
        monkeypatch.setattr(door, "is_on_gpu", lambda _: True)
    options = {name: x.to(DEVICE, torch.float16) if name == "attn_mask" else x for name, x in options.items()}
    q, k, v = _leaf(2, 9, 4, 32, grad=grad), _leaf(2, 7, 2, 32, grad=grad), _leaf(2, 7, 2, 32, grad=grad)
    expected = _count(lambda: _math(q, k, v, **options))

    def served() -> torch.Tensor:
        with use_for_sdpa():
            return attend(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options)

    assert _count(served) == expected > 0


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}, {"deterministic": True}, {"window_size": (3, 0)}], ids=str)
def test_dense(grad: bool, options: dict[str, Any]) -> None:
    q, k, v = _leaf(2, 9, 4, 32, grad=grad), _leaf(2, 7, 2, 32, grad=grad), _leaf(2, 7, 2, 32, grad=grad)
    expected = _count(lambda: _math(q, k, v))
    assert _count(lambda: flash_attn_func(q, k, v, **options)) == expected


def test_packed_sequences_count_their_own_lengths() -> None:
    rows, keys = [3, 8, 1], [5, 2, 9]
    q, k, v = _leaf(sum(rows), 4, 32), _leaf(sum(keys), 2, 32), _leaf(sum(keys), 2, 32)
    starts_q, starts_k = (
        torch.tensor([0, *x], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32) for x in (rows, keys)
    )
    parts = [x.split(n) for x, n in ((q, rows), (k, keys), (v, keys))]
    expected = sum(_count(lambda each=each: _math(*(x[None] for x in each))) for each in zip(*parts, strict=True))
    assert _count(lambda: flash_attn_varlen_func(q, k, v, starts_q, starts_k, max(rows), max(keys))) == expected


def test_a_cache_counts_the_keys_that_are_used() -> None:
    q, cache, new = _leaf(2, 3, 4, 32, grad=False), _leaf(2, 64, 2, 32, grad=False), _leaf(2, 3, 2, 32, grad=False)
    lengths = torch.tensor([5, 20], dtype=torch.int32, device=DEVICE)
    got = _count(lambda: flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=lengths))
    assert got == 2 * 4 * 3 * (8 + 23) * 64
    assert _count(lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=10)) == 2 * 4 * 3 * 20 * 64


def test_fp8() -> None:
    q = _leaf(1, 8, 2, 32, grad=False)
    assert _count(lambda: flash_attn_fp8_func(q, q, q)) == 2 * 2 * 8 * 8 * 64


@pytest.mark.parametrize("order", ["flash_attn, torch.utils.flop_counter", "torch.utils.flop_counter, flash_attn"])
def test_the_order_of_imports_does_not_matter(order: str) -> None:
    first = "import torch.utils.flop_counter" if order.startswith("torch") else "import flash_attn"
    code = f"""
{first}
import sys, torch, flash_attn
if {order.startswith("flash")!r}:
    assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
q = torch.ones(1, 4, 1, 8)
with FlopCounterMode(display=False) as counter:
    flash_attn.flash_attn_func(q, q, q)
assert counter.get_total_flops() == 2 * 16 * 16, counter.get_total_flops()
"""
    environment = {"PYTHONPATH": str(Path(flash_attn.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
