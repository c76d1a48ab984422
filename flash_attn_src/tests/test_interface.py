"""The public functions and custom ops: signatures, checks, packing, compilation, the KV cache."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash_attn
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn import custom_ops as ops
from flash_attn import dispatch
from flash_attn import flash_attn_interface as interface
from flash_attn.runtime import build_info, info

torch.set_num_threads(2)

# Dynamo itself makes an instance of torch.autograd.Function, at which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
}
_WINDOW = "causal, window_size_left, window_size_right, softcap, alibi_slopes"
_GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
OP_SIGNATURES = {
    "_flash_attn_forward": f"q, k, v, dropout_p, softmax_scale, {_WINDOW}, return_softmax",
    "_flash_attn_varlen_forward": (
        f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
        "seqused_k=None, zero_tensors=False"
    ),
    "_flash_attn_backward": (f"{_GRADIENTS}, dropout_p, softmax_scale, {_WINDOW}, deterministic, rng_state=None"),
    "_flash_attn_varlen_backward": (
        f"{_GRADIENTS}, {LENGTHS}, dropout_p, softmax_scale, {_WINDOW}, deterministic, rng_state=None, "
        "zero_tensors=False"
    ),
}


def _signature(function: Callable[..., Any]) -> str:
    parts = []
    for name, parameter in inspect.signature(function).parameters.items():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        parts.append(name if parameter.default is parameter.empty else f"{name}={parameter.default!r}")
    return ", ".join(parts)


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signatures(name: str) -> None:
    assert _signature(getattr(flash_attn, name)) == SIGNATURES[name]
    assert name in flash_attn.__all__
    assert getattr(interface, name) is getattr(flash_attn, name)


@pytest.mark.parametrize("name", OP_SIGNATURES)
def test_op_signatures(name: str) -> None:
    op = getattr(interface, name)
    assert _signature(op._init_fn) == OP_SIGNATURES[name]
    packet = getattr(torch.ops.flash_attn, name)
    assert getattr(interface, "_wrapped" + name) is packet
    schema = packet.default._schema
    assert [argument.name for argument in schema.arguments] == [
        part.split("=")[0] for part in OP_SIGNATURES[name].split(", ")
    ]
    written = [argument.name for argument in schema.arguments if argument.alias_info is not None]
    assert written == (["dq", "dk", "dv"] if "backward" in name else [])


def test_autograd_functions_take_upstream_order() -> None:
    for name, function in SIGNATURES.items():
        if name == "flash_attn_with_kvcache":
            continue
        words = name.removeprefix("flash_attn_").removesuffix("func").strip("_").split("_")
        spelled = {"qkvpacked": "QKVPacked", "kvpacked": "KVPacked", "varlen": "Varlen", "": ""}
        cls = getattr(interface, f"FlashAttn{''.join(spelled[word] for word in words)}Func")
        wanted = [part.split("=")[0] for part in function.replace("(-1, -1)", "w").split(", ")]
        wanted[wanted.index("return_attn_probs")] = "return_softmax"
        assert list(inspect.signature(cls.forward).parameters) == ["ctx", *wanted, "is_grad_enabled"]


def _qkv(dtype: torch.dtype = torch.float32, dim: int = 16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, n, h, dim, dtype=dtype) for n, h in ((6, 4), (9, 2), (9, 2)))


def _cu(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


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
    "softcap that rounds to 0": ({"softcap": 1e-50}, ValueError, r"softcap: got 1e-50, wanted 0 \(off\) or"),
    "softcap beyond fp32": ({"softcap": 1e39}, ValueError, r"softcap: got 1e\+39"),
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
    arguments = {**dict(zip("qkv", _qkv(), strict=True)), **change}
    with pytest.raises(error, match=match):
        flash_attn.flash_attn_func(**arguments)


def test_head_dim_beyond_256() -> None:
    q = torch.zeros(1, 2, 1, 257)
    with pytest.raises(ValueError, match="head_dim 257, wanted 1 to 256"):
        flash_attn.flash_attn_func(q, q, q)


VARLEN_ERRORS = {
    "dropout that rounds to 1": ({"dropout_p": 1 - 2.0**-26}, ValueError, "dropout_p: got 0.99999998"),
    "scale that rounds to 0": ({"softmax_scale": 1e-50}, ValueError, "softmax_scale: got 1e-50"),
    "rank": ({"q": torch.zeros(2, 6, 4, 16)}, ValueError, "q: got shape"),
    "cu dtype": (
        {"cu_seqlens_q": _cu(0, 6, 12).long()},
        TypeError,
        "cu_seqlens_q: got torch.int64, wanted int32",
    ),
    "cu rank": ({"cu_seqlens_k": _cu(0, 9, 18)[None]}, ValueError, "cu_seqlens_k: got shape"),
    "cu stride": ({"cu_seqlens_k": _cu(0, 1, 9, 1, 18)[::2]}, ValueError, "cu_seqlens_k: got stride 2"),
    "cu length": ({"cu_seqlens_k": _cu(0, 18)}, ValueError, "cu_seqlens_q, cu_seqlens_k: got 3 and 2"),
    "cu empty": ({"cu_seqlens_q": _cu(), "cu_seqlens_k": _cu()}, ValueError, "batch . 1 each"),
    "cu device": (
        {"cu_seqlens_q": _cu(0, 6, 12).to("meta")},
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
    tensors = (x.flatten(0, 1) for x in _qkv())
    values = (*tensors, _cu(0, 6, 12), _cu(0, 9, 18), 6, 9)
    arguments = {**dict(zip(f"q, k, v, {LENGTHS}".split(", "), values, strict=True)), **change}
    with pytest.raises(error, match=match):
        flash_attn.flash_attn_varlen_func(**arguments)


def test_block_table_errors() -> None:
    q, k, v = _qkv()
    arguments = (q.flatten(0, 1), k, v, _cu(0, 6, 12), _cu(0, 9, 18), 6, 9)
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


def test_open_and_wide_windows_are_none() -> None:
    """Windows that reach every key mean no window, so that backends need no variant for them."""
    q, k, v = _qkv()
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
    cu = _cu(0, 7, 14)

    def run(function: Callable[..., Any], x: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        torch.manual_seed(5)
        results = function(x, *args, dropout_p=0.2, causal=True, window_size=(4, 0), return_attn_probs=True)
        assert not results[1].requires_grad
        (gradient,) = torch.autograd.grad(results[0], x, dout.view(results[0].shape))
        return [*results, gradient]

    wanted = run(lambda x, **kw: flash_attn.flash_attn_func(*x.unbind(2), **kw), qkv)
    kv = run(lambda x, **kw: flash_attn.flash_attn_kvpacked_func(x[:, :, 0], x[:, :, 1:], **kw), qkv)
    for got in (run(flash_attn.flash_attn_qkvpacked_func, qkv), kv):
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b)
    flat = qkv.detach().flatten(0, 1).requires_grad_()
    wanted = run(lambda x, **kw: flash_attn.flash_attn_varlen_func(*x.unbind(1), cu, cu, 7, 7, **kw), flat)
    kv = run(
        lambda x, **kw: flash_attn.flash_attn_varlen_kvpacked_func(x[:, 0], x[:, 1:], cu, cu, 7, 7, **kw),
        flat,
    )
    for got in (run(flash_attn.flash_attn_varlen_qkvpacked_func, flat, cu, 7), kv):
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b)


def test_default_scale_is_of_the_unpadded_head_dim() -> None:
    q, k, v = _qkv(dim=13)
    wanted, lse = reference.attention(q, k, v, softmax_scale=13**-0.5)
    out, got_lse, dmask = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert_close("out", out, wanted, dtype=torch.float32)
    assert_close("lse", got_lse, lse)
    assert dmask.shape == (0,)


def test_max_seqlen_may_be_a_tensor() -> None:
    q, k, v = (x.flatten(0, 1) for x in _qkv())
    lengths = (_cu(0, 6, 12), _cu(0, 9, 18))
    wanted = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, 6, 9)
    got = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, torch.tensor(6), torch.tensor([9]))
    assert torch.equal(got, wanted)


def test_no_second_derivative() -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(flash_attn.flash_attn_func(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def test_gradient_is_skipped_where_none_is_asked() -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.no_grad():
        assert flash_attn.flash_attn_func(q, q, q).grad_fn is None
    assert flash_attn.flash_attn_func(q, q.detach(), q.detach()).grad_fn is not None
    assert flash_attn.flash_attn_func(q.detach(), q, q.detach()).grad_fn is not None


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("dim", [16, 13])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "window_size": (3, 0), "softcap": 2.0}, {"deterministic": True}],
    ids=str,
)
def test_compile_dense(dim: int, options: dict[str, Any]) -> None:
    tensors = [x.requires_grad_() for x in _qkv(dim=dim)]

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_func(q * 2, k, v, **options).cos()

    _same_compiled(block, tensors)


def _same_compiled(block: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> None:
    results = []
    for function in (block, _compiled(block)):
        out = function(*tensors)
        results.append((out, *torch.autograd.grad(out.sum(), tensors)))
    for got, wanted in zip(*reversed(results), strict=True):
        assert_close("compiled", got, wanted, tiny=1e-6)


def test_compile_packed_and_varlen() -> None:
    torch.manual_seed(0)
    cu = _cu(0, 3, 9)

    def block(qkv: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        first = flash_attn.flash_attn_qkvpacked_func(qkv[None], causal=True)[0]
        second = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 6)
        third = flash_attn.flash_attn_varlen_kvpacked_func(first + second, kv, cu, cu, 6, 6, causal=True)
        fourth = flash_attn.flash_attn_kvpacked_func(third[None], kv[None])[0]
        return flash_attn.flash_attn_varlen_func(fourth, *kv.unbind(1), cu, cu, 6, 6)

    _same_compiled(block, [torch.randn(9, n, 2, 8, requires_grad=True) for n in (3, 2)])


def test_compile_returns_statistics() -> None:
    q, k, v = _qkv()

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)

    for tensors in ((q, k, v), (q.requires_grad_(), k, v)):
        for got, wanted in zip(_compiled(block)(*tensors), block(*tensors), strict=True):
            assert torch.equal(got, wanted)
            assert got.requires_grad == wanted.requires_grad


def test_compile_with_dynamic_shapes() -> None:
    def block(q: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_func(q, q, q, causal=True)

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (5, 17):
        q = torch.randn(2, seqlen, 2, 8, requires_grad=True)
        out = compiled(q)
        out.sum().backward()
        assert_close("dynamic", out, block(q), tiny=1e-6)


def test_compile_with_a_scale_that_changes() -> None:
    q, k, v = _qkv()
    new = q[:, :1, :2].contiguous()
    tables = torch.rand(9, 8)

    def attend(q: torch.Tensor, scale: float) -> torch.Tensor:
        return flash_attn.flash_attn_func(q, k, v, softmax_scale=scale, alibi_slopes=torch.ones(4), softcap=scale)

    def attend_to_cache(q: torch.Tensor, scale: float) -> torch.Tensor:
        return flash_attn.flash_attn_with_kvcache(
            q, k.clone(), v.clone(), new, new, tables, tables, cache_seqlens=3, softmax_scale=scale, softcap=scale
        )

    for function, scales in ((attend, (0.1, 0.2, 1.0)), (attend, (1, 2, 3)), (attend_to_cache, (0.1, 0.2, 1.0))):
        for dynamic in (None, True):
            torch.compiler.reset()
            compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=dynamic)
            for scale in scales:
                assert_close("scaled", compiled(q, scale), function(q, scale))


def _dense_in_a_window(q: torch.Tensor) -> torch.Tensor:
    return flash_attn.flash_attn_func(q, q, q, causal=True, window_size=(5, 1 << 40))


def _one_sequence(q: torch.Tensor) -> torch.Tensor:
    rows, cu = q.flatten(0, 1), torch.arange(2, dtype=torch.int32) * q.shape[1]
    return flash_attn.flash_attn_varlen_func(rows, rows, rows, cu, cu, q.shape[1], cu.max(), window_size=(5, -1))


def _cached(q: torch.Tensor) -> torch.Tensor:
    cache = q.repeat(1, 2, 1, 1)
    return flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=q.shape[1] + 1)


@pytest.mark.parametrize("function", [_dense_in_a_window, _one_sequence, _cached], ids=lambda f: f.__name__)
def test_export_with_a_dynamic_seqlen(function: Callable[..., torch.Tensor]) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return function(q)

    shapes = ({1: torch.export.Dim("seqlen")},)
    exported = torch.export.export(Module(), (torch.randn(1, 9, 2, 8),), dynamic_shapes=shapes, strict=False).module()
    for seqlen in (9, 3, 30):
        q = torch.randn(1, seqlen, 2, 8)
        assert_close("exported", exported(q), function(q))


OPCHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_opcheck(dropout_p: float) -> None:
    q, k, v = (x.requires_grad_() for x in _qkv())
    # A mask drawn anew differs between the runs that some checks compare.
    checks = OPCHECKS if dropout_p == 0.0 else OPCHECKS[:3]
    options = (dropout_p, 0.25, True, 4, -1, 2.0, torch.rand(4))
    op = torch.ops.flash_attn._flash_attn_forward.default
    torch.library.opcheck(op, (q, k, v, *options, True), test_utils=checks)
    out, lse, _, rng_state = op(q, k, v, *options, True)
    saved = (x.detach() for x in (q, k, v, out, lse))
    tensors = (torch.randn_like(out), *saved, *(torch.empty(x.shape) for x in (q, k, v)))
    op = torch.ops.flash_attn._flash_attn_backward.default
    torch.library.opcheck(op, (*tensors, *options, False, rng_state), test_utils=OPCHECKS)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_opcheck_varlen(dropout_p: float) -> None:
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in _qkv())
    checks = OPCHECKS if dropout_p == 0.0 else OPCHECKS[:3]
    lengths = (_cu(0, 2, 12), _cu(0, 9, 18), 10, 9)
    options = (dropout_p, 0.25, True, 4, -1, 2.0, torch.rand(2, 4))
    op = torch.ops.flash_attn._flash_attn_varlen_forward.default
    torch.library.opcheck(op, (q, k, v, *lengths, *options, True), test_utils=checks)
    out, lse, _, rng_state = op(q, k, v, *lengths, *options, True)
    saved = (x.detach() for x in (q, k, v, out, lse))
    tensors = (torch.randn_like(out), *saved, *(torch.empty(x.shape) for x in (q, k, v)))
    op = torch.ops.flash_attn._flash_attn_varlen_backward.default
    torch.library.opcheck(op, (*tensors, *lengths, *options, False, rng_state), test_utils=OPCHECKS)


@pytest.mark.parametrize("heads", [1, 4, 6])
def test_backward_takes_a_transposed_view_of_softmax_lse(heads: int) -> None:
    """As diffusers 0.36 gives it; with 6 heads and 6 queries the shapes are the same."""
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 6, heads, 16)
    packed = tuple(x.flatten(0, 1) for x in (dout, q, k, v))
    cu = _cu(0, 6, 12)
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
    leaves = [x.requires_grad_() for x in _qkv()]
    slopes = None if softcap else torch.rand(4)
    seqlens = [x.shape[1] for x in leaves[:2]]
    lengths = (*(_cu(0, n, 2 * n) for n in seqlens), *seqlens)
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

        run = _compiled(loss) if compiled and function is not book else loss
        return torch.autograd.grad(run(*leaves), leaves[: 3 if through_out else 2])

    for function in (dense, varlen):
        for got, wanted in zip(gradients(function), gradients(book), strict=True):
            assert_close(function.__name__, got, wanted, tiny=1e-5)


def test_dropout_leaves_the_gradient_of_softmax_lse_alone() -> None:
    q, k, v = (x.requires_grad_() for x in _qkv())
    gradients = [
        torch.autograd.grad(ops._flash_attn_forward(q, k, v, p, 0.25, False, -1, -1, 0.0, None, True)[1].sum(), (q, k))
        for p in (0.5, 0.0)
    ]
    assert all(map(torch.equal, *gradients))
    assert not ops._flash_attn_forward(q, k, v, 0.5, 0.25, False, -1, -1, 0.0, None, True)[2].requires_grad


def test_meta_tensors() -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in _qkv())
    out = flash_attn.flash_attn_func(q, k, v)
    out.sum().backward()
    assert out.shape == q.shape
    assert k.grad.shape == k.shape


def test_ops_are_bypassed_in_eager_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = dispatch._wrapped_flash_attn_forward
    monkeypatch.setattr(dispatch, "_wrapped_flash_attn_forward", lambda *a: calls.append(1) or real(*a))
    q, k, v = _qkv()
    flash_attn.flash_attn_func(q, k, v)
    flash_attn.flash_attn_func(torch.nn.Parameter(q), k, v)
    assert not calls

    class Tagged(torch.Tensor):
        pass

    flash_attn.flash_attn_func(q.as_subclass(Tagged), k, v)
    assert len(calls) == 1
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        flash_attn.flash_attn_func(q, k, v)
    assert len(calls) == 2


def _tables(places: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(places, rotary_dim // 2) * 6.0
    return angles.cos(), angles.sin()


def _kvcache_reference(
    q: torch.Tensor,
    caches: list[torch.Tensor],
    new: list[torch.Tensor] | None,
    rotary: tuple[torch.Tensor, torch.Tensor, bool] | None,
    lengths: list[int],
    leftpads: list[int],
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(out, lse, caches after), from caches (b, capacity, hk, d) whose row i is sequence i's."""
    caches = [cache.clone() for cache in caches]
    outs, lses = [], []
    moving = options.get("causal", False) or options.get("window", (-1, -1)) != (-1, -1)
    for i, length in enumerate(lengths):
        queries, stop = q[i].double(), length
        if new is not None:
            added = new[0].shape[1]
            stop = length + added
            keys = new[0][i].double()
            if rotary is not None:
                keys = reference.rotate(keys, *rotary[:2], list(range(length, stop)), rotary[2])
                step = 1 if moving else 0
                places = [length + step * j for j in range(q.shape[1])]
                queries = reference.rotate(queries, *rotary[:2], places, rotary[2])
            caches[0][i, length:stop] = keys.to(caches[0].dtype)
            caches[1][i, length:stop] = new[1][i]
        parts = (cache[i, leftpads[i] : stop].double()[None] for cache in caches)
        out, lse = reference.attention(queries[None], *parts, dtype=torch.float64, **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.stack(outs), torch.stack(lses), caches


KVCACHE = {
    "read": {},
    "causal": {"causal": True, "new": 3},
    "append, full": {"new": 5, "rotary": True},
    "rotary interleaved": {"new": 3, "causal": True, "rotary": True},
    "rotary halves": {"new": 3, "causal": True, "rotary": False},
    "window": {"new": 4, "window": (6, 2), "rotary": False},
    "leftpad": {"new": 3, "causal": True, "rotary": True, "leftpad": True},
    "lines": {"new": 2, "causal": True, "lines": True},
    "paged": {"new": 3, "causal": True, "rotary": True, "paged": True},
    "paged, leftpad": {"paged": True, "leftpad": True, "softcap": 3.0},
    "alibi": {"new": 3, "causal": True, "alibi": True, "softcap": 2.0},
    "decode": {"new": 1, "seqlen_q": 1, "causal": True, "num_splits": 3},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", KVCACHE)
def test_kvcache(case: str, dtype: torch.dtype) -> None:
    options = dict(KVCACHE[case])
    torch.manual_seed(0)
    batch, heads, heads_k, dim, capacity, page = 3, 4, 2, 20, 48, 8
    seqlen_q = options.pop("seqlen_q", 3)
    added, interleaved = options.pop("new", 0), options.pop("rotary", None)
    num_splits = options.pop("num_splits", 0)
    lengths = [17, 0, 40]
    q = torch.randn(batch, seqlen_q, heads, dim).to(dtype)
    caches = [torch.randn(batch, capacity, heads_k, dim).to(dtype) for _ in range(2)]
    new = [torch.randn(batch, added, heads_k, dim).to(dtype) for _ in range(2)] if added else None
    cos, sin = (x.to(dtype) for x in _tables(capacity, 16))
    leftpads = [4, 0, 11] if options.pop("leftpad", False) else [0] * batch
    lines, paged = options.pop("lines", False), options.pop("paged", False)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(batch, heads)
    wanted_options = [dict(options) for _ in range(batch)]
    for i, single in enumerate(wanted_options):
        if "alibi_slopes" in single:
            single["alibi_slopes"] = options["alibi_slopes"][i]
    rotary = None if interleaved is None else (cos, sin, interleaved)
    parts = [
        _kvcache_reference(
            q[i, None],
            [cache[i, None] for cache in caches],
            None if new is None else [x[i, None] for x in new],
            rotary,
            lengths[i : i + 1],
            leftpads[i : i + 1],
            wanted_options[i],
        )
        for i in range(batch)
    ]
    wanted_caches = [torch.cat([part[2][side] for part in parts]) for side in range(2)]

    table = order = None
    if paged:
        table = torch.randperm(batch * capacity // page).int().view(batch, capacity // page)
        given = [torch.empty(batch * capacity // page, page, heads_k, dim, dtype=dtype) for _ in caches]
        for pages, cache in zip(given, caches, strict=True):
            pages[table.long().flatten()] = cache.view(-1, page, heads_k, dim)
    elif lines:
        order = _cu(3, 0, 2)
        given = [torch.zeros(4, capacity, heads_k, dim, dtype=dtype) for _ in caches]
        for cache, source in zip(given, caches, strict=True):
            cache[order.long()] = source
    else:
        given = [cache.clone() for cache in caches]
    window = options.pop("window", (-1, -1))
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        *given,
        *(new or (None, None)),
        rotary_cos=None if rotary is None else cos,
        rotary_sin=None if rotary is None else sin,
        cache_seqlens=_cu(*lengths),
        cache_batch_idx=order,
        cache_leftpad=_cu(*leftpads) if any(leftpads) else None,
        block_table=table,
        window_size=window,
        rotary_interleaved=bool(interleaved),
        num_splits=num_splits,
        return_softmax_lse=True,
        **options,
    )
    if paged:
        given = [pages[table.long()].flatten(1, 2) for pages in given]
    elif lines:
        given = [cache[order.long()] for cache in given]
    rounding = 1e-5 if dtype is torch.float32 else 2e-2
    assert_close("out", out, torch.cat([part[0] for part in parts]), tiny=rounding, dtype=dtype)
    assert_close("lse", lse, torch.cat([part[1] for part in parts]), tiny=rounding, dtype=torch.float32)
    for side in range(2):
        assert_close("cache", given[side], wanted_caches[side], tiny=rounding)


def test_kvcache_length_as_an_int_and_whole_cache() -> None:
    q, k, v = _qkv()
    whole = flash_attn.flash_attn_with_kvcache(q, k, v)
    assert_close("whole", whole, flash_attn.flash_attn_func(q, k, v), tiny=1e-6)
    part = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4)
    assert_close("part", part, flash_attn.flash_attn_func(q, k[:, :4], v[:, :4]), tiny=1e-6)
    assert flash_attn.flash_attn_with_kvcache(q.requires_grad_(), k, v).grad_fn is None


@pytest.mark.parametrize("cache_seqlens", [4, _cu(3, 5)], ids=["int", "tensor"])
def test_kvcache_compiles_into_one_graph(cache_seqlens: int | torch.Tensor) -> None:
    q, k, v = _qkv()
    new = q[:, :2, :2].contiguous()

    def call(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Any:
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, new, new, cache_seqlens=cache_seqlens, causal=True, return_softmax_lse=True
        )

    eager, compiled = [k.clone(), v.clone()], [k.clone(), v.clone()]
    wanted = call(*eager)
    torch._dynamo.reset()
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(*compiled)
    assert all(map(torch.equal, [*got, *compiled], [*wanted, *eager]))


_INDEX = torch.zeros(2, dtype=torch.int32)
KVCACHE_ERRORS = {
    "q type": ({"q": 3, "cache_seqlens": 4}, TypeError, "q: got int"),
    "q rank": ({"q": torch.zeros(()), "cache_seqlens": 4}, ValueError, r"q: got shape \(\)"),
    "only k": ({"k": torch.zeros(2, 1, 2, 16)}, ValueError, "k, v: got only one"),
    "no place": (
        {"k": torch.zeros(2, 1, 2, 16), "v": torch.zeros(2, 1, 2, 16)},
        ValueError,
        "cache_seqlens: got None",
    ),
    "too long": (
        {"k": torch.zeros(2, 1, 2, 16), "v": torch.zeros(2, 1, 2, 16), "cache_seqlens": 9},
        ValueError,
        "cache_seqlens: got 9, wanted 0 to 8: the cache holds 9 keys, and k appends 1",
    ),
    "new heads": (
        {"k": torch.zeros(2, 1, 4, 16), "v": torch.zeros(2, 1, 4, 16), "cache_seqlens": 0},
        ValueError,
        "k: got shape",
    ),
    "length": ({"cache_seqlens": 10}, ValueError, "cache_seqlens: got 10, wanted 0 to 9:"),
    "negative length": ({"cache_seqlens": -1}, ValueError, "cache_seqlens: got -1, wanted 0 to 9:"),
    "length dtype": ({"cache_seqlens": _INDEX.long()}, TypeError, "cache_seqlens: got torch.int64"),
    "length shape": ({"cache_seqlens": _INDEX[:1]}, ValueError, "cache_seqlens: got 1 elements, wanted 2"),
    "lines": ({"cache_batch_idx": _INDEX + 2}, ValueError, "cache_batch_idx: got 2 at index 0"),
    "lines and pages": (
        {"cache_batch_idx": _INDEX, "block_table": torch.zeros(2, 1, dtype=torch.int32)},
        ValueError,
        "cache_batch_idx: got a tensor, wanted None",
    ),
    "leftpad": ({"cache_leftpad": _INDEX + 10}, ValueError, "cache_leftpad: got 10"),
    "batch": ({"q": torch.zeros(3, 1, 4, 16)}, ValueError, "k_cache: got batch 2, wanted 3"),
    "stride": ({"k_cache": torch.zeros(2, 9, 16, 2).transpose(2, 3)}, ValueError, "k_cache: got stride 2"),
    "cos alone": ({"rotary_cos": torch.zeros(9, 8)}, ValueError, "rotary_cos, rotary_sin: got only one"),
    "rotary without k": (
        {"rotary_cos": torch.zeros(9, 8), "rotary_sin": torch.zeros(9, 8)},
        ValueError,
        "rotary_cos: got a tensor, wanted None without k",
    ),
    "rotary too short": (
        {
            "k": torch.zeros(2, 1, 2, 16),
            "v": torch.zeros(2, 1, 2, 16),
            "cache_seqlens": 4,
            "rotary_cos": torch.zeros(4, 8),
            "rotary_sin": torch.zeros(4, 8),
        },
        ValueError,
        "rotary_cos: got 4 places, wanted at least 5",
    ),
    "scale that rounds to 0": ({"softmax_scale": 1e-50}, ValueError, "softmax_scale: got 1e-50"),
    "softcap that rounds to 0": ({"softcap": 1e-50}, ValueError, "softcap: got 1e-50"),
    "splits": ({"num_splits": -1}, ValueError, "num_splits: got -1"),
}


@pytest.mark.parametrize("case", KVCACHE_ERRORS)
def test_kvcache_errors(case: str) -> None:
    change, error, match = KVCACHE_ERRORS[case]
    q, k, v = _qkv()
    arguments = {"q": q[:, :1], "k_cache": k, "v_cache": v, **change}
    with pytest.raises(error, match=match):
        flash_attn.flash_attn_with_kvcache(**arguments)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", ["length", "negative length", "too long", "rotary too short"])
def test_lengths_that_the_host_knows_are_checked_before_any_backend(
    monkeypatch: pytest.MonkeyPatch, case: str, compiled: bool
) -> None:
    from flash_attn import kvcache_op

    monkeypatch.setattr(kvcache_op, "select", lambda _: pytest.fail("a backend was asked"))
    change, error, match = KVCACHE_ERRORS[case]
    q, k, v = _qkv()
    arguments = {"q": q[:, :1], "k_cache": k, "v_cache": v, **change}
    call = _compiled(flash_attn.flash_attn_with_kvcache) if compiled else flash_attn.flash_attn_with_kvcache
    with pytest.raises(error, match=match):
        call(**arguments)


@pytest.mark.parametrize("wide", [1 << 29, (1 << 31) - 1, 1 << 40])
def test_kvcache_takes_windows_of_any_width(wide: int) -> None:
    q, k, v = _qkv()
    for more in ({}, {"alibi_slopes": torch.rand(4)}):

        def call(*window: int, more: dict[str, Any] = more) -> torch.Tensor:
            return flash_attn.flash_attn_with_kvcache(q, k, v, window_size=window, **more)

        assert torch.equal(call(wide, wide), call(-1, -1))
        assert torch.equal(call(wide, 2), call(-1, 2))
        assert torch.equal(_compiled(call)(2, wide), call(2, -1))


def test_backend_info() -> None:
    told = flash_attn.backend_info()
    assert told["version"] == flash_attn.__version__ == "2.8.3"
    assert told["torch"]["running"] == torch.__version__
    assert set(told) == {*("backend", "version", "label", "torch", "targets", "device_targets", "launcher", "problems")}


def test_build_info_of_a_wheel(tmp_path: Path) -> None:
    path = tmp_path / "_build_info.json"
    assert build_info.read(path) == build_info.BuildInfo()
    path.write_text(
        json.dumps(
            {
                "version": "2.7.4",
                "label": "rocm62torch2.5triton",
                "torch": "2.5",
                "rocm": "6.2",
                "backend": "triton",
                "targets": ["gfx90a", "gfx942"],
                "compiler": None,
                "of a later build": 1,
            }
        )
    )
    read = build_info.read(path)
    assert (read.version, read.targets, read.torch_minor, read.compiler) == (
        *("2.7.4", ("gfx90a", "gfx942"), "2.5", ""),
    )
    assert info.torch_problems(read, "2.5.1+rocm6.2", "6.2.41133") == []
    minor, kind = info.torch_problems(read, "2.6.0+cpu", None)
    assert "built for torch 2.5, torch 2.6.0+cpu is running" in minor
    assert "torch2.6" in minor
    assert "built for ROCm 6.2" in kind


def test_import_without_torch_says_which() -> None:
    root = Path(flash_attn.__file__).parents[1]
    script = f"import sys; sys.path.insert(0, {str(root)!r}); sys.modules['torch'] = None; import flash_attn"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ImportError: flash_attn 2.8.3 needs torch 2.5 or newer" in result.stderr
