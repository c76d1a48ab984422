"""The public functions: their errors, packed and varlen forms, gradients through softmax_lse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flash_attn
import flash_attn_interface as fa3
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn.attention import operators as ops
from flash_attn.layers.rotary import apply_rotary_emb
from small_calls import in_one_graph, offsets, qkv
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(2)

# Dynamo itself makes an instance of torch.autograd.Function, at which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

DENSE_ERRORS = {
    "not a tensor": ({"q": 3}, TypeError, "q: got int"),
    "list": ({"k": [1.0]}, TypeError, "k: got list"),
    "rank": ({"q": torch.zeros(6, 4, 16)}, ValueError, r"q: got shape \(6, 4, 16\), wanted \(batch"),
    "rank of v": ({"v": torch.zeros(6, 4, 16)}, ValueError, "v: got shape"),
    "batch": ({"k": torch.zeros(3, 9, 2, 16), "v": torch.zeros(3, 9, 2, 16)}, ValueError, "k: got batch 3"),
    "seqlen": ({"v": torch.zeros(2, 8, 2, 16)}, ValueError, r"v: got shape \(2, 8, 2, 16\)"),
    "head_dim": ({"q": torch.zeros(2, 6, 4, 8)}, ValueError, "k: got head_dim 16, wanted 8"),
    "heads": ({"q": torch.zeros(2, 6, 3, 16)}, ValueError, "q: got 3 heads.* of the 2"),
    "no heads": ({"q": torch.zeros(2, 6, 0, 16)}, ValueError, "q: got 0 heads"),
    "dtype of k": (
        {"k": torch.zeros(2, 9, 2, 16).half()},
        TypeError,
        "k: got torch.float16, wanted torch.float32",
    ),
    "integers": ({"q": torch.zeros(2, 6, 4, 16, dtype=torch.int32)}, TypeError, "q: got torch.int32"),
    "device": ({"v": torch.zeros(2, 9, 2, 16, device="meta")}, ValueError, "v: got a tensor on meta"),
    "dropout": ({"dropout_p": 1.0}, ValueError, "dropout_p: got 1.0"),
    "dropout that rounds to 1": ({"dropout_p": 1 - 2.0**-25}, ValueError, "dropout_p: got 0.99999997"),
    "scale that rounds to 0": ({"softmax_scale": 1e-50}, ValueError, "softmax_scale: got 1e-50, wanted 0 or"),
    "negative scale that rounds to 0": ({"softmax_scale": -1e-50}, ValueError, "softmax_scale: got -1e-50"),
    "scale beyond fp32": ({"softmax_scale": -1e39}, ValueError, r"softmax_scale: got -1e\+39"),
    "learned scale": (
        {"softmax_scale": torch.tensor(0.3, requires_grad=True)},
        ValueError,
        "softmax_scale: got a tensor that requires a gradient, .* multiply q by the tensor",
    ),
    "softcap that rounds to 0": ({"softcap": 1e-50}, ValueError, r"softcap: got 1e-50, wanted 0 \(off\) or"),
    "softcap that loses scores": ({"softcap": 4097.0}, ValueError, r"softcap: got 4097.0, wanted 0 \(off\) or .* 4096"),
    "negative dropout": ({"dropout_p": -0.1}, ValueError, "dropout_p: got -0.1"),
    "dropout nan": ({"dropout_p": float("nan")}, ValueError, "dropout_p: got nan"),
    "dropout type": ({"dropout_p": "0.1"}, TypeError, "dropout_p: got '0.1'"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
    "softcap type": ({"softcap": None}, TypeError, "softcap: got None"),
    "window": ({"window_size": 4}, TypeError, "window_size: got 4"),
    "window length": ({"window_size": (1, 2, 3)}, TypeError, "window_size"),
    "window type": ({"window_size": (1.5, 2)}, TypeError, "window_size"),
    "alibi dtype": ({"alibi_slopes": torch.zeros(4).half()}, TypeError, "alibi_slopes: got torch.float16"),
    "alibi shape": ({"alibi_slopes": torch.zeros(2)}, ValueError, r"alibi_slopes: got shape \(2,\)"),
    "alibi batch": ({"alibi_slopes": torch.zeros(3, 4)}, ValueError, "alibi_slopes: got shape"),
    "alibi device": (
        {"alibi_slopes": torch.zeros(4, device="meta")},
        ValueError,
        "alibi_slopes: got a tensor on",
    ),
}


@pytest.mark.parametrize("case", DENSE_ERRORS)
def test_dense_errors(case: str) -> None:
    change, error, match = DENSE_ERRORS[case]
    arguments = {**dict(zip("qkv", qkv(), strict=True)), **change}
    with pytest.raises(error, match=match):
        flash_attn.flash_attn_func(**arguments)


@pytest.mark.parametrize(
    ("heads", "heads_k", "head_dim", "match"),
    [
        (2, 2, 0, "q: got head_dim 0, wanted 1 to 512"),
        (2, 2, 513, "q: got head_dim 513, wanted 1 to 512"),
        (0, 2, 16, "q: got 0 heads, wanted a positive multiple of the 2"),
        (2, 0, 16, "q: got 2 heads, wanted a positive multiple of the 0"),
        (3, 2, 16, "q: got 3 heads, wanted a positive multiple of the 2"),
    ],
)
def test_sizes_without_a_kernel(heads: int, heads_k: int, head_dim: int, match: str) -> None:
    q, k = torch.zeros(2, 6, heads, head_dim), torch.zeros(2, 6, heads_k, head_dim)
    rows, keys, lengths = q.flatten(0, 1), k.flatten(0, 1), offsets(0, 6, 12)
    with pytest.raises(ValueError, match=match):
        flash_attn.flash_attn_func(q, k, k)
    with pytest.raises(ValueError, match=match):
        flash_attn.flash_attn_varlen_func(rows, keys, keys, lengths, lengths, 6, 6)
    with pytest.raises(ValueError, match=match):
        flash_attn.flash_attn_with_kvcache(q, k, k, cache_seqlens=6)


_VARLEN = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
VARLEN_ERRORS = {
    "dropout that rounds to 1": ({"dropout_p": 1 - 2.0**-26}, ValueError, "dropout_p: got 0.99999998"),
    "scale that rounds to 0": ({"softmax_scale": 1e-50}, ValueError, "softmax_scale: got 1e-50"),
    "learned scale": (
        {"softmax_scale": torch.tensor(0.3, requires_grad=True)},
        ValueError,
        "softmax_scale: got a tensor that requires a gradient, .* multiply q by the tensor",
    ),
    "rank": ({"q": torch.zeros(2, 6, 4, 16)}, ValueError, "q: got shape"),
    "cu dtype": (
        {"cu_seqlens_q": offsets(0, 6, 12).long()},
        TypeError,
        "cu_seqlens_q: got torch.int64, wanted int32",
    ),
    "cu rank": ({"cu_seqlens_k": offsets(0, 9, 18)[None]}, ValueError, "cu_seqlens_k: got shape"),
    "cu stride": ({"cu_seqlens_k": offsets(0, 1, 9, 1, 18)[::2]}, ValueError, "cu_seqlens_k: got stride 2"),
    "cu length": ({"cu_seqlens_k": offsets(0, 18)}, ValueError, "cu_seqlens_q, cu_seqlens_k: got 3 and 2"),
    "cu empty": ({"cu_seqlens_q": offsets(), "cu_seqlens_k": offsets()}, ValueError, "batch . 1 each"),
    "cu device": (
        {"cu_seqlens_q": offsets(0, 6, 12).to("meta")},
        ValueError,
        "cu_seqlens_q: got a tensor on meta",
    ),
    "cu type": ({"cu_seqlens_q": [0, 6, 12]}, TypeError, "cu_seqlens_q: got list"),
    "max type": ({"max_seqlen_q": 6.0}, TypeError, "max_seqlen_q: got 6.0"),
    "max tensor": ({"max_seqlen_k": torch.zeros(2, dtype=torch.int32)}, ValueError, "max_seqlen_k: got a"),
    "max negative": ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k: got -1"),
    "max huge": ({"max_seqlen_q": 1 << 31}, ValueError, "max_seqlen_q: got 2147483648"),
    "table without pages": (
        {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
        ValueError,
        "k: got shape",
    ),
}


@pytest.mark.parametrize("case", VARLEN_ERRORS)
def test_varlen_errors(case: str) -> None:
    change, error, match = VARLEN_ERRORS[case]
    tensors = (x.flatten(0, 1) for x in qkv())
    values = (*tensors, offsets(0, 6, 12), offsets(0, 9, 18), 6, 9)
    arguments = {**dict(zip(_VARLEN, values, strict=True)), **change}
    with pytest.raises(error, match=match):
        flash_attn.flash_attn_varlen_func(**arguments)


def test_block_table_errors() -> None:
    q, k, v = qkv()
    arguments = (q.flatten(0, 1), k, v, offsets(0, 6, 12), offsets(0, 9, 18), 6, 9)
    for table, error, match in (
        (torch.zeros(2, 1), TypeError, "block_table: got torch.float32"),
        (torch.zeros(2, dtype=torch.int32), ValueError, "block_table: got shape"),
        (torch.zeros(3, 1, dtype=torch.int32), ValueError, "block_table: got 3 rows, wanted 2"),
    ):
        with pytest.raises(error, match=match):
            flash_attn.flash_attn_varlen_func(*arguments, block_table=table)


@pytest.mark.parametrize(("name", "shape"), [("qkv", (2, 6, 2, 4, 16)), ("qkv", (6, 3, 4, 16)), ("qkv", (3,))])
def test_packed_errors(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{name}: got shape"):
        flash_attn.flash_attn_qkvpacked_func(torch.zeros(shape))
    with pytest.raises(TypeError, match="kv: got NoneType"):
        flash_attn.flash_attn_kvpacked_func(torch.zeros(2, 6, 4, 16), None)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # of their prototype
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    def nested(*shape: int) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.zeros(n, *shape) for n in (3, 5)], layout=layout)

    x, qkv = nested(4, 16), nested(3, 4, 16)
    for name, function, *arguments in (
        ("q", flash_attn.flash_attn_func, x, x, x),
        ("q", flash_attn.flash_attn_with_kvcache, x, x, x),
        ("q", fa3.flash_attn_func, x, x, x),
        ("qkv", flash_attn.flash_attn_qkvpacked_func, qkv),
        ("x", apply_rotary_emb, x, *torch.zeros(2, 9, 8)),
    ):
        with pytest.raises(TypeError, match=f"{name}: got a nested tensor, wanted a dense one"):
            function(*arguments)


def test_open_and_wide_windows_are_none() -> None:
    """Windows that reach every key mean no window, so that backends need no variant for them."""
    q, k, v = qkv()
    plain = flash_attn.flash_attn_func(q, k, v)
    for window in ((-7, -2), (9, 6), (1 << 40, 1 << 62)):
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window), plain)
    # The first of 6 queries ends at key 4, or at 9 keys with 4 more: 5 is not wide enough only in name.
    narrow = flash_attn.flash_attn_func(q, k, v, window_size=(8, 4))
    assert not torch.equal(narrow, plain)


@pytest.mark.parametrize("dim", [16, 13])
def test_packed_equals_unpacked(dim: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 7, 3, 4, dim, requires_grad=True)
    dout = torch.randn(2, 7, 4, dim)
    cu = offsets(0, 7, 14)

    def run(function: Callable[..., Any], x: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        torch.manual_seed(5)
        results = function(x, *args, dropout_p=0.2, causal=True, window_size=(4, 0), return_attn_probs=True)
        assert not results[1].requires_grad
        (gradient,) = torch.autograd.grad(results[0], x, dout.view(results[0].shape))
        return [*results, gradient]

    expected = run(lambda x, **kw: flash_attn.flash_attn_func(*x.unbind(2), **kw), qkv)
    kv = run(lambda x, **kw: flash_attn.flash_attn_kvpacked_func(x[:, :, 0], x[:, :, 1:], **kw), qkv)
    for got in (run(flash_attn.flash_attn_qkvpacked_func, qkv), kv):
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
    flat = qkv.detach().flatten(0, 1).requires_grad_()
    expected = run(lambda x, **kw: flash_attn.flash_attn_varlen_func(*x.unbind(1), cu, cu, 7, 7, **kw), flat)
    kv = run(
        lambda x, **kw: flash_attn.flash_attn_varlen_kvpacked_func(x[:, 0], x[:, 1:], cu, cu, 7, 7, **kw),
        flat,
    )
    for got in (run(flash_attn.flash_attn_varlen_qkvpacked_func, flat, cu, 7), kv):
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # by torch itself
def test_forward_mode_derivative_on_a_cpu() -> None:
    q, k, v = (x.double() for x in qkv())
    tangent, step = torch.randn_like(q), 1e-6
    with forward_ad.dual_level():
        out = flash_attn.flash_attn_func(forward_ad.make_dual(q, tangent), k, v, causal=True)
        result = forward_ad.unpack_dual(out).tangent
    after, before = (flash_attn.flash_attn_func(q + way * step * tangent, k, v, causal=True) for way in (1, -1))
    assert_close("tangent", result, (after - before) / (2 * step), tiny=1e-6)


def test_default_scale_is_of_the_unpadded_head_dim() -> None:
    q, k, v = qkv(dim=13)
    expected, lse = reference.attention(q, k, v, softmax_scale=13**-0.5)
    out, got_lse, dmask = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert_close("out", out, expected, dtype=torch.float32)
    assert_close("lse", got_lse, lse)
    assert dmask.shape == (0,)


def test_max_seqlen_may_be_a_tensor() -> None:
    q, k, v = (x.flatten(0, 1) for x in qkv())
    lengths = (offsets(0, 6, 12), offsets(0, 9, 18))
    expected = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, 6, 9)
    got = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, torch.tensor(6), torch.tensor([9]))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dim", [8, 5])
@pytest.mark.parametrize("packed", [1, 2, 3])
def test_the_matrix_of_second_derivatives(packed: int, dim: int) -> None:
    """Also for gradients that torch would silently treat as zero."""
    x = torch.randn(1, 4, packed, 2, dim)
    q = torch.randn(1, 4, 2, dim)

    def total(x: torch.Tensor) -> torch.Tensor:
        if packed == 3:
            return flash_attn.flash_attn_qkvpacked_func(x).sum()
        if packed == 2:
            return flash_attn.flash_attn_kvpacked_func(q, x).sum()
        return flash_attn.flash_attn_func(x[:, :, 0], q, q).sum()

    def book(x: torch.Tensor) -> torch.Tensor:
        parts = x.unbind(2)
        return reference.attention(*((parts[0], q, q), (q, *parts), parts)[packed - 1])[0].sum()

    x.requires_grad_()
    (gradient,) = torch.autograd.grad(total(x), x, create_graph=True)
    gradient.sum().backward()
    expected = torch.autograd.functional.hessian(book, x.detach())
    assert_close("hessian", torch.autograd.functional.hessian(total, x.detach()), expected, tiny=2e-5)
    assert_close("its sums", x.grad, expected.sum((0, 1, 2, 3, 4)), tiny=1e-4)


def test_transforms_of_torch_func() -> None:
    """A tensor that one has left behind has a gradient like any other."""
    q, k, v = qkv()
    left: list[torch.Tensor] = []

    def total(x: torch.Tensor) -> torch.Tensor:
        left.append(x)
        return flash_attn.flash_attn_func(x, k, v).sum()

    torch.func.grad(total)(q)
    k.requires_grad_()
    expected, result = (torch.autograd.grad(flash_attn.flash_attn_func(x, k, v).sum(), k) for x in (q, left[0]))
    assert torch.equal(result[0], expected[0])


@pytest.mark.filterwarnings("ignore:.*create_graph=True:UserWarning")  # of a reference cycle
def test_graph_of_the_backward_of_a_checkpoint() -> None:
    """It computes saved tensors anew for one look at them."""
    x = torch.randn(1, 4, 3, 2, 8, requires_grad=True)
    checkpoint(flash_attn.flash_attn_qkvpacked_func, x, use_reentrant=False).sum().backward(create_graph=True)
    (expected,) = torch.autograd.grad(flash_attn.flash_attn_qkvpacked_func(x).sum(), x)
    assert torch.equal(x.grad, expected)


def test_gradients_that_are_not_needed_are_skipped() -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.no_grad():
        assert flash_attn.flash_attn_func(q, q, q).grad_fn is None
    assert flash_attn.flash_attn_func(q, q.detach(), q.detach()).grad_fn is not None
    assert flash_attn.flash_attn_func(q.detach(), q, q.detach()).grad_fn is not None


@pytest.mark.parametrize("heads", [1, 4, 6])
def test_backward_takes_a_transposed_view_of_softmax_lse(heads: int) -> None:
    """As diffusers 0.36 gives it; with 6 heads and 6 queries the shapes are the same."""
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 6, heads, 16)
    packed = tuple(x.flatten(0, 1) for x in (dout, q, k, v))
    cu = offsets(0, 6, 12)
    options = (0.0, 0.25, True, -1, -1, 0.0, None)
    out, lse, _, state = ops._flash_attn_forward(q, k, v, *options, False)
    packed_out, packed_lse, *_ = ops._flash_attn_varlen_forward(*packed[1:], cu, cu, 6, 6, *options)
    for name, tensors, saved, lengths in (
        ("_flash_attn_backward", (dout, q, k, v, out), lse, ()),
        ("_flash_attn_varlen_backward", (*packed, packed_out), packed_lse, (cu, cu, 6, 6)),
    ):
        results = []
        for given in (saved, saved.transpose(-1, -2)):
            gradients = [torch.empty_like(x) for x in tensors[1:4]]
            arguments = (*tensors, given, *gradients, *lengths, *options, False, state)
            op = getattr(torch.ops.flash_attn, name).default
            results.append((op(*arguments), *gradients))
            torch.library.opcheck(op, arguments, test_utils=["test_schema", "test_faketensor"])
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("softcap", "through_out"), [(0.0, True), (2.0, True), (0.0, False)])
def test_gradient_through_softmax_lse(softcap: float, through_out: bool, compiled: bool) -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    slopes = None if softcap else torch.rand(4)
    seqlens = [x.shape[1] for x in leaves[:2]]
    lengths = (*(offsets(0, n, 2 * n) for n in seqlens), *seqlens)
    weights = torch.randn(2, leaves[0].shape[2], seqlens[0])

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops._wrapped_flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, softcap, slopes, False)[:2]

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = ops._wrapped_flash_attn_varlen_forward(
            *packed, *lengths, 0.0, 0.25, True, softcap=softcap, alibi_slopes=slopes
        )[:2]
        return out.view_as(q), lse.unflatten(1, q.shape[:2]).transpose(0, 1)

    def book(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.attention(
            q, k, v, softmax_scale=0.25, causal=True, softcap=softcap, alibi_slopes=slopes, dtype=None
        )

    def gradients(function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        def loss(*tensors: torch.Tensor) -> torch.Tensor:
            out, lse = function(*tensors)
            loss = (lse.masked_fill(lse == torch.inf, 0.0) * weights).sum()
            return loss + out.square().sum() if through_out else loss

        run = in_one_graph(loss) if compiled and function is not book else loss
        return torch.autograd.grad(run(*leaves), leaves[: 3 if through_out else 2])

    for function in (dense, varlen):
        for got, expected in zip(gradients(function), gradients(book), strict=True):
            assert_close(function.__name__, got, expected, tiny=1e-5)


def test_dropout_leaves_the_gradient_of_softmax_lse_alone() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    gradients = [
        torch.autograd.grad(ops._flash_attn_forward(q, k, v, p, 0.25, False, -1, -1, 0.0, None, True)[1].sum(), (q, k))
        for p in (0.5, 0.0)
    ]
    assert all(map(torch.equal, *gradients))
    assert not ops._flash_attn_forward(q, k, v, 0.5, 0.25, False, -1, -1, 0.0, None, True)[2].requires_grad
