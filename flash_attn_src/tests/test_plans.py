"""A call whose launch was worked out before is launched as the first such call; and no plan serves another call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.attention import backends
from flash_attn.attention.backends import triton
from flash_attn.call.calls import AttentionCall, CacheCall
from flash_attn.call.options import Options
from flash_attn.core import device
from flash_attn.core.arguments import Arguments
from flash_attn.core.device import Grid, Tensors
from flash_attn.kernels import launches
from flash_attn.kernels.variants import Variant

Call = Callable[[], object]
SCALED = Options(softmax_scale=0.125)


def _starts(x: torch.Tensor) -> list[int] | None:
    """The numbers of a tensor that may be cu_seqlens."""
    return x.tolist() if x.dtype is torch.int32 and x.dim() == 1 else None


class _Gpu:
    """Keeps launches: kernel, grid, layouts of tensors, numbers of cu_seqlens, numbers."""

    target, compute_units = "gfx942", 304

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def kernel(self, variant: Variant) -> SimpleNamespace:
        constants = launches.specification(variant, self.target, None).constants

        def launch(grid: Grid, tensors: Tensors, numbers: Sequence[float]) -> None:
            layouts = [None if x is None else (x.shape, x.stride(), x.dtype, _starts(x)) for x in tensors]
            self.launched.append((variant.name, grid, layouts, list(numbers)))

        return SimpleNamespace(
            block_m=constants.get("BLOCK_M", 0), block_n=constants.get("BLOCK_N", 0), num_xcds=8,
            arguments=Arguments.of(variant, self.target), launch=launch,
        )  # fmt: skip


def _calls() -> list[Call]:
    calls: list[Call] = []
    x = torch.zeros(2, 600, 4, 64, dtype=torch.float16)
    heads_first = torch.zeros(2, 4, 600, 64, dtype=torch.float16).transpose(1, 2)
    off = torch.zeros(2 * 600 * 4 * 64 + 1, dtype=torch.float16)[1:].view(2, 600, 4, 64)
    some_options: tuple[dict[str, Any], ...] = (
        {}, {"causal": True}, {"window_size": (3, 4)}, {"softcap": 2.0}, {"softmax_scale": 0.5},
        {"softmax_scale": -1.0}, {"dropout_p": 0.5}, {"s_aux": torch.zeros(4)},
        {"s_aux": torch.zeros(4, dtype=torch.float16)}, {"alibi_slopes": torch.zeros(4)},
    )  # fmt: skip
    for options in some_options:
        for q, k in ((x, x), (heads_first, x), (x, heads_first), (off, x), (x, x[:, :, :2]), (x[:, :1], x)):
            calls.append(lambda q=q, k=k, options=options: flash_attn_func(q, k, k, **options))
    # Keys and values of one shape with strides of their own.
    for k, v in ((x, heads_first), (heads_first, x)):
        calls.append(lambda k=k, v=v: flash_attn_func(x, k, v))
    calls += [lambda: flash_attn_func(x.float(), x.float(), x.float()), lambda: flash_attn_func(x, x, x[..., :32])]
    # Packed sequences with equal shapes: other starts, other longest sequences, one more sequence, which is empty.
    rows = torch.zeros(600, 4, 64, dtype=torch.float16)
    divisions = [torch.tensor(ends, dtype=torch.int32) for ends in ((0, 300, 600), (0, 200, 600), (0, 200, 600, 600))]
    for options in some_options:
        for starts, longest in product(divisions, (400, 600)):
            packed = (rows, rows, rows, starts, starts.clone(), longest, 600)
            calls.append(lambda packed=packed, options=options: flash_attn_varlen_func(*packed, **options))
    q, cache = torch.zeros(2, 1, 8, 64, dtype=torch.float16), torch.zeros(2, 4096, 2, 64, dtype=torch.float16)
    values = cache.clone()
    pages, new = cache.view(32, 256, 2, 64), cache[:, :1]
    lengths = torch.ones(2, dtype=torch.int32)
    table = torch.zeros(2, 20, dtype=torch.int32)
    more_options: tuple[dict[str, Any], ...] = (
        {}, {"causal": True}, {"cache_seqlens": lengths}, {"cache_seqlens": 9}, {"cache_seqlens": 3000},
        {"num_splits": 1}, {"num_splits": 3}, {"softcap": 2.0}, {"window_size": (5, 0)}, {"softmax_scale": 0.5},
        {"cache_seqlens": lengths, "k": new, "v": new}, {"cache_batch_idx": lengths}, {"cache_leftpad": lengths},
        {"cache_batch_idx": torch.ones(4, dtype=torch.int32)[::2].contiguous(), "cache_seqlens": 3000},
        {"s_aux": torch.zeros(8)}, {"s_aux": torch.zeros(8, dtype=torch.float16)}, {"alibi_slopes": torch.zeros(8)},
    )  # fmt: skip
    for options in more_options:
        for q_ in (q, torch.zeros(2, 8, 1, 64, dtype=torch.float16).transpose(1, 2), q.expand(2, 40, 8, 64)):
            calls.append(lambda q=q_, options=options: flash_attn_with_kvcache(q, cache, values, **options))
    for margin in (0, 300):
        calls.append(lambda margin=margin: triton.kvcache(CacheCall(q, cache, values, SCALED, sm_margin=margin)))
    for block_table in (table, table[:, :16], table[:, :16].contiguous()):
        for k in (pages, pages.transpose(1, 2).contiguous().transpose(1, 2), pages.view(-1, 16, 2, 64)):
            calls.append(
                lambda k=k, table=block_table: flash_attn_with_kvcache(
                    q, k, k, cache_seqlens=lengths, block_table=table
                )
            )
    return calls


def test_launches_of_plans() -> None:
    gpu, calls = _Gpu(), _calls()

    def run(call: Call) -> list[Any]:
        gpu.launched.clear()
        torch.manual_seed(0)
        call()
        return list(gpu.launched)

    with device.using(gpu), backends.using(triton), torch.no_grad():
        fresh = []
        for call in calls:
            device.clear_kernels()
            fresh.append(run(call))
        device.clear_kernels()
        for _ in range(2):
            assert [run(call) for call in calls] == fresh
        assert 50 < len(device.plans()) <= device.MAX_PLANS


def test_no_plan_is_kept_of_a_copy() -> None:
    """A misaligned tensor is copied, and the copy has other strides than the tensor. A call of an aligned tensor with
    the shape and the strides of the misaligned one must not run the copy's launch."""
    gpu = _Gpu()
    aligned = torch.zeros(2, 4, 600, 64, dtype=torch.float16).transpose(1, 2)
    misaligned = torch.zeros(2 * 4 * 600 * 64 + 1, dtype=torch.float16)[1:].view(2, 4, 600, 64).transpose(1, 2)
    assert aligned.stride() == misaligned.stride()
    cache = aligned[:, :, :2]
    off = misaligned[:, :, :2]
    q = torch.zeros(2, 1, 4, 64, dtype=torch.float16)  # whose keys are split
    pairs: list[tuple[Callable[[torch.Tensor], Any], torch.Tensor, torch.Tensor]] = [
        (lambda x: flash_attn_func(x, aligned, aligned), aligned, misaligned),
        (lambda x: flash_attn_func(aligned, x, aligned), aligned, misaligned),
        (lambda x: flash_attn_func(aligned, aligned, x), aligned, misaligned),
        (lambda x: triton.forward(AttentionCall(aligned, aligned, aligned, SCALED, out=x)), aligned, misaligned),
        (lambda x: flash_attn_func(q, x, aligned), aligned, misaligned),
        (lambda x: flash_attn_with_kvcache(q, x, cache), cache, off),
        (lambda x: flash_attn_with_kvcache(q, cache, x), cache, off),
    ]
    with device.using(gpu), backends.using(triton), torch.no_grad():
        for call, whole, moved in pairs:
            device.clear_kernels()
            gpu.launched.clear()
            call(whole)
            fresh = list(gpu.launched)
            device.clear_kernels()
            for x in (moved, moved, whole):
                gpu.launched.clear()
                call(x)
            assert gpu.launched == fresh
            gpu.launched.clear()
            call(moved)
            assert gpu.launched != fresh, "the copy has strides of its own"


def _optional() -> dict[str, tuple[Callable[[torch.Tensor], object], torch.Tensor, torch.Tensor | None]]:
    """Calls with a tensor, a tensor that kernels read as it is, and one that is copied for them."""
    x, q = torch.zeros(2, 100, 4, 64, dtype=torch.float16), torch.zeros(2, 1, 4, 64, dtype=torch.float16)
    rows, cache = torch.zeros(200, 4, 64, dtype=torch.float16), torch.zeros(2, 900, 4, 64, dtype=torch.float16)
    starts = torch.tensor([0, 100, 200], dtype=torch.int32)
    slopes, sinks = torch.zeros(4), torch.zeros(4, dtype=torch.float16)
    bias = torch.zeros(1, 1, 100, 100, dtype=torch.float16)
    packed = (rows, rows, rows, starts, starts, 100, 100)
    return {
        "alibi": (lambda a: flash_attn_func(x, x, x, alibi_slopes=a), slopes, None),
        "sinks": (lambda a: flash_attn_func(x, x, x, s_aux=a), sinks, torch.zeros(4, dtype=torch.bfloat16)),
        "bias": (lambda a: flash_attn_func(x, x, x, attn_bias=a), bias, bias.transpose(2, 3)),
        "packed": (lambda a: flash_attn_varlen_func(*packed, alibi_slopes=a), slopes, None),
        "cache": (lambda a: flash_attn_with_kvcache(q, cache, cache, alibi_slopes=a), slopes, None),
        "cache, sinks": (
            lambda a: flash_attn_with_kvcache(q, cache, cache, s_aux=a), sinks, torch.zeros(4, dtype=torch.bfloat16)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", _optional())
def test_a_plan_passes_on_the_tensors_of_its_call(name: str) -> None:
    call, direct, copied = _optional()[name]
    launched: list[set[int]] = []

    class Gpu(_Gpu):
        def kernel(self, variant: Variant) -> SimpleNamespace:
            kernel = super().kernel(variant)
            kernel.launch = lambda _grid, tensors, _numbers: launched.append(
                {x.data_ptr() for x in tensors if x is not None}
            )
            return kernel

    with device.using(Gpu()), backends.using(triton), torch.no_grad():
        device.clear_kernels()
        if copied is not None:
            call(copied)
            assert not device.plans(), "a plan would keep the copy"
        call(direct)
        assert len(device.plans()) == 1
        other = direct.clone()
        launched.clear()
        call(other)
        assert len(device.plans()) == 1
    assert other.data_ptr() in launched[0]
    assert direct.data_ptr() not in launched[0]


def test_plans_are_bounded() -> None:
    for number in range(device.MAX_PLANS + 2):
        device.plans()[(number,)] = number
    assert len(device.plans()) <= 2
    device.clear_kernels()
