"""The fakes of the custom ops return the same shapes, dtypes and strides as the ops, over a grid of options."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import flash_attn.fp8  # noqa: F401 - registers its ops
import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton
from flash_attn.ops.triton import rotary  # noqa: F401 - registers its op
from op_arguments import op_arguments
from small_calls import in_one_graph
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

OPS = torch.ops.flash_attn
Arguments = list[Any]
# seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v
SHAPES = {
    "group": (5, 7, 4, 2, 16, 16),
    "values": (3, 6, 2, 2, 16, 8),
    "no keys": (3, 0, 2, 1, 8, 8),
    "no queries": (0, 4, 2, 2, 8, 8),
    "one": (1, 1, 1, 1, 8, 8),
}


def _described(results: Any) -> list[Any]:
    """What a compiler asks of results. Strides of an axis of size 1, and of tensors without elements, do not count."""
    described: list[Any] = []
    for x in results if isinstance(results, (tuple, list)) else [results]:
        if x is None:
            described.append(None)
            continue
        strides = [0 if size == 1 or not x.numel() else step for size, step in zip(x.shape, x.stride(), strict=True)]
        described.append((tuple(x.shape), x.dtype, strides, x.storage_offset(), x.device.type))
    return described


def _agree(op: Any, arguments: Arguments) -> None:
    """Compares the op on real tensors with the op on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        promised = _described(op(*fakes))
    assert _described(op(*arguments)) == promised


def _layouts(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A tensor of a shape: dense, with its heads outside of its rows, a part of a wider one, or strided in its rows."""
    torch.manual_seed(0)
    if layout == "heads first":
        return torch.randn(*shape[:-3], shape[-2], shape[-3], shape[-1]).to(dtype).transpose(-2, -3)
    if layout == "cut":
        return torch.randn(*shape[:-1], shape[-1] + 8).to(dtype)[..., : shape[-1]]
    if layout == "strided":
        return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2]
    return torch.randn(shape).to(dtype)


def _dense(name: str, dtype: torch.dtype, layout: str) -> list[torch.Tensor]:
    seqlen_q, seqlen_k, heads, heads_k, dim, dim_v = SHAPES[name]
    shapes = ((2, seqlen_q, heads, dim), (2, seqlen_k, heads_k, dim), (2, seqlen_k, heads_k, dim_v))
    return [_layouts(shape, dtype, layout) for shape in shapes]


def _packed(name: str, dtype: torch.dtype, layout: str) -> tuple[list[torch.Tensor], list[Any]]:
    """q, k, v of two sequences, and their offsets and longest lengths."""
    seqlen_q, seqlen_k, *_ = SHAPES[name]
    rows = [x.flatten(0, 1) if layout == "dense" else x[0] for x in _dense(name, dtype, layout)]
    entries = 2 if layout == "dense" else 1
    cu_q, cu_k = (torch.arange(entries + 1, dtype=torch.int32) * n for n in (seqlen_q, seqlen_k))
    return rows, [cu_q, cu_k, seqlen_q, seqlen_k]


GRID = [
    (name, dtype, layout, dropout_p, wanted)
    for (name, (dtype, layout)), dropout_p, wanted in itertools.product(
        zip(
            SHAPES,
            (
                (torch.float16, "dense"), (torch.float32, "heads first"), (torch.bfloat16, "cut"),
                (torch.float64, "strided"), (torch.float32, "dense"),
            ),
            strict=True,
        ),
        (0.0, 0.3),
        (False, True),
    )
]  # fmt: skip


LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _extended(tensors: Sequence[torch.Tensor], lengths: Sequence[Any] | None = None, **given: Any) -> list[Any]:
    """Arguments of _extended_forward."""
    given |= zip("qkv", tensors, strict=True)
    given |= zip(LENGTHS, (None, None, 0, 0) if lengths is None else lengths, strict=True)
    return op_arguments(OPS._extended_forward, softmax_scale=0.3, **given)


@pytest.mark.parametrize(("name", "dtype", "layout", "dropout_p", "expected"), GRID)
def test_forward(name: str, dtype: torch.dtype, layout: str, dropout_p: float, expected: bool) -> None:
    inputs = _dense(name, dtype, layout)
    heads = inputs[0].shape[2]
    rng_state = torch.tensor([1, 2]) if dropout_p else None
    more = {"dropout_p": dropout_p, "rng_state": rng_state, "return_softmax": expected}
    for slopes in (None, torch.rand(heads)):
        options = (0.3, True, -1, -1, 0.0, slopes)
        _agree(OPS._flash_attn_forward, [*inputs, dropout_p, *options, expected])
        for sinks in (None, torch.randn(heads)):
            given = {"causal": True, "alibi_slopes": slopes, "s_aux": sinks}
            _agree(OPS._extended_forward, _extended(inputs, **more, **given))
    if not dropout_p:
        bias = torch.randn(1, heads, inputs[0].shape[1], inputs[1].shape[1]).to(dtype)
        _agree(OPS._extended_forward, _extended(inputs, **more, attn_bias=bias))
    rows, lengths = _packed(name, dtype, layout)
    _agree(OPS._flash_attn_varlen_forward, [*rows, *lengths, dropout_p, 0.3, True, -1, -1, 0.0, None, expected])
    given = {"window_size": [3, -1], "softcap": 2.0, "s_aux": torch.randn(heads)}
    _agree(OPS._extended_forward, _extended(rows, lengths, **more, **given))


@pytest.mark.parametrize(("name", "dtype", "layout", "dropout_p", "expected"), [row for row in GRID if not row[-1]])
def test_backward(name: str, dtype: torch.dtype, layout: str, dropout_p: float, expected: bool) -> None:
    """softmax_lse comes as the forward wrote it, and transposed."""
    inputs = _dense(name, dtype, layout)
    heads = inputs[0].shape[2]
    rng_state = torch.tensor([1, 2]) if dropout_p else None
    more = {"causal": True, "dropout_p": dropout_p, "rng_state": rng_state, "return_softmax": expected}
    out, lse, _ = OPS._extended_forward(*_extended(inputs, **more))
    into = [torch.empty_like(x) for x in inputs]
    options = [dropout_p, 0.3, True, -1, -1, 0.0, None, False, rng_state]
    for statistics in (lse, lse.transpose(1, 2).contiguous().transpose(1, 2), lse.transpose(1, 2)):
        _agree(OPS._flash_attn_backward, [out, *inputs, out, statistics, *into, *options])
        if statistics.shape == lse.shape and not dropout_p:
            bias = torch.randn(1, heads, inputs[0].shape[1], inputs[1].shape[1]).to(dtype)
            _agree(OPS._extended_backward, op_arguments(
                OPS._extended_backward, **dict(zip("qkv", inputs, strict=True)), dout=out, out=out,
                softmax_lse=statistics, softmax_scale=0.3, causal=True, s_aux=torch.randn(heads),
                attn_bias=bias.expand(2, -1, -1, -1),
            ))  # fmt: skip
        if statistics.shape == lse.shape:
            for softmax_d, dlse in ((statistics, None), (None, lse), (lse, statistics)):
                sinks = torch.randn(2 * heads).half()[::2]
                _agree(OPS._sink_gradient, [sinks, statistics, softmax_d, dlse])
    rows, lengths = _packed(name, dtype, layout)
    out, lse, _ = OPS._extended_forward(*_extended(rows, lengths, **more))
    into = [torch.empty_like(x) for x in rows]
    for statistics in (lse, lse.t()):
        _agree(OPS._flash_attn_varlen_backward, [out, *rows, out, statistics, *into, *lengths, *options])


@pytest.mark.parametrize("layout", ["dense", "heads first", "cut"])
def test_paged_forward(layout: str) -> None:
    pages = _layouts((3, 4, 2, 16), torch.float32, layout)
    q = _layouts((5, 4, 16), torch.float32, "dense")
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    lengths = [cu, torch.tensor([0, 6, 13], dtype=torch.int32), 3, 8]
    _agree(OPS._flash_attn_varlen_forward, [q, pages, pages, *lengths, 0.0, 0.3, True, -1, -1, 0.0, None, True, table])
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    given = {
        "softmax_scale": 0.3,
        "causal": True,
        "return_softmax": True,
        "block_table": table,
        "s_aux": torch.randn(4),
    }
    given |= zip(names, lengths, strict=True)
    _agree(OPS._extended_forward, op_arguments(OPS._extended_forward, q=q, k=pages, v=pages, **given))


def _caches() -> Iterator[Arguments]:
    """Calls of a cache: dense and packed, with keys that are appended, pages, sinks, a second query and FP8."""
    for layout, packed, new, paged, dim_v in itertools.product(
        ("dense", "heads first", "cut"), (False, True), (False, True), (False, True), (16, 8)
    ):
        q = _layouts((4, 4, 16) if packed else (2, 2, 4, 16), torch.float16, layout)
        lead = (4, 8) if paged else (2, 8)
        k_cache, v_cache = (_layouts((*lead, 2, dim), torch.float16, layout) for dim in (16, dim_v))
        k, v = (_layouts((2, 1, 2, dim), torch.float16, layout) if new else None for dim in (16, dim_v))
        table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32) if paged else None
        lengths = torch.tensor([3, 5], dtype=torch.int32)
        cu = torch.tensor([0, 1, 4], dtype=torch.int32) if packed else None
        qv = _layouts((*q.shape[:-1], dim_v), torch.float16, layout)
        yield op_arguments(
            OPS._flash_attn_with_kvcache, q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, cache_seqlens=lengths,
            block_table=table, softmax_scale=0.3, causal=True, cu_seqlens_q=cu, max_seqlen_q=3 if packed else 0,
            s_aux=torch.randn(4), qv=qv,
        )  # fmt: skip
    q, cache = (torch.randn(2, 3, 2, 16).to(torch.float8_e4m3fn) for _ in range(2))
    factor = torch.ones(2, 2)
    yield op_arguments(
        OPS._flash_attn_with_kvcache, q=q, k_cache=cache, v_cache=cache.clone(), cache_length=3, softmax_scale=0.3,
        causal=True, q_descale=factor, k_descale=factor, v_descale=factor,
    )  # fmt: skip


def test_caches() -> None:
    for arguments in _caches():
        _agree(OPS._flash_attn_with_kvcache, arguments)


@pytest.mark.parametrize("layout", ["dense", "heads first", "cut"])
def test_fp8_and_rotary(layout: str) -> None:
    q, k, v = _dense("group", torch.bfloat16, layout)
    op, options = OPS._fp8_forward, {"softmax_scale": 0.25, "causal": True}
    descale = torch.rand(2, 2).t()
    for given in (None, descale):
        _agree(op, op_arguments(op, q=q, k=k, v=v, descale_k=given, descale_v=given, **options))
    _agree(OPS._fp8_there_and_back, [k, descale, None])
    rows, lengths = _packed("group", torch.bfloat16, layout)
    factors = torch.rand(lengths[0].shape[0] - 1, 2)
    options |= zip(LENGTHS, lengths, strict=True)
    options |= {"dropout_p": 0.3, "rng_state": torch.tensor([1, 2]), "descale_k": factors}
    _agree(op, op_arguments(op, **dict(zip("qkv", rows, strict=True)), **options))
    _agree(OPS._fp8_there_and_back, [rows[1], factors, lengths[1]])
    for half in (0, 4, 8):
        tables = [torch.rand(9, half), torch.rand(9, half)]
        _agree(OPS._apply_rotary, [q, *tables, 1, None, None, 0, False, False])
        _agree(OPS._apply_rotary, [rows[0], *tables, 0, None, lengths[0], 5, True, True])


@pytest.mark.usefixtures("_tiles")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of a CPU are in the interpreter's reach alone")
def test_the_kernels_results() -> None:
    """Those of Triton's kernels, which the fakes describe too."""
    with backends.using(triton):
        for name, layout in (("group", "heads first"), ("values", "cut")):
            inputs = _dense(name, torch.float32, layout)
            seeds = torch.tensor([1, 2])
            given = {"causal": True}
            for dropout_p in (0.0, 0.3):
                more = {"rng_state": seeds if dropout_p else None, "dropout_p": dropout_p, "return_softmax": True}
                _agree(OPS._extended_forward, _extended(inputs, **given, **more))
                _agree(OPS._flash_attn_forward, [*inputs, dropout_p, 0.3, True, -1, -1, 0.0, None, True])
            out, lse, _ = OPS._extended_forward(*_extended(inputs, **given))
            bias = torch.randn(1, 1, inputs[0].shape[1], inputs[1].shape[1])
            op = OPS._extended_backward
            given |= {"softmax_scale": 0.3, "attn_bias": bias, **dict(zip("qkv", inputs, strict=True))}
            _agree(op, op_arguments(op, **given, dout=out, out=out, softmax_lse=lse))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_mask_of_dropout_in_a_compiled_function() -> None:
    q, k, v = _dense("group", torch.float32, "dense")

    def share(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Size, torch.Tensor]:
        _, _, mask = flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True)
        return mask.shape, (mask < 0).sum()

    with backends.using(oracle):
        shape, dropped = in_one_graph(share)(q, k, v)
    assert shape == (2, 4, 5, 7)
    assert 0 < int(dropped) < 280
