"""A call whose launch was worked out before is launched as the first such call; and no plan serves another call."""

from __future__ import annotations

import ast
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.attention import backends
from flash_attn.attention.backends import triton
from flash_attn.attention.backends.triton import gradients as triton_gradients
from flash_attn.call import plans
from flash_attn.call.calls import AttentionCall, CacheCall, attention_call
from flash_attn.call.options import FIELDS, Options, replace
from flash_attn.core import device
from flash_attn.core.arguments import Arguments
from flash_attn.core.device import Grid, Tensors
from flash_attn.core.protocol import launch, spoil
from flash_attn.flash_attn_interface import _dense
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
        self.kernel = cache(self.kernel)  # type: ignore[method-assign]

    def kernel(self, variant: Variant) -> SimpleNamespace:
        constants = launches.specification(variant, self.target, None).constants

        def launch(grid: Grid, tensors: Tensors, numbers: Sequence[float]) -> None:
            layouts = [None if x is None else (x.shape, x.stride(), x.dtype, _starts(x)) for x in tensors]
            self.launched.append((variant.name, grid, layouts, list(numbers)))

        return SimpleNamespace(
            block_m=constants.get("BLOCK_M", 0), block_n=constants.get("BLOCK_N", 0), num_xcds=8,
            arguments=Arguments.of(variant, self.target), launch=launch,
        )  # fmt: skip


def _kept() -> list[plans._Plan]:
    return [x for x in device.plans().values() if isinstance(x, plans._Plan)]


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
    # Other longest keys, and padding, as upstream's private functions take it.
    starts = {"cu_seqlens_q": divisions[0], "cu_seqlens_k": divisions[0].clone(), "max_seqlen_q": 600}
    for more in ({}, {"leftpad_k": torch.zeros(2, dtype=torch.int32)}, {"max_seqlen_k": 500}):
        packed_call = attention_call(rows, rows, rows, softmax_scale=0.125, **{"max_seqlen_k": 600, **starts, **more})
        calls.append(lambda packed_call=packed_call: triton.forward(packed_call))
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
        for _ in range(3):  # as it is, recorded, replayed
            assert [run(call) for call in calls] == fresh
        assert len(device.plans()) <= device.MAX_PLANS
        assert len(_kept()) > 100


def test_multiprocessors_that_a_call_leaves_to_others_get_no_splits() -> None:
    gpu, q, cache = _Gpu(), torch.zeros(2, 1, 8, 64).half(), torch.zeros(2, 4096, 2, 64).half()
    with device.using(gpu):
        for margin in (0, gpu.compute_units):
            triton.kvcache(CacheCall(q, cache, cache, SCALED, sm_margin=margin))
    (_, splits, *_), _, (_, whole, *_) = gpu.launched
    assert splits[0] > whole[0] == 2 * 2


def test_the_lengths_of_a_cache_end_at_its_capacity() -> None:
    """New keys that find no room are lost: no kernel may read behind the cache."""
    gpu, x = _Gpu(), torch.zeros(2, 600, 8, 64).half()
    lengths = torch.tensor([60, 3], dtype=torch.int32)
    with device.using(gpu), backends.using(triton):
        flash_attn_with_kvcache(x, x[:, :64], x[:, :64].clone(), x[:, :10], x[:, :10], cache_seqlens=lengths)
    numbers = [of[3] for *_, layouts, _ in gpu.launched for of in layouts if of is not None]
    assert [64, 13] in numbers
    assert [70, 13] not in numbers


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
            for x in (moved, moved, moved, whole, whole, whole):
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
        for x in (direct, copied):
            if x is None:
                continue
            for _ in range(3):
                call(x)
            kept, other = len(_kept()), x.clone()
            launched.clear()
            call(other)
            assert len(_kept()) == kept > 0
            assert x.data_ptr() not in launched[0]
            if x is direct:
                assert other.data_ptr() in launched[0]


def test_plans_are_bounded() -> None:
    for number in range(device.MAX_PLANS + 2):
        device.plans()[(number,)] = number
    assert len(device.plans()) <= 2
    device.clear_kernels()


@contextmanager
def _gpu() -> Iterator[_Gpu]:
    gpu = _Gpu()
    with device.using(gpu), backends.using(triton):
        yield gpu


def _launched(gpu: _Gpu, call: Call, times: int = 1) -> list[Any]:
    for _ in range(times):
        gpu.launched.clear()
        call()
    return list(gpu.launched)


def _zeros(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


X, LONG = _zeros(2, 100, 4, 64), _zeros(2, 200, 4, 64)
SHORT = LONG[:, :100].as_strided((2, 90, 4, 64), X.stride())
HEADS_FIRST = _zeros(2, 4, 100, 64).transpose(1, 2)
MISALIGNED = _zeros(X.numel() + 1)[1:].view(2, 4, 100, 64).transpose(1, 2)  # is copied, to other strides
# A part of a key -> a call, and another call that differs in this part alone.
_DENSE = {
    "shape": ({}, {"k": SHORT, "v": SHORT}),
    "strides": ({}, {"k": LONG[:, :100], "v": LONG[:, 100:]}),
    "dtype": ({"s_aux": _zeros(4)}, {"s_aux": _zeros(4, dtype=torch.bfloat16)}),
    "alignment": ({"q": HEADS_FIRST}, {"q": MISALIGNED}),
    "causal": ({}, {"causal": True}),
    "window_size": ({}, {"window_size": (3, 4)}),
    "softcap": ({"softcap": 1.0}, {"softcap": 2.0}),
    "softmax_scale": ({"softmax_scale": 1.0}, {"softmax_scale": 2.0}),
    "dropout_p": ({"dropout_p": 0.25}, {"dropout_p": 0.5}),
    "kinds": ({"s_aux": torch.zeros(4)}, {"alibi_slopes": torch.zeros(4)}),
}  # fmt: skip
OPTIONS = FIELDS[Options].names
_PARTS = {"shape": 0, "strides": 1, "dtype": 2, "device": 3, "alignment": 4}  # of five for each tensor


def _broken(part: str) -> Callable[..., Any]:
    """`plans.key`, whose keys lack a part."""
    real, places = plans.key, [name for name in OPTIONS if isinstance(getattr(SCALED, name), float | bool | tuple)]

    def key(kept: Any, who: object, values: tuple[Any, ...], *, grad: bool = False) -> Any:
        found = real(kept, who, values, grad=grad)
        assert found is not None
        if part in places and who is _dense:  # whose options come last
            place = len(values) - 9 + OPTIONS.index(part)
            neutral = real(kept, who, (*values[:place], getattr(SCALED, part), *values[place + 1 :]))
            assert neutral is not None
            return neutral[0], found[1]
        who, kinds, *more = found[0]
        layouts = more[3:]
        if part in _PARTS:
            del layouts[_PARTS[part] :: 5]
        return (who, kinds if part != "kinds" else None, *more[:3], *layouts), found[1]

    return key


@pytest.mark.parametrize("part", _DENSE)
def test_each_part_of_a_key_is_needed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the part, a call runs the launch of another call, or takes a tensor for another one."""
    first, second = (lambda more=more: flash_attn_func(**({"q": X, "k": X, "v": X} | more)) for more in _DENSE[part])
    with _gpu() as gpu, torch.no_grad():
        torch.manual_seed(0)
        fresh = _launched(gpu, second)
        device.clear_kernels()
        _launched(gpu, first, 3)
        assert _launched(gpu, second) == fresh
        device.clear_kernels()
        monkeypatch.setattr(plans, "key", _broken(part))
        _launched(gpu, first, 3)
        assert _launched(gpu, second) != fresh


def test_a_key_tells_devices_and_servants_apart() -> None:
    keys = [plans.key({}, who, (x, X, X)) for who in (1, 2) for x in (X, X.to("meta"))]
    assert len({key[0] for key in keys if key is not None}) == 4


def _raises(kind: type[Exception], call: Call) -> None:
    with pytest.raises(kind):
        call()


def test_a_plan_serves_no_call_that_is_refused() -> None:
    """A value that equals a served one, but is of another type, and a tensor that requires a gradient."""
    slopes = torch.zeros(4)
    with _gpu() as gpu:
        _launched(gpu, lambda: flash_attn_func(X, X, X, causal=True), 3)
        _launched(gpu, lambda: flash_attn_func(X, X, X, alibi_slopes=slopes), 3)
        _launched(gpu, lambda: flash_attn_func(X, X, X), 3)
        _raises(TypeError, lambda: flash_attn_func(X, X, X, causal=1.0))  # type: ignore[arg-type]
        _raises(TypeError, lambda: flash_attn_func(X, X, X, window_size=(-1.0, -1.0)))  # type: ignore[arg-type]
        _raises(ValueError, lambda: flash_attn_func(X, X, X, alibi_slopes=slopes.clone().requires_grad_()))
        assert not _launched(gpu, lambda: torch.vmap(flash_attn_func)(X[None], X[None], X[None]))
        leaf = X.clone().requires_grad_()
        assert flash_attn_func(leaf, X, X).requires_grad
        scale = torch.tensor(0.5)
        for value in (0.5, 2.0):
            scale.fill_(value)
            assert value in _launched(gpu, lambda: flash_attn_func(X, X, X, softmax_scale=scale), 3)[0][3]  # type: ignore[arg-type]
        edge = torch.tensor(3)
        window = (edge, edge)
        for _ in range(3):
            flash_attn_func(X, X, X, window_size=window)  # type: ignore[arg-type]
        edge.fill_(5)
        again = _launched(gpu, lambda: flash_attn_func(X, X, X, window_size=window))  # type: ignore[arg-type]
        assert again == _launched(gpu, lambda: flash_attn_func(X, X, X, window_size=(5, 5)))


def test_a_plan_takes_each_tensor_by_its_own_name() -> None:
    """One tensor as q, k and v is recorded; the next call has three."""
    launched: list[list[int | None]] = []

    class Gpu(_Gpu):
        def kernel(self, variant: Variant) -> SimpleNamespace:
            kernel = super().kernel(variant)
            names = kernel.arguments.pointers
            kernel.launch = lambda _grid, tensors, _numbers: launched.append(
                [None if x is None else x.data_ptr() for name, x in zip(names, tensors, strict=True) if name in "qkv"]
            )
            return kernel

    own = [X.clone() for _ in range(3)]
    with device.using(Gpu()), backends.using(triton), torch.no_grad():
        for _ in range(3):
            flash_attn_func(X, X, X)
        flash_attn_func(*own)
    assert launched[-1] == [x.data_ptr() for x in own]


def test_a_plan_returns_the_result_of_its_caller() -> None:
    with _gpu(), torch.no_grad():
        for _ in range(4):
            out = torch.empty_like(X)
            assert triton.forward(AttentionCall(X, X, X, SCALED, out=out)).out is out
        assert len(_kept()) == 1


def test_a_plan_draws_its_random_numbers_itself() -> None:
    with _gpu(), torch.no_grad():
        states = []
        for _ in range(4):
            result = triton.forward(AttentionCall(X, X, X, replace(SCALED, dropout_p=0.5)))
            assert result.rng_state is not None
            states.append(tuple(result.rng_state.tolist()))
        assert len(set(states)) == 4
        assert len(_kept()) == 1


@pytest.mark.parametrize("mode", ["fake", "autocast", "watched"])
def test_a_plan_stands_behind_modes(mode: str) -> None:
    def call() -> Any:
        return flash_attn_func(X.float(), X.float(), X.float())

    with _gpu() as gpu, torch.no_grad():
        plain = _launched(gpu, call, 3)
        if mode == "fake":
            from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

            with FakeTensorMode(allow_non_fake_inputs=True):
                assert isinstance(flash_attn_func(X.float(), X.float(), X.float()), FakeTensor)
        elif mode == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                assert _launched(gpu, call, 3)[0][0].startswith("fwd-bf16")
        else:
            seen = []

            def forward(call: AttentionCall) -> Any:
                seen.append(spoil())
                return triton.forward(call)

            with backends.using(SimpleNamespace(forward=forward, name=triton.name)):  # type: ignore[arg-type]
                _launched(gpu, call, 4)
            assert len(seen) == 4
        assert _launched(gpu, call) == plain


def test_a_plan_knows_nothing_of_memory_that_tensors_share() -> None:
    """Keys to append that lie in the cache are copied before; values that are the first columns of the keys are read
    once. Equal layouts elsewhere are not."""
    q, cache, values = _zeros(1, 1, 4, 64), _zeros(1, 300, 4, 64), _zeros(1, 300, 4, 64)
    latent, wide = _zeros(1, 300, 1, 128), _zeros(1, 1, 4, 128)
    length = torch.ones(1, dtype=torch.int32)
    apart = latent.clone()
    calls: tuple[tuple[Call, Call], ...] = (
        (
            lambda: flash_attn_with_kvcache(q, cache, values, q, q, cache_seqlens=length),
            lambda: flash_attn_with_kvcache(q, cache, values, cache[:, :1], cache[:, :1], cache_seqlens=length),
        ),
        (
            lambda: flash_attn_with_kvcache(wide, latent, apart[..., :64], cache_seqlens=length),
            lambda: flash_attn_with_kvcache(wide, latent, latent[..., :64], cache_seqlens=length),
        ),
    )
    with _gpu() as gpu, torch.no_grad():
        for first, second in calls:
            device.clear_kernels()
            fresh = _launched(gpu, first), _launched(gpu, second)
            for _ in range(4):
                assert (_launched(gpu, first), _launched(gpu, second)) == fresh
        assert fresh[0] != fresh[1]


def test_pages_are_checked_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2.8.4 on."""
    monkeypatch.setattr("flash_attn.attention.operators.kvcache.SINCE_2_8_4", True)
    pages, table = _zeros(4, 256, 4, 64), torch.zeros(1, 2, dtype=torch.int32)
    length = torch.ones(1, dtype=torch.int32)

    def call() -> object:
        return flash_attn_with_kvcache(X[:1, :1], pages, pages, cache_seqlens=length, block_table=table)

    with _gpu() as gpu, torch.no_grad():
        _launched(gpu, call, 4)
        length.fill_(600)
        _raises(RuntimeError, call)


def test_backwards_by_plan() -> None:
    """As a backward without a plan, with every option; and no plan serves another shape."""
    some: tuple[dict[str, Any], ...] = (
        {}, {"causal": True}, {"alibi_slopes": torch.zeros(4)}, {"s_aux": torch.zeros(4).requires_grad_()},
        {"attn_bias": _zeros(2, 4, 100, 100).requires_grad_()}, {"dropout_p": 0.5}, {"softcap": 1.0},
    )  # fmt: skip
    leaves = [X.clone().requires_grad_() for _ in range(3)]
    few = [LONG[:, :50].clone().requires_grad_() for _ in range(3)]

    def gradients(x: list[torch.Tensor], options: dict[str, Any]) -> None:
        flash_attn_func(*x, **options).sum().backward()

    calls = [(x, {} if x is few and "attn_bias" in options else options) for options in some for x in (leaves, few)]
    with _gpu() as gpu:
        fresh = []
        for call in calls:
            device.clear_kernels()
            fresh.append(_launched(gpu, lambda call=call: gradients(*call)))
        device.clear_kernels()
        for _ in range(3):
            assert [_launched(gpu, lambda call=call: gradients(*call)) for call in calls] == fresh
        assert any(
            key[0] is triton_gradients._backward for key, x in device.plans().items() if isinstance(x, plans._Plan)
        )


OTHER = torch.ones(2)


@pytest.mark.parametrize(
    ("work", "kept"),
    [
        (lambda x: x.add(1).narrow(0, 0, 1), 1),
        (lambda x: torch.zeros_like(x).split(1), 1),
        (lambda x: float(x.sum()), 0),  # reads
        (lambda x: x.nonzero(), 0),  # a shape by content
        (lambda _: OTHER.add_(1), 0),  # a tensor that is not the call's
        (lambda _: spoil(), 0),
    ],
)
def test_what_a_record_refuses(work: Callable[[torch.Tensor], object], kept: int) -> None:
    """And a plan holds no tensor."""
    arguments = SimpleNamespace(fill=lambda values: (tuple(values.values()), ()))
    kernel: Any = SimpleNamespace(launch=lambda *_: None, arguments=arguments)
    x = torch.ones(2)

    def run(own: tuple[torch.Tensor, ...] = (x,)) -> torch.Tensor:
        work(own[0])
        out = torch.empty_like(own[0])
        launch(kernel, (1, 1, 1), {"q": own[0], "out": out})
        return out

    with _gpu():
        for _ in range(3):
            out = plans.planned("who", (x,), run)
        assert out.shape == x.shape
        assert len(_kept()) == kept
        references = weakref.ref(x), weakref.ref(out)
        del x, out, run
        gc.collect()
        assert references[0]() is references[1]() is None


def test_what_looks_at_addresses_says_so() -> None:
    """A decision by an address, a storage or a list of a tensor's numbers is in no key: its function calls `spoil`, or
    it decides by 16 bytes, or it serves AMD's kernels, which `device.run` refuses, or an operator without plans. The
    torch backend launches nothing."""
    root = Path(plans.__file__).parents[1]
    silent = {
        "attention/backends/asm/attention.py": {"_rows_without_keys", "forward", "operand"},
        "attention/backends/asm/gradients.py": {"backward"},
        "attention/backends/ck/dropout.py": {"signed_probabilities"},
        "attention/backends/ck/parameters.py": {"address", "aligned", "rows"},
        "attention/backends/triton/inputs.py": {"rows"},
        "attention/operators/flops.py": {"_cache_pairs", "_lengths"},
        "attention/operators/int8.py": {"_run_varlen"},
        "call/plans.py": {"key"},
    }
    result: dict[str, set[str]] = {}
    for folder in ("call", "attention"):
        for path in sorted((root / folder).rglob("*.py")):
            if path.parent.name == "torch":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    text = ast.unparse(node)
                    looks = any(word in text for word in ("data_ptr(", "untyped_storage(", "_is_alias(", "tolist("))
                    if looks and "spoil()" not in text:
                        result.setdefault(path.relative_to(root).as_posix(), set()).add(node.name)
    assert result == silent
