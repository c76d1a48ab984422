"""The module sageattention as its callers call it: the signatures and calls of sage_contract.toml, and errors."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sageattention
import tomllib
import torch
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.int8 import flash_attn_int8_func, flash_attn_varlen_int8_func
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

CONTRACT = tomllib.loads(Path(__file__).with_name("sage_contract.toml").read_text(encoding="utf-8"))
attend = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    torch.compiler.reset()
    with backends.using(torch_backend):
        yield


def _functions(pattern: str) -> list[Callable[..., Any]]:
    start = pattern.removesuffix("*")
    names = [name for name in sageattention.__all__ if name.startswith(start) and (start != pattern or name == pattern)]
    names = [name for name in names if name != "sageattn_varlen"]
    assert names
    return [getattr(sageattention, name) for name in names]


def _qkv(
    seqlen_q: int, seqlen_k: int, heads_k: int = 2, dim: int = 64, dtype: torch.dtype = torch.float16
) -> list[torch.Tensor]:
    """In the layout NHD; keys have a common part."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, seqlen_q, 2, dim), (2, seqlen_k, heads_k, dim), (2, seqlen_k, heads_k, dim))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return [q.to(dtype), (k + 2).to(dtype), v.to(dtype)]


def _wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention in fp32, in and out NHD."""
    turned = (x.float().transpose(1, 2) for x in (q, k, v))
    return attend(*turned, enable_gqa=True, **options).transpose(1, 2)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def test_compiled_for_any_shape() -> None:
    run = torch.compile(sageattention.sageattn, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, keys in ((24, 40), (31, 57)):
        q, k, v = _qkv(rows, keys)
        mask = torch.zeros(rows, keys).half()
        for options in ({}, {"attn_mask": mask}):
            with torch.no_grad():
                out = run(q, k, v, "NHD", **options)
            assert torch.equal(out, sageattention.sageattn(q, k, v, "NHD", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(CONTRACT["signatures"]))
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(sageattention, name)).parameters.values()
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) == CONTRACT["signatures"][name]
    assert getattr(importlib.import_module("sageattention.core"), name) is getattr(sageattention, name)


@pytest.mark.parametrize("call", CONTRACT["calls"], ids=lambda call: call["caller"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 40, 128])
@pytest.mark.parametrize("compiled", [False, True])
def test_calls(call: dict[str, Any], dtype: torch.dtype, dim: int, compiled: bool) -> None:
    if compiled and (dim, dtype) != (40, torch.float16):
        pytest.skip("one compiled form is enough")
    arguments = call["arguments"]
    is_causal = arguments.get("is_causal", arguments.get("causal", False))
    rows, heads_k = 40 if is_causal else 24, 1 if "enable_gqa" in arguments else 2
    q, k, v = _qkv(rows, 40, heads_k, dim, dtype)
    given: dict[str, Any] = dict(arguments)
    if "window_size" in given:
        given["window_size"] = tuple(given["window_size"])
    options: dict[str, Any] = {"is_causal": is_causal}
    options["scale"] = next(
        (arguments[name] for name in ("sm_scale", "scale", "softmax_scale") if name in arguments), None
    )
    if "mask" in call:
        mask = torch.rand(call["mask"], generator=torch.Generator().manual_seed(1)) < 0.8
        mask[..., 0] = True
        if call.get("mask_type") == "q":
            mask = torch.zeros(call["mask"], dtype=dtype).masked_fill(~mask, -torch.inf)
        given["attn_mask"] = mask
        options["attn_mask"] = mask if mask.dtype is torch.bool else mask.float()
    expected = _wanted(q, k, v, **options)
    turn = call["layout"] == "HND"
    inputs = [x.transpose(1, 2) if turn else x for x in (q, k, v)]
    for function in _functions(call["function"]):
        run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
        with torch.no_grad():
            out = run(*inputs, **given)
        if arguments.get("return_lse"):
            out, lse = out
            scores = q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1) * options["scale"]
            if is_causal:
                scores.masked_fill_(torch.ones(rows, 40, dtype=torch.bool).triu(1), -torch.inf)
            assert lse.dtype is torch.float32
            assert (lse - scores.logsumexp(-1)).abs().max() < 0.1
        assert out.dtype is dtype
        assert out.is_contiguous()  # as thu-ml's
        assert _error(out.transpose(1, 2) if turn else out, expected) < 0.02


@pytest.mark.parametrize("call", CONTRACT["varlen"], ids=lambda call: call["caller"])
@pytest.mark.parametrize("starts", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_sequences(call: dict[str, Any], starts: torch.dtype, compiled: bool) -> None:
    rows, keys = [5, 0, 30, 1], [9, 4, 12, 0]
    q, k, v = (torch.randn(sum(n), 2, 64).half() for n in (rows, keys, keys))
    places = {
        "cu_seqlens_q": torch.tensor([0, *rows]).cumsum(0).to(starts),
        "cu_seqlens_k": torch.tensor([0, *keys]).cumsum(0).to(starts),
        "max_seqlen_q": max(rows),
        "max_seqlen_k": max(keys),
    }
    function = sageattention.sageattn_varlen
    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    with torch.no_grad():
        out = run(q=q, k=k, v=v, **places, **call["arguments"]) if call["names"] else run(q, k, v, *places.values())
    assert out.shape == q.shape
    parts = zip(*(x.split(n) for x, n in ((out, rows), (q, rows), (k, keys), (v, keys))), strict=True)
    for got, *each in parts:
        expected = _wanted(*(x[None] for x in each), scale=call["arguments"].get("sm_scale"))[0]
        if expected.numel() and each[1].numel():
            assert _error(got, expected) < 0.03
        else:
            assert not got.any()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tensor_layout": "HDN"}, ValueError, "tensor_layout: got 'HDN', wanted one of HND, NHD"),
    ({"tensor_layout": None}, ValueError, "tensor_layout: got None"),
    ({"tensor_layout": ["HND"]}, ValueError, r"tensor_layout: got \['HND'\]"),
    ({"is_causal": True}, ValueError, "is_causal: got 24 queries and 40 keys"),
    ({"is_causal": "x"}, TypeError, "is_causal: got 'x', wanted a bool"),
    ({"return_lse": "x"}, TypeError, "return_lse: got 'x', wanted a bool"),
    ({"smooth_k": "x"}, TypeError, "smooth_k: got 'x', wanted a bool"),
    ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: got 0.1, wanted 0"),
    ({"pv_accum_dtype": "fp8"}, ValueError, "pv_accum_dtype: got 'fp8', wanted one of fp32"),
    ({"qk_quant_gran": 3}, ValueError, "qk_quant_gran: got 3"),
    ({"window": 4}, TypeError, "unexpected keyword argument 'window'"),
    ({"window_size": (4, 4)}, TypeError, "unexpected keyword argument 'window_size'"),
    ({"softcap": 3.0}, TypeError, "unexpected keyword argument 'softcap'"),
    ({"alibi_slopes": torch.ones(2)}, TypeError, "unexpected keyword argument 'alibi_slopes'"),
    ({"causal": "x"}, TypeError, "causal: got 'x'"),
    ({"causal": True}, ValueError, "is_causal: got 24 queries and 40 keys"),
    ({"scale": 0.1, "sm_scale": 0.2}, TypeError, "scale, sm_scale: got 0.1 and 0.2"),
    ({"sm_scale": -0.1}, ValueError, "softmax_scale: got -0.1, wanted a positive number"),
    ({"sm_scale": "x"}, TypeError, "softmax_scale: got 'x'"),
    ({"attn_mask": torch.ones(3, 40)}, ValueError, r"attn_mask: got shape \(3, 40\), wanted a shape that"),
    ({"attn_mask": torch.ones(24, 40).int()}, TypeError, "attn_mask: got torch.int32"),
    ({"attn_mask": "x"}, TypeError, "attn_mask: got str"),
    ({"q": None}, TypeError, "q: got NoneType, wanted a tensor"),
    ({"k": [1.0]}, TypeError, "k: got list, wanted a tensor"),
    ({"v": torch.ones(2).numpy()}, TypeError, "v: got ndarray, wanted a tensor"),
    ({"q": torch.ones(6, 4, 16)}, ValueError, r"q: got shape \(6, 4, 16\), wanted \(batch, seqlen, heads, head_dim\)"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "match"), WRONG, ids=lambda x: str(x)[:40])
def test_what_cannot_be_honoured_is_named(options: dict[str, Any], error: type[Exception], match: str) -> None:
    q, k, v = _qkv(24, 40)
    with pytest.raises(error, match=match):
        sageattention.sageattn(**({"q": q, "k": k, "v": v, "tensor_layout": "NHD"} | options))


@pytest.mark.parametrize(
    "options",
    [{"attn_mask": None}, {"some": None}, {"other": False}, {"smooth_v": True}, {"dropout_p": 0}, {"softcap": 0.0}],
)
def test_harmless_values_change_nothing(options: dict[str, Any]) -> None:
    q, k, v = _qkv(24, 40)
    out = sageattention.sageattn(q, k, v, "NHD", **options)
    assert torch.equal(out, sageattention.sageattn(q, k, v, "NHD"))  # type: ignore[arg-type]


def test_a_mask_and_a_causal_mask_are_refused() -> None:
    q, k, v = _qkv(40, 40)
    mask = torch.ones(40, 40).half()
    with pytest.raises(ValueError, match="is_causal: got True and attn_mask"):
        sageattention.sageattn(q, k, v, "NHD", is_causal=True, attn_mask=mask)
    starts = torch.tensor([0, 80], dtype=torch.int32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    with pytest.raises(NotImplementedError, match="attn_mask: got a mask, wanted None with packed"):
        sageattention.sageattn_varlen(*packed, starts, starts, 80, 80, attn_mask=mask)
    with pytest.raises(ValueError, match="max_seqlen_q, max_seqlen_k: got 70 and 80, and a sequence of 80 queries"):
        sageattention.sageattn_varlen(*packed, starts, starts, 70, 80)
    with pytest.raises(TypeError, match="cu_seqlens_q: got list"):
        sageattention.sageattn_varlen(*packed, [0, 80], starts, 80, 80)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mask", [False, True])
def test_derivatives_of_every_kind_are_refused(mask: bool) -> None:
    """In each mode: an error, and no tangent that is lost or wrong."""
    q, k, v = _qkv(40, 40)
    given = {"attn_mask": torch.zeros(40, 40).half()} if mask else {}

    def call(x: torch.Tensor) -> torch.Tensor:
        return sageattention.sageattn(x, k, v, "NHD", **given)  # type: ignore[return-value]

    with pytest.raises(RuntimeError, match=r"no gradient: call it under torch\.no_grad"):
        call(q.requires_grad_())
    q = q.detach()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        call(forward_ad.make_dual(q, q))
    for transform in (lambda: torch.func.jvp(call, (q,), (q,)), lambda: torch.func.grad(lambda x: call(x).sum())(q)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            transform()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.vmap(call)(q[None])


def test_int8_functions_count_their_operations() -> None:
    q, k, v = _qkv(24, 40)
    starts = torch.tensor([0, 10, 48], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        flash_attn_int8_func(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * 2 * 24 * 40 * 128
    packed = q.flatten(0, 1)
    with FlopCounterMode(display=False) as counter:
        flash_attn_varlen_int8_func(packed, packed, packed, starts, starts, 40, 40)
    assert counter.get_total_flops() == 2 * 2 * (10 * 10 + 38 * 38) * 128
