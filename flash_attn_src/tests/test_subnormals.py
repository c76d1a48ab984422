"""fp16 on MI200, whose products take subnormal operands as zero.

Each case loses everything, or a good part, without what the kernels do against it. The bar is everybody's: twice the
error of PyTorch in fp16, which flushes nothing. Most cases run in Triton's interpreter, whose products flush here, and
one of each kind is code of MI200 on the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from assert_close import assert_close
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.attention import backends
from flash_attn.attention.backends import triton as triton_backend
from flash_attn.core import device, jit
from reference import attention, public

from amdgpu_simulator import gpu

TARGET = "gfx90a"
# A weight of exp(-GAP), 1.7e-5 of the largest one, is subnormal in fp16.
GAP = 11.0
Call = Callable[..., torch.Tensor]


@pytest.fixture
def flushing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MI200's kernels in Triton's interpreter, with products that flush."""
    if not jit.interpreting():
        pytest.skip("Triton's interpreter is off in this process")
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    plain = interpreter_builder.create_dot

    def flushed(handle: Any) -> Any:
        if handle.data.dtype != np.float16:
            return handle
        smallest = np.float16(2.0**-14)
        return TensorHandle(np.where(np.abs(handle.data) < smallest, np.float16(0), handle.data), handle.dtype)

    monkeypatch.setattr(interpreter_builder, "create_dot", lambda a, b, *rest: plain(flushed(a), flushed(b), *rest))
    with device.using(jit.Interpreter(TARGET)), backends.using(triton_backend):
        yield


def dominated(seqlen_q: int, seqlen_k: int, heads: int, heads_k: int, dim: int, dim_v: int = 0) -> list[torch.Tensor]:
    """q, k and v. The score of key 0 is GAP above the others. Its value is 0, the other values are near 1."""
    generator = torch.Generator().manual_seed(0)
    q = 0.1 * torch.randn((1, seqlen_q, heads, dim), generator=generator)
    k = 0.1 * torch.randn((1, seqlen_k, heads_k, dim), generator=generator)
    v = 1.0 + 0.1 * torch.randn((1, seqlen_k, heads_k, dim_v or dim), generator=generator)
    q[..., 0], k[..., 0] = dim**0.5, 0.0
    k[:, 0, :, 0] = GAP
    v[:, 0] = 0.0
    return [x.half() for x in (q, k, v)]


def normal(*shapes: tuple[int, ...], size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(size * torch.randn(shape, generator=generator)).half() for shape in shapes]


def check_forward(inputs: list[torch.Tensor], options: dict[str, Any]) -> None:
    with torch.no_grad():
        out, lse, _ = flash_attn_func(*inputs, **public(options), return_attn_probs=True)
    (exact, exact_lse), (rounded, _) = (attention(*inputs, **options, dtype=dtype) for dtype in (torch.float64, None))
    assert_close("out", out, exact, rough=rounded, tiny=1e-6)
    assert_close("lse", lse, exact_lse, tiny=1e-5)


def gradients(call: Call, inputs: list[torch.Tensor], dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    given = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*given)
    return torch.autograd.grad(out, given, dout.to(out.dtype))


def check_gradients(
    call: Call, inputs: list[torch.Tensor], dout: torch.Tensor, options: dict[str, Any], book: Call | None = None
) -> None:
    """Errors count in units of the largest dout, because a gradient is as small."""
    book = book or (lambda *x, dtype: attention(*x, **options, dtype=dtype)[0])
    result = gradients(call, inputs, dout)
    exact = gradients(lambda *x: book(*x, dtype=torch.float64), [x.double() for x in inputs], dout)
    rounded = gradients(lambda *x: book(*x, dtype=None), inputs, dout)
    unit = 1.0 / float(dout.abs().max())
    for name, mine, expected, same in zip(("dq", "dk", "dv", "dbias"), result, exact, rounded, strict=False):
        assert mine.isfinite().all(), name
        assert_close(name, mine.double() * unit, expected * unit, rough=same.double() * unit, tiny=1e-6)


FORWARDS: list[tuple[int, dict[str, Any]]] = [
    (64, {}),
    (128, {"causal": True}),
    (40, {"window": (30, 5)}),
    (64, {"s_aux": torch.tensor([3.0, 14.0])}),
    (64, {"softcap": 50.0}),
    (64, {"softcap": 50.0, "alibi_slopes": torch.tensor([0.01, 0.0])}),
    (512, {}),
]


@pytest.mark.parametrize(("dim", "options"), FORWARDS)
@pytest.mark.usefixtures("flushing")
def test_a_dominating_key(dim: int, options: dict[str, Any]) -> None:
    check_forward(dominated(40, 150, 2, 1, dim), options)


@pytest.mark.usefixtures("flushing")
def test_a_dominating_key_of_other_kernels() -> None:
    q, k, v = dominated(40, 100, 2, 1, 192, 128)
    exact, rounded = (attention(q, k, v, dtype=dtype)[0] for dtype in (torch.float64, None))
    starts_q, starts_k = torch.tensor([0, 40]).int(), torch.tensor([0, 100]).int()
    with torch.no_grad():
        assert_close("value dims", flash_attn_func(q, k, v), exact, rough=rounded, tiny=1e-6)
        packed = flash_attn_varlen_func(q[0], k[0], v[0], starts_q, starts_k, 40, 100)
    assert_close("varlen", packed[None], exact, rough=rounded, tiny=1e-6)


def decode(page_size: int, dim: int, dim_v: int) -> None:
    q, k, v = dominated(1, 160, 4, 1, dim)
    v = k[..., :dim_v] if dim_v < dim else v
    exact, rounded = (attention(q, k[:, :150], v[:, :150], dtype=dtype) for dtype in (torch.float64, None))
    table = None
    if page_size:
        k = k.reshape(-1, page_size, 1, dim)
        v = k[..., :dim_v] if dim_v < dim else v.reshape(-1, page_size, 1, dim)
        table = torch.arange(160 // page_size, dtype=torch.int32)[None]
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=150, block_table=table, num_splits=2, return_softmax_lse=True
    )
    assert_close("out", out, exact[0], rough=rounded[0], tiny=1e-6)
    assert_close("lse", lse, exact[1], tiny=1e-5)


@pytest.mark.parametrize(("page_size", "dim", "dim_v"), [(0, 64, 64), (16, 128, 128), (32, 64, 64), (32, 576, 512)])
@pytest.mark.usefixtures("flushing")
def test_decoding_with_a_dominating_key(page_size: int, dim: int, dim_v: int) -> None:
    decode(page_size, dim, dim_v)


@pytest.mark.parametrize("size", [100.0, 1.0, 1e-3, 1e-5, 1e-7])
@pytest.mark.usefixtures("flushing")
def test_gradients_of_any_size(size: float) -> None:
    inputs = normal((1, 70, 4, 64), (1, 150, 2, 64), (1, 150, 2, 64))
    (dout,) = normal((1, 70, 4, 64), size=size)
    check_gradients(lambda *x: flash_attn_func(*x, causal=True), inputs, dout, {"causal": True})


@pytest.mark.parametrize(("dim", "options"), [*FORWARDS, (64, {"causal": True, "s_aux": torch.tensor([9.0, 12.0])})])
@pytest.mark.usefixtures("flushing")
def test_gradients_with_a_dominating_key(dim: int, options: dict[str, Any]) -> None:
    (dout,) = normal((1, 40, 2, dim), size=1e-4)
    sinks = options.get("s_aux")
    check_gradients(
        lambda *x: flash_attn_func(*x, **public(options)), dominated(40, 60, 2, 1, dim), dout,
        options if sinks is None else options | {"s_aux": sinks.double()},
    )  # fmt: skip


@pytest.mark.usefixtures("flushing")
def test_gradients_of_a_bias() -> None:
    """The bias makes key 0 dominate. One row is hidden by a finite bias."""
    q, k, v = normal((1, 40, 2, 64), (1, 60, 1, 64), (1, 60, 1, 64))
    bias = torch.zeros(1, 2, 40, 60)
    bias[..., 0] = GAP
    bias[:, :, 3] = -1e9
    (dout,) = normal((1, 40, 2, 64), size=1e-4)
    check_gradients(
        lambda q, k, v, bias: flash_attn_func(q, k, v, attn_bias=bias), [q, k, v, bias], dout, {},
        lambda q, k, v, bias, dtype: attention(q, k, v, attn_bias=bias, dtype=dtype)[0],
    )  # fmt: skip


@pytest.mark.usefixtures("flushing")
def test_gradients_with_dropout() -> None:
    inputs = dominated(40, 60, 2, 1, 64)
    (dout,) = normal((1, 40, 2, 64), size=1e-4)
    with torch.no_grad():
        torch.manual_seed(7)
        kept = flash_attn_func(*inputs, dropout_p=0.3, return_attn_probs=True)[2] >= 0

    def call(*x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        out = flash_attn_func(*x, dropout_p=0.3)
        assert isinstance(out, torch.Tensor)
        return out

    check_gradients(call, inputs, dout, {"dropout_p": 0.3, "kept": kept})


@pytest.mark.usefixtures("flushing")
def test_gradients_of_rows_of_many_sizes() -> None:
    """Rows of dout are 1 to 2^-20 times the largest row, and a value of v is far larger than the others."""
    inputs = normal((1, 70, 2, 64), (1, 90, 2, 64), (1, 90, 2, 64))
    inputs[2][:, 5] *= 200.0
    (dout,) = normal((1, 70, 2, 64), size=0.5)
    dout *= 2.0 ** -(torch.arange(70) % 21).half()[None, :, None, None]
    check_gradients(flash_attn_func, inputs, dout, {})


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.usefixtures("flushing")
def test_dq_of_small_rows_beside_a_large_one(dim: int) -> None:
    """One power of two for a head would leave the gradients of the small rows' scores subnormal."""
    q, k, v = normal((1, 50, 2, dim), (1, 50, 1, dim), (1, 50, 1, dim))
    (dout,) = normal((1, 50, 2, dim), size=2e-5)
    dout[:, 0] = 50.0 * torch.randn(1, 2, dim, generator=torch.Generator().manual_seed(2))
    mine, *_ = gradients(lambda *x: flash_attn_func(*x, causal=True), [q, k, v], dout)
    wide = [x.double() for x in (q, k, v)]
    exact, *_ = gradients(lambda *x: attention(*x, causal=True, dtype=torch.float64)[0], wide, dout)
    same, *_ = gradients(lambda *x: attention(*x, causal=True, dtype=None)[0], [q, k, v], dout)
    small = slice(1, None)
    unit = 1.0 / float(exact[:, small].abs().max())
    assert_close(
        "dq", mine[:, small].double() * unit, exact[:, small] * unit, rough=same[:, small].double() * unit, tiny=1e-3
    )


@pytest.mark.usefixtures("flushing")
def test_gradients_of_packed_sequences_with_garbage_outside() -> None:
    starts = torch.tensor([3, 40, 40, 80], dtype=torch.int32)
    inputs = normal((90, 2, 64), (90, 2, 64), (90, 2, 64))
    (dout,) = normal((90, 2, 64), size=1e-3)
    for x in (inputs[2], dout):
        x[:3], x[80:] = float("nan"), 60000.0

    def call(*x: torch.Tensor) -> torch.Tensor:
        return flash_attn_varlen_func(*x, starts, starts, 40, 40)[3:80]

    def book(*x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return torch.cat([attention(*(y[None, a:b] for y in x), dtype=dtype)[0][0] for a, b in ((3, 40), (40, 80))])

    given = [x.detach().clone().requires_grad_() for x in inputs]
    out = flash_attn_varlen_func(*given, starts, starts, 40, 40)
    result = torch.autograd.grad(out, given, dout)
    inside = [torch.nan_to_num(x, 0.0) for x in inputs]
    exact = gradients(lambda *x: book(*x, dtype=torch.float64), [x.double() for x in inside], dout[3:80])
    rounded = gradients(lambda *x: book(*x, dtype=None), inside, dout[3:80])
    for name, mine, expected, same in zip(("dq", "dk", "dv"), result, exact, rounded, strict=True):
        assert_close(name, mine[3:80] * 1e3, expected[3:80] * 1e3, rough=same[3:80] * 1e3, tiny=1e-6)


@pytest.mark.usefixtures("flushing")
def test_an_infinity_does_not_reach_other_heads() -> None:
    inputs = normal((1, 40, 2, 64), (1, 40, 2, 64), (1, 40, 2, 64))
    (dout,) = normal((1, 40, 2, 64), size=1e-3)
    clean = gradients(flash_attn_func, inputs, dout)
    dout[0, 7, 0, 3] = float("inf")
    spoiled = gradients(flash_attn_func, inputs, dout)
    for one, other in zip(clean, spoiled, strict=True):
        assert torch.equal(one[:, :, 1], other[:, :, 1])


@pytest.mark.usefixtures("flushing")
def test_gradients_of_nothing() -> None:
    """dout and v are zero: this causes neither 0 / 0 nor a shift that fp32 cannot hold."""
    inputs = normal((1, 40, 2, 64), (1, 40, 1, 64), (1, 40, 1, 64))
    for dout, v in ((torch.zeros(1, 40, 2, 64).half(), inputs[2]), (inputs[0], torch.zeros(1, 40, 1, 64).half())):
        dq, dk, _ = gradients(flash_attn_func, [*inputs[:2], v], dout)
        assert not dq.any()
        assert not dk.any()


def test_code_of_the_forward() -> None:
    with gpu.pretend(TARGET) as launched:
        check_forward(dominated(40, 150, 2, 1, 64), {})
    assert launched == ["fwd-fp16-d64"]


def test_code_of_decoding() -> None:
    with gpu.pretend(TARGET) as launched:
        decode(0, 64, 64)
    assert launched == ["decode-fp16-d64", "combine-fp16-d128"]


@pytest.mark.long
def test_code_of_the_backward() -> None:
    inputs = normal((1, 70, 2, 64), (1, 90, 1, 64), (1, 90, 1, 64))
    with gpu.pretend(TARGET) as launched:
        for size in (1.0, 1e-3, 1e-5):
            (dout,) = normal((1, 70, 2, 64), size=size)
            check_gradients(lambda *x: flash_attn_func(*x, causal=True), inputs, dout, {"causal": True})
    assert launched == ["fwd-fp16-d64", "bwd-norms-fp16-d64", "bwd-dq-fp16-d64", "bwd-dkdv-fp16-d64"] * 3
