"""Learnable sinks, `s_aux`: in every public function, by PyTorch and by the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import flash_attn
import flash_attn_interface as fa3
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton
from flash_attn.attention.backends.triton import attention as triton_attention
from flash_attn.attention.backends.triton import cache as triton_cache
from flash_attn.attention.backends.triton.kernels import find_one
from flash_attn.attention.operators.sinks import gradient
from flash_attn.call.calls import cache_call, replace
from flash_attn.core.protocol import launch
from op_arguments import op_arguments
from small_calls import in_one_graph, offsets

torch.set_num_threads(2)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
_CU_Q, _CU_K = offsets(0, 7, 7, 19), offsets(0, 4, 9, 30)  # a sequence without queries; more queries than keys


def _draw(dtype: torch.dtype = torch.float32, sinks: torch.dtype | None = None, dim: int = 16) -> list[torch.Tensor]:
    """q (2, 40, 4, dim), k and v (2, 29, 2, dim), sinks (4,). With a causal mask the first 11 rows see no key."""
    generator = torch.Generator().manual_seed(dim)
    shapes = ((2, 40, 4, dim), (2, 29, 2, dim), (2, 29, 2, dim), (4,))
    types = (dtype, dtype, dtype, sinks or dtype)
    return [
        torch.randn(shape, generator=generator).to(DEVICE, each).requires_grad_()
        for shape, each in zip(shapes, types, strict=True)
    ]


def _check(leaves: list[torch.Tensor], call: Callable[..., Any] = flash_attn.flash_attn_func, **options: Any) -> None:
    """Compares out, lse and the four gradients with reference attention."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    *inputs, sinks = leaves
    out, lse, _ = call(*inputs, return_attn_probs=True, s_aux=sinks, **reference.public(options))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, out.dtype)
    got = (out, lse, *torch.autograd.grad(out, leaves, dout))
    results = []
    for dtype in (torch.float64, leaves[0].dtype):
        wide = [x.detach().to(dtype).requires_grad_() for x in leaves]
        best, best_lse = reference.attention(*wide[:3], s_aux=wide[3], dtype=dtype, **options)
        results.append((best, best_lse, *torch.autograd.grad(best, wide, dout.to(dtype))))
    assert got[-1].dtype is sinks.dtype
    for name, value, exact, rough in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, *results, strict=True):
        tiny = 2.0 * torch.finfo(sinks.dtype).eps if name == "dsinks" else 0.0  # a sum over rows, rounded at the end
        assert_close(name, value, exact, rough=None if name == "lse" else rough, tiny=max(tiny, 2e-5))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 1.0, 4, device=DEVICE)},
    "negative scale": {"softmax_scale": -0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_by_pytorch(options: dict[str, Any]) -> None:
    _check(_draw(), **options)
    _check(_draw(torch.float16, torch.float32), **options)


# The types of q and of the sinks: alike, each other one, or cast.
_TYPES = (
    (torch.float16, torch.float16), (torch.float16, torch.float32), (torch.float16, torch.bfloat16),
    (torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.float16),
)  # fmt: skip


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(("options", "types"), list(zip(OPTIONS.values(), _TYPES, strict=True)), ids=list(OPTIONS))
def test_by_triton(options: dict[str, Any], types: tuple[torch.dtype, torch.dtype]) -> None:
    q, k, v, sinks = _draw(*types)
    with backends.using(triton):
        _check([q[:1], k[:1], v[:1], sinks], **options)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
def test_sinks_at_both_ends(backend: Any) -> None:
    """-inf is no sink. A sink far above the scores takes all the weight, and nothing overflows."""
    if GPU and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    q, k, v, _ = (x.detach()[:1] for x in _draw())
    with backends.using(backend):
        none = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        low = torch.full((4,), -torch.inf, device=DEVICE)
        for got, expected in zip(
            flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, s_aux=low), none, strict=True
        ):
            assert_close("no sink", got, expected, tiny=1e-6)
        high = torch.full((4,), 3e4, device=DEVICE)
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, s_aux=high)
    assert not out.any()
    assert (lse == 3e4).all()


def test_packed_functions_agree() -> None:
    *_, sinks = _draw()
    qkv = torch.randn(19, 3, 4, 16, device=DEVICE, requires_grad=True)
    cu = _CU_Q.to(DEVICE)
    q, k, v = qkv.unbind(1)
    kv = torch.stack((k, v), 1)

    def dense(*x: torch.Tensor) -> list[torch.Tensor]:
        return [each[None] for each in x]

    for one, *others in (
        (
            flash_attn.flash_attn_func(*dense(q, k, v), s_aux=sinks),
            flash_attn.flash_attn_qkvpacked_func(*dense(qkv), s_aux=sinks),
            flash_attn.flash_attn_kvpacked_func(*dense(q, kv), s_aux=sinks),
        ),
        (
            flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, s_aux=sinks),
            flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 12, s_aux=sinks),
            flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 12, 12, s_aux=sinks),
            fa3.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, s_aux=sinks),
        ),
    ):
        expected = torch.autograd.grad(one.sum(), (qkv, sinks), retain_graph=True)
        for other in others:
            assert_close("out", other, one.detach(), tiny=1e-6)
            for got, best in zip(
                torch.autograd.grad(other.sum(), (qkv, sinks), retain_graph=True), expected, strict=True
            ):
                assert_close("gradient", got, best, tiny=1e-5)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
def test_varlen(backend: Any) -> None:
    """Each sequence as if it were alone; a row outside of every sequence has neither weight nor gradient."""
    if GPU and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    q, k, v, sinks = _draw()
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = _CU_Q.to(DEVICE), _CU_K.to(DEVICE)
    with backends.using(backend):
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            *flat, cu_q, cu_k, 12, 21, causal=True, return_attn_probs=True, s_aux=sinks
        )
        got = torch.autograd.grad(out.square().sum(), (*flat, sinks))
    spans = zip(_CU_Q[:-1].tolist(), _CU_Q[1:].tolist(), _CU_K[:-1].tolist(), _CU_K[1:].tolist(), strict=True)
    total = out.new_zeros((), dtype=torch.float64)
    for q0, q1, k0, k1 in spans:
        alone, alone_lse = reference.attention(
            flat[0][None, q0:q1], flat[1][None, k0:k1], flat[2][None, k0:k1], causal=True, s_aux=sinks,
            dtype=torch.float64,
        )  # fmt: skip
        assert_close("out", out[q0:q1], alone[0])
        assert_close("lse", lse[:, q0:q1], alone_lse[0])
        total = total + alone.square().sum()
    for name, one, best in zip(
        ("dq", "dk", "dv", "dsinks"), got, torch.autograd.grad(total, (*flat, sinks)), strict=True
    ):
        assert_close(name, one, best, tiny=2e-5)
    assert not out[19:].any()
    assert (lse[:, 19:] == torch.inf).all()


def test_dropout_comes_after_the_sink() -> None:
    """The gradients of the sinks and of q, with the mask that S_dmask shows."""
    q, k, v, sinks = _draw()
    out, _, dmask = flash_attn.flash_attn_func(q, k, v, 0.4, return_attn_probs=True, s_aux=sinks)
    kept = ~dmask.signbit()
    best, _ = reference.attention(q, k, v, s_aux=sinks, dropout_p=0.4, kept=kept, dtype=torch.float64)
    assert_close("out", out, best)
    leaves = (q, sinks)
    expected = torch.autograd.grad(best.square().sum(), leaves)
    for name, got, exact in zip(
        ("dq", "dsinks"), torch.autograd.grad(out.square().sum(), leaves), expected, strict=True
    ):
        assert_close(name, got, exact, tiny=2e-5)


CACHES: dict[str, dict[str, Any]] = {
    "one split": {"num_splits": 1},
    "splits": {"num_splits": 3, "causal": True},
    "splits, softcap": {"num_splits": 2, "softcap": 2.0},
    "chunks": {"num_splits": 3, "attention_chunk": 16},
    "pages": {"num_splits": 2, "pages": 16},
    "pages of any size": {"num_splits": 1, "pages": 7},
    "the forward kernel": {"whole": True, "causal": True},
    "the forward kernel, pages": {"whole": True, "pages": 32},
    "the forward kernel, pages of any size": {"whole": True, "pages": 7},
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache(name: str) -> None:
    """The sink counts once whatever the number of splits, even for a sequence without keys."""
    options = dict(CACHES[name])
    pages, whole = options.pop("pages", 0), options.pop("whole", False)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(3, 2, 4, 16, generator=generator).to(DEVICE, torch.float16)
    k, v = torch.randn(2, 3, 128, 2, 16, generator=generator).to(DEVICE, torch.float16)
    sinks = torch.randn(4, generator=generator).to(DEVICE)
    table = None
    if pages:
        count = 128 // pages
        k, v = (x[:, : count * pages].reshape(3 * count, pages, 2, 16) for x in (k, v))
        table = torch.arange(3 * count - 1, -1, -1, dtype=torch.int32, device=DEVICE).view(3, count)
    lengths = torch.tensor([100, 0, 33], dtype=torch.int32, device=DEVICE)
    call = cache_call(
        q, k, v, softmax_scale=0.25, cache_seqlens=lengths, block_table=table, s_aux=sinks, **options,
    )  # fmt: skip
    best, best_lse = oracle.kvcache(call)
    with mock.patch.object(triton_cache, "_keeps_whole", return_value=whole):
        out, lse = triton.kvcache(call)
        halves, _ = triton.kvcache(replace(call, s_aux=sinks.half()))
    assert_close("out", out, best, tiny=2e-3)
    assert_close("lse", lse, best_lse, tiny=2e-5)
    assert_close("out with fp16 sinks", halves, best, tiny=2e-3)
    assert not out[1].any()
    assert_close("lse of an empty sequence", lse[1], sinks[:, None].expand(4, 2), tiny=1e-6)


def test_the_public_function_of_a_cache() -> None:
    q, k, v, sinks = (x.detach() for x in _draw())
    expected, _ = reference.attention(q, k, v, s_aux=sinks, causal=True)
    for call in (flash_attn.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache):
        assert_close("out", call(q, k, v, cache_seqlens=29, causal=True, s_aux=sinks), expected)


def test_fa3() -> None:
    """Dense, in splits, in chunks, packed, with values of another head dim; FP8 refuses where there are no sinks."""
    q, k, v, sinks = leaves = _draw()
    for options in ({"causal": True}, {"causal": True, "num_splits": 3}):
        best, best_lse = reference.attention(q, k, v, s_aux=sinks, causal=True)
        out, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True, s_aux=sinks, **options)
        assert_close("out", out, best.detach())
        assert_close("lse", lse, best_lse.detach())
        for got, expected in zip(
            torch.autograd.grad(out.square().sum(), leaves),
            torch.autograd.grad(best.square().sum(), leaves),
            strict=True,
        ):
            assert_close("gradient", got, expected, tiny=2e-5)
    with torch.no_grad():
        best, _ = reference.attention(q, k, v, s_aux=sinks)
        assert_close("splits", fa3.flash_attn_func(q, k, v, num_splits=2, s_aux=sinks), best)
        assert_close("values", fa3.flash_attn_func(q, k, v[..., :8], s_aux=sinks), best[..., :8])
        packed = torch.cat((q[:, :29], k, v), 2)
        best, _ = reference.attention(q[:, :29], k, v, s_aux=sinks)
        assert_close("packed", fa3.flash_attn_qkvpacked_func(packed, num_heads_q=4, s_aux=sinks), best)
        # One chunk that holds all keys.
        chunked = fa3.flash_attn_func(q[:, :29], k, v, attention_chunk=64, s_aux=sinks)
        assert_close("chunks", chunked, best)
        small = torch.randn(1, 4, 4, 16, device=DEVICE).to(torch.float8_e4m3fn)
        descales = [torch.ones(1, 4, device=DEVICE)] * 3
        ends = offsets(0, 4).to(DEVICE)
        rows = [x.flatten(0, 1) for x in (small, small, small)]
        with pytest.raises(NotImplementedError, match="s_aux: got sinks and packed FP8 tensors"):
            fa3.flash_attn_varlen_func(
                *rows, ends, ends, 4, 4, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2],
                s_aux=sinks,
            )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("deterministic", [False, True])
def test_compile(deterministic: bool) -> None:
    leaves = _draw()
    cu = torch.tensor([0, 40, 80], dtype=torch.int32, device=DEVICE)
    cu_k = torch.tensor([0, 29, 58], dtype=torch.int32, device=DEVICE)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        out = flash_attn.flash_attn_func(q, k, v, deterministic=deterministic, s_aux=sinks * 2)
        rows = (x.flatten(0, 1) for x in (out, k, v))
        return flash_attn.flash_attn_varlen_func(*rows, cu, cu_k, 40, 29, deterministic=deterministic, s_aux=sinks)

    results = []
    for function in (block, in_one_graph(block)):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for got, expected in zip(*reversed(results), strict=True):
        assert_close("compiled", got, expected.detach(), tiny=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compile_a_cache() -> None:
    q, k, v, sinks = (x.detach() for x in _draw())

    def attend(q: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=20, s_aux=sinks)

    assert_close("compiled", in_one_graph(attend)(q), attend(q), tiny=1e-6)


def test_opcheck() -> None:
    q, k, v, sinks = _draw()
    op = torch.ops.flash_attn._extended_forward
    arguments = op_arguments(
        op, q=q, k=k, v=v, softmax_scale=0.25, causal=True, window_size=[4, -1], softcap=2.0, s_aux=sinks
    )
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(op.default, tuple(arguments), test_utils=checks)
    lse = torch.randn(2, 4, 40, device=DEVICE)
    op = torch.ops.flash_attn._sink_gradient.default
    torch.library.opcheck(op, (sinks.detach(), lse, torch.randn_like(lse), None), test_utils=checks)


def test_the_log_sum_exp_has_a_gradient_in_the_op() -> None:
    q, k, v, sinks = leaves = _draw()
    op = torch.ops.flash_attn._extended_forward
    out, lse, _ = op(*op_arguments(op, q=q, k=k, v=v, softmax_scale=0.25, s_aux=sinks))
    best, best_lse = reference.attention(q, k, v, s_aux=sinks, softmax_scale=0.25)
    for both_of in ((lse, best_lse), (lse + out.sum(), best_lse + best.sum())):
        got, expected = (
            torch.autograd.grad(x.square().sum(), leaves, retain_graph=True, allow_unused=True) for x in both_of
        )
        for name, one, exact in zip(("dq", "dk", "dv", "dsinks"), got, expected, strict=True):
            if exact is not None:
                assert_close(name, one, exact, tiny=5e-5)


def test_autocast_leaves_the_sinks_alone() -> None:
    leaves = _draw()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = flash_attn.flash_attn_func(*leaves[:3], s_aux=leaves[3])
    assert out.dtype is torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), leaves)
    assert all(x.dtype is torch.float32 for x in gradients)


@pytest.mark.parametrize("by_op", [False, True])
def test_a_second_derivative(by_op: bool) -> None:
    """Of the sinks alone, too, whose gradient is made of PyTorch's operations."""
    q, k, v, sinks = _draw()

    def attention(scaled: torch.Tensor) -> torch.Tensor:
        if not by_op:
            return flash_attn.flash_attn_func(q.detach(), k.detach(), v.detach(), s_aux=scaled)
        op = torch.ops.flash_attn._extended_forward
        result: torch.Tensor = op(*op_arguments(op, q=q, k=k, v=v, softmax_scale=0.25, s_aux=scaled))[0]
        return result

    results = []
    for function in (attention, lambda scaled: reference.attention(q, k, v, s_aux=scaled, softmax_scale=0.25)[0]):
        leaf = torch.ones(4, device=DEVICE, requires_grad=True)
        (gradient,) = torch.autograd.grad(function(sinks * leaf).sum(), sinks, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), leaf)[0])
    assert_close("second derivative", *results, tiny=1e-4)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([1.0] * 4, "s_aux: got list, wanted a tensor"),
        (torch.ones(3), r"s_aux: got shape \(3,\), wanted \(4,\)"),
        (torch.ones(2, 4), r"s_aux: got shape \(2, 4\), wanted \(4,\)"),
        (torch.ones(4, dtype=torch.int32), "s_aux: got torch.int32, wanted float16, bfloat16 or float32"),
        (torch.ones(4, dtype=torch.float64), "s_aux: got torch.float64, wanted"),
        (torch.ones(4, device="meta"), "s_aux: got a tensor on meta, wanted"),
    ],
)
def test_wrong_sinks(wrong: Any, says: str) -> None:
    q, k, v, _ = (x.detach() for x in _draw())
    cu = torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)
    wrong = wrong.to(DEVICE) if isinstance(wrong, torch.Tensor) and not wrong.is_meta else wrong
    for call in (
        lambda: flash_attn.flash_attn_func(q, k, v, s_aux=wrong),
        lambda: flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 40, 40, s_aux=wrong),
        lambda: flash_attn.flash_attn_with_kvcache(q, k, v, s_aux=wrong),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            call()


@pytest.mark.skipif(GPU, reason="the kernels of a simulated or interpreted GPU")
def test_the_kernels_of_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain calls never get the pointer of the sinks, and sinks alone have a kernel of their own."""
    asked: list[str] = []
    real = triton_attention.find

    def find(ops: tuple[str, ...], index: int, dtype: torch.dtype, head_dim: int, kind: str) -> Any:
        kernels = real(ops, index, dtype, head_dim, kind)
        asked.append(f"{kind} {'sinks' in kernels[0].arguments.pointers}")
        return kernels

    monkeypatch.setattr(triton_attention, "find", find)
    q, k, v, sinks = (x.detach() for x in _draw(torch.float16))
    with backends.using(triton):
        flash_attn.flash_attn_func(q, k, v)
        flash_attn.flash_attn_func(q, k, v, s_aux=sinks)
        flash_attn.flash_attn_func(q, k, v, softcap=1.0, s_aux=sinks)
    assert asked == ["plain False", "sink True", "any True"]


@pytest.mark.parametrize("shape", [(2, 4, 1100), (4, 77)])
def test_the_kernel_of_the_gradient(shape: tuple[int, ...]) -> None:
    """C and Rust take it. Rows that no sequence has have +inf as the logarithm of their sums."""
    lse, delta, sinks = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE), _draw()[3].detach()
    lse[..., -5:] = torch.inf
    heads, rows = shape[-2:]
    batch, stride = (shape[0], heads * rows) if len(shape) == 3 else (1, 0)
    result = torch.empty_like(sinks)
    values = {
        "lse": lse, "delta": delta, "sinks": sinks, "dsinks": result, "stride_lb": stride, "stride_lh": rows,
        "batch": batch, "seqlen_q": rows,
    }  # fmt: skip
    launch(find_one("bwd-dsinks", lse.get_device(), sinks.dtype, 1), (heads, 1, 1), values)
    assert_close("dsinks", result, gradient(sinks.double(), lse.double(), delta.double()), tiny=1e-6)
