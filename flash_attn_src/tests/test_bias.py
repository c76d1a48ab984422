"""An additive bias of the scores, `attn_bias`: PyTorch, the Triton kernels, and the functions that refuse it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import flash_attn
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton
from flash_attn.attention.operators import dispatch
from op_arguments import op_arguments
from small_calls import in_one_graph

torch.set_num_threads(2)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
Shape = tuple[int, int]


def _draw(
    shared: Shape = (1, 2),
    dtype: torch.dtype = torch.float32,
    bias: torch.dtype | None = None,
    dim: int = 16,
    lengths: Shape = (41, 37),
) -> list[torch.Tensor]:
    """q (2, 41, 2, dim), k and v (2, 37, 1, dim), a bias (*shared, 41, 37): a fourth of it -inf, and all of row 5."""
    generator = torch.Generator().manual_seed(dim)
    seqlen_q, seqlen_k = lengths
    shapes = ((2, seqlen_q, 2, dim), (2, seqlen_k, 1, dim), (2, seqlen_k, 1, dim), (*shared, *lengths))
    q, k, v, scores = (torch.randn(shape, generator=generator) for shape in shapes)
    scores[torch.rand(scores.shape, generator=generator) < 0.25] = -torch.inf
    scores[..., 5, :] = -torch.inf
    types = (dtype, dtype, dtype, bias or dtype)
    return [x.to(DEVICE, each).requires_grad_() for x, each in zip((q, k, v, scores), types, strict=True)]


def _check(leaves: list[torch.Tensor], sinks: torch.Tensor | None = None, **options: Any) -> None:
    """Compares out, lse and the four gradients with reference attention."""
    *inputs, bias = leaves
    out, lse, _ = flash_attn.flash_attn_func(
        *inputs, return_attn_probs=True, attn_bias=bias, s_aux=sinks, **reference.public(options)
    )
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, out.dtype)
    got = (out, lse, *torch.autograd.grad(out, leaves, dout))
    results = []
    for dtype in (torch.float64, inputs[0].dtype):
        wide = [x.detach().to(dtype).requires_grad_() for x in leaves]
        best, best_lse = reference.attention(*wide[:3], attn_bias=wide[3], s_aux=sinks, dtype=dtype, **options)
        results.append((best, best_lse, *torch.autograd.grad(best, wide, dout.to(dtype))))
    assert got[-1].dtype is bias.dtype
    assert got[-1].shape == bias.shape
    for name, value, exact, rough in zip(("out", "lse", "dq", "dk", "dv", "dbias"), got, *results, strict=True):
        tiny = 2.0 * torch.finfo(bias.dtype).eps if name == "dbias" else 0.0  # a sum, rounded at the end
        assert_close(name, value, exact, rough=None if name == "lse" else rough, tiny=max(tiny, 2e-5))
    assert not out[:, 5].any()


# Options of a call, who shares the bias, and the types of q and of the bias.
CASES: dict[str, tuple[dict[str, Any], Shape, torch.dtype, torch.dtype]] = {
    "shared by the batch": ({}, (1, 2), torch.float16, torch.float16),
    "shared by the heads, causal": ({"causal": True}, (2, 1), torch.float16, torch.float32),
    "shared by all, window": ({"window": (9, 3)}, (1, 1), torch.float32, torch.float32),
    "of each, softcap": ({"softcap": 2.0, "softmax_scale": -0.4}, (2, 2), torch.float32, torch.float32),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_by_pytorch(case: tuple[dict[str, Any], Shape, torch.dtype, torch.dtype]) -> None:
    options, *of_tensors = case
    _check(_draw(*of_tensors), **options)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_by_triton(case: tuple[dict[str, Any], Shape, torch.dtype, torch.dtype]) -> None:
    options, *of_tensors = case
    with backends.using(triton):
        _check(_draw(*of_tensors), **options)


@pytest.mark.usefixtures("_deep_tiles")
def test_head_dims_in_pieces_and_of_any_size() -> None:
    with backends.using(triton):
        _check(_draw((1, 1), dim=13))


@pytest.mark.skipif(not GPU, reason="needs a GPU that torch can use")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [40, 64, 96, 128, 192, 256, 512])
def test_the_tiles_of_a_gpu(dim: int, dtype: torch.dtype) -> None:
    """Whole tiles, the last rows and keys of others, and rows of a bias at every alignment."""
    lengths = [(256, 256), (113, 203), (203, 113), (6, 239), (130, 513), (255, 257), (300, 129), (64, 1)]
    for place, each in enumerate(lengths):
        shared = ((1, 2), (2, 1), (1, 1), (2, 2))[place % 4]
        _check(_draw(shared, dtype, torch.float32 if place % 3 else dtype, dim, each), causal=place % 2 == 1)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
def test_with_sinks(backend: Any) -> None:
    if GPU and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    with backends.using(backend):
        q, k, v, bias = leaves = _draw((1, 1))
        sinks = torch.linspace(-1.0, 1.0, 2, device=DEVICE)
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, attn_bias=bias, s_aux=sinks)
        got = torch.autograd.grad(out.square().sum(), leaves)
    best, best_lse = reference.attention(q, k, v, attn_bias=bias, s_aux=sinks, dtype=torch.float64)
    assert_close("out", out, best)
    assert_close("lse", lse, best_lse)  # in row 5, which sees no key, the sink
    for one, exact in zip(got, torch.autograd.grad(best.square().sum(), leaves), strict=True):
        assert_close("gradient", one, exact, tiny=2e-5)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("shape", [(2, 2, 1, 37), (1, 1, 41, 1), (1, 2, 1, 1)])
def test_strides_of_axes_of_size_1_do_not_matter(shape: tuple[int, ...]) -> None:
    _, _, seqlen_q, seqlen_k = shape
    q = torch.randn(2, seqlen_q, 2, 16, device=DEVICE)
    k, v = torch.randn(2, 2, seqlen_k, 1, 16, device=DEVICE)
    bias = torch.randn(shape, device=DEVICE)
    steps = [1 << 22 if size == 1 else step for size, step in zip(shape, bias.stride(), strict=True)]
    odd = bias.as_strided(shape, steps)
    with backends.using(triton):
        expected, got = (flash_attn.flash_attn_func(q, k, v, attn_bias=x) for x in (bias, odd))
    assert torch.equal(got, expected)


LOWEST = torch.finfo(torch.float32).min
# The type of q and the bias, the number that hides keys, and options of the call.
HIDDEN: dict[str, tuple[torch.dtype, torch.dtype, float, dict[str, Any]]] = {
    "lowest": (torch.float32, torch.float32, LOWEST, {}),
    "lowest, fp16": (torch.float16, torch.float32, LOWEST, {"causal": True}),
    "lowest of bf16": (torch.float32, torch.float32, torch.finfo(torch.bfloat16).min, {"window": (30, 12)}),
    "lowest of fp16": (torch.float16, torch.float16, torch.finfo(torch.float16).min, {}),
    "lowest, softcap": (torch.float32, torch.float32, LOWEST, {"softcap": 3.0}),
    "lowest, sinks": (torch.float32, torch.float32, LOWEST, {"s_aux": [0.5, -1.0]}),
    "lowest, sinks as low": (torch.float32, torch.float32, LOWEST, {"s_aux": [LOWEST, LOWEST]}),
    "-1e9": (torch.float32, torch.float32, -1e9, {}),
    "-1e30, softcap and sinks": (torch.float32, torch.float32, -1e30, {"softcap": 3.0, "s_aux": [-1e30, 0.0]}),
}


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
@pytest.mark.parametrize("case", HIDDEN.values(), ids=list(HIDDEN))
def test_rows_that_a_finite_bias_hides(case: tuple[Any, ...], backend: Any) -> None:
    """Row 5 sees all its keys alike. Row 6 has keys of -inf too, which it does not see. Row 7 sees one key more."""
    if GPU and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    dtype, bias_dtype, hides, options = case
    q, k, v, bias = _draw((1, 2), dtype, bias_dtype)
    scores = bias.detach().clone()
    scores[..., 5:8, :] = hides
    scores[..., 6, ::2] = -torch.inf
    scores[..., 7, 3] = max(hides * 0.5, -100.0)
    leaves = [q, k, v, scores.requires_grad_()]
    sinks = options.get("s_aux")
    more = {name: value for name, value in options.items() if name != "s_aux"}
    s_aux = None if sinks is None else torch.tensor(sinks, device=DEVICE)
    with backends.using(backend):
        out, lse, _ = flash_attn.flash_attn_func(
            q, k, v, return_attn_probs=True, attn_bias=scores, s_aux=s_aux, **reference.public(more)
        )
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        got = (out, lse, *torch.autograd.grad(out, leaves, dout))
    wide = [x.detach().float().requires_grad_() for x in leaves]  # fp32, as the scores are rounded in all
    best, best_lse = reference.attention(*wide[:3], attn_bias=wide[3], s_aux=s_aux, **more)
    expected = (best, best_lse, *torch.autograd.grad(best, wide, dout.float()))
    tiny = 1e-5 if dtype is torch.float32 else 3e-3
    for name, value, exact in zip(("out", "lse", "dq", "dk", "dv", "dbias"), got, expected, strict=True):
        assert_close(name, value, exact, tiny=tiny)
        if name in ("out", "dq"):
            assert_close(f"{name} of hidden rows", value[:, 5:8], exact[:, 5:8], tiny=tiny)
    assert lse[..., 5:8].isfinite().all()


@pytest.mark.usefixtures("_tiles")
def test_the_largest_and_the_lowest_bias_in_a_row() -> None:
    """If one key's bias is much larger than all others, its weight is 1."""
    q, k, v, _ = (x.detach() for x in _draw())
    for high, low in ((-3e38, LOWEST), (-LOWEST, LOWEST), (-LOWEST, 0.0), (-1e38, -1.1e38)):
        bias = torch.full((1, 1, 41, 37), low, device=DEVICE)
        bias[..., 3] = high
        with backends.using(triton):
            out, lse, _ = flash_attn.flash_attn_func(q, k, v, attn_bias=bias, return_attn_probs=True)
        assert torch.equal(out, v[:, 3:4].expand(out.shape))
        assert_close("lse", lse / high, torch.ones_like(lse))


@pytest.mark.usefixtures("_tiles")
def test_views_are_taken_as_they_are() -> None:
    """A bias that repeats by strides of 0, in its rows too, one of every second row, and one whose keys are strided."""
    q, k, v, _ = (x.detach() for x in _draw())
    by_key = torch.randn(2, 1, 1, 37, device=DEVICE)
    wide = torch.randn(1, 2, 82, 37, device=DEVICE)
    turned = torch.randn(1, 2, 37, 41, device=DEVICE).transpose(2, 3)
    for bias in (by_key.expand(2, 2, 41, 37), wide[:, :, ::2], turned):
        expected = flash_attn.flash_attn_func(q, k, v, attn_bias=bias.contiguous())
        assert_close("torch", flash_attn.flash_attn_func(q, k, v, attn_bias=bias), expected, tiny=1e-6)
        with backends.using(triton):
            assert_close("triton", flash_attn.flash_attn_func(q, k, v, attn_bias=bias), expected, tiny=2e-6)


def test_packed_functions_agree() -> None:
    qkv = torch.randn(1, 19, 3, 4, 16, device=DEVICE, requires_grad=True)
    bias = torch.randn(1, 4, 19, 19, device=DEVICE, requires_grad=True)
    q, k, v = qkv.unbind(2)
    one = flash_attn.flash_attn_func(q, k, v, attn_bias=bias)
    expected = torch.autograd.grad(one.sum(), (qkv, bias), retain_graph=True)
    for other in (
        flash_attn.flash_attn_qkvpacked_func(qkv, attn_bias=bias),
        flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), attn_bias=bias),
    ):
        assert_close("out", other, one.detach(), tiny=1e-6)
        for got, best in zip(torch.autograd.grad(other.sum(), (qkv, bias), retain_graph=True), expected, strict=True):
            assert_close("gradient", got, best, tiny=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("deterministic", [False, True])
def test_compile(deterministic: bool) -> None:
    leaves = _draw((1, 1))

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_func(q, k, v, causal=True, deterministic=deterministic, attn_bias=bias * 2)

    results = []
    for function in (block, in_one_graph(block)):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for got, expected in zip(*reversed(results), strict=True):
        assert_close("compiled", got, expected.detach(), tiny=1e-6)


def test_opcheck() -> None:
    q, k, v, bias = _draw((1, 2))
    bias = bias.detach().clamp_min(-3.0).requires_grad_()
    options = {"softmax_scale": 0.25, "causal": True, "window_size": [4, -1], "softcap": 2.0}
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    op = torch.ops.flash_attn._extended_forward
    arguments = op_arguments(op, q=q, k=k, v=v, attn_bias=bias, **options)
    torch.library.opcheck(op.default, tuple(arguments), test_utils=checks)
    out, lse, _ = (x.detach() for x in op(*arguments))
    saved = {name: x.detach() for name, x in (("q", q), ("k", k), ("v", v), ("attn_bias", bias))}
    op = torch.ops.flash_attn._extended_backward
    arguments = op_arguments(op, dout=torch.randn_like(out), out=out, softmax_lse=lse, **saved, **options)
    torch.library.opcheck(op.default, tuple(arguments), test_utils=checks)


def test_the_log_sum_exp_has_a_gradient_in_the_op() -> None:
    q, k, v, bias = leaves = _draw((1, 1))
    bias = bias.detach().clamp_min(-3.0).requires_grad_()
    leaves = [q, k, v, bias]
    op = torch.ops.flash_attn._extended_forward
    out, lse, _ = op(*op_arguments(op, q=q, k=k, v=v, softmax_scale=0.25, attn_bias=bias))
    best, best_lse = reference.attention(q, k, v, attn_bias=bias, softmax_scale=0.25)
    got, expected = (
        torch.autograd.grad((a.square().sum() + b.sum()), leaves) for a, b in ((lse, out), (best_lse, best))
    )
    for name, one, exact in zip(("dq", "dk", "dv", "dbias"), got, expected, strict=True):
        assert_close(name, one, exact, tiny=5e-5)


def test_a_second_derivative() -> None:
    q, k, v, bias = (x.detach() for x in _draw((1, 1)))
    results = []
    for attention in (lambda b: flash_attn.flash_attn_func(q, k, v, attn_bias=b),
                      lambda b: reference.attention(q, k, v, attn_bias=b)[0]):  # fmt: skip
        leaf = torch.ones((), device=DEVICE, requires_grad=True)
        scaled = torch.where(bias == -torch.inf, bias, bias * leaf)
        (gradient,) = torch.autograd.grad(attention(scaled).square().sum(), scaled, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), leaf)[0])
    assert_close("second derivative", *results, tiny=1e-4)


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any], type[Exception], str]] = {
    "list": (lambda x: x.tolist(), {}, TypeError, "attn_bias: got list, wanted a tensor"),
    "bool": (lambda x: x > 0, {}, TypeError, "attn_bias: got torch.bool, wanted torch.float32 as q has, or float32"),
    "rank": (lambda x: x[0], {}, ValueError, r"attn_bias: got shape \(2, 41, 37\), wanted \(1 or 2, 1 or 2, 41, 37\)"),
    "keys": (lambda x: x[..., 1:], {}, ValueError, r"attn_bias: got shape \(1, 2, 41, 36\), wanted"),
    "heads": (lambda x: x.repeat(1, 2, 1, 1), {}, ValueError, r"attn_bias: got shape \(1, 4, 41, 37\), wanted"),
    "device": (lambda x: x.to("meta"), {}, ValueError, "attn_bias: got a tensor on meta, wanted"),
    "dropout": (lambda x: x, {"dropout_p": 0.5}, NotImplementedError, "attn_bias: got a bias and dropout_p 0.5"),
    "alibi": (
        lambda x: x, {"alibi_slopes": torch.ones(2, device=DEVICE)}, NotImplementedError,
        "attn_bias: got a bias and alibi_slopes, wanted one of them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_bias(name: str) -> None:
    change, options, kind, says = WRONG[name]
    q, k, v, bias = (x.detach() for x in _draw())
    with pytest.raises(kind, match=says):
        flash_attn.flash_attn_func(q, k, v, attn_bias=change(bias), **options)


@pytest.mark.parametrize("learned", [False, True])
def test_only_a_learned_bias_has_a_gradient_in_memory(learned: bool) -> None:
    q, k, v, bias = _draw()
    with mock.patch.object(dispatch, "backward", wraps=dispatch.backward) as backward:
        flash_attn.flash_attn_func(q, k, v, attn_bias=bias.detach().requires_grad_(learned)).sum().backward()
    (gradients,) = backward.call_args.args
    assert (gradients.dbias is not None) is learned


def test_functions_of_packed_sequences_have_none() -> None:
    with pytest.raises(TypeError, match="attn_bias"):
        flash_attn.flash_attn_varlen_func(*[None] * 5, 1, 1, attn_bias=torch.ones(1, 1, 1, 1))
