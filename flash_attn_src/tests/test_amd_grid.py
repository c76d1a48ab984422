"""Sinks, biases, head dims to 512, values of another head dim, latent attention: the code of every family of AMD GPUs.

A sample runs always. All calls on all targets:

    pytest flash_attn_src/tests/test_amd_grid.py --all-kernels
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flash_attn_interface as fa3
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn import flash_attn_func, flash_attn_with_kvcache

from amdgpu_simulator import gpu

TARGETS = ("gfx90a", "gfx950", "gfx1201", "gfx908", "gfx1030", "gfx1100", "gfx942")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Dense(NamedTuple):
    """A call of flash_attn_func and its gradients; kernels: of the forward, then of the backward."""

    kernels: tuple[str, ...]
    dtype: torch.dtype
    dims: tuple[int, int]
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    sinks: torch.dtype | None = None
    bias: torch.dtype | None = None
    hides: float = -torch.inf  # the bias of the keys that a row does not see, and of all keys of some rows
    is_table: bool = False  # whether the bias is a table of distances, which hides nothing


def _named(dtype: str, size: int, forward: str, backward: str = "plain", values: bool = False) -> tuple[str, ...]:
    """The names of the kernels of a forward and a backward."""
    v = "-v" if values else ""
    kinds = {"fwd": forward, "bwd-dq": backward, "bwd-dkdv": backward}
    names = [f"{op}{v}-{dtype}-d{size}{'' if kind == 'plain' else f'-{kind}'}" for op, kind in kinds.items()]
    return (*names, f"bwd-dbias-{dtype}-d{size}") if backward == "bias" else tuple(names)


def _of_distances(dtype: str, dim: int, of_table: str) -> tuple[str, ...]:
    """The kernels of a call with a table of distances."""
    return (*_named(dtype, dim, "bias", "bias")[:-1], f"bwd-ddiagonals-{dtype}-d{dim}", f"sum-{of_table}-d128")


LOWEST, LOWEST_BF16 = torch.finfo(FP32).min, torch.finfo(BF16).min
CAUSAL, WINDOW, CAP = {"causal": True}, {"window": (20, 9)}, {"softcap": 3.0, "causal": True}
DENSE = {
    "sinks d64": Dense(_named("bf16", 64, "sink"), BF16, (64, 64), CAUSAL, sinks=FP32),
    "sinks d128 window": Dense(_named("fp16", 128, "sink"), FP16, (128, 128), WINDOW, sinks=FP16),
    "sinks d192": Dense(_named("bf16", 192, "sink"), BF16, (192, 192), CAUSAL, sinks=BF16),
    "sinks d256": Dense(_named("bf16", 256, "sink"), BF16, (256, 256), {}, sinks=BF16),
    "sinks d64 softcap": Dense(_named("fp16", 64, "any", "softcap"), FP16, (64, 64), CAP, sinks=FP32),
    "sinks d64 fp32": Dense(_named("fp32", 64, "any"), FP32, (64, 64), CAUSAL, sinks=FP32),
    "bias d64": Dense(_named("bf16", 64, "bias", "bias"), BF16, (64, 64), {}, bias=BF16),
    "bias d96": Dense((*_named("bf16", 96, "bias", "bias")[:-1], "bwd-dbias-bf16-d128"), BF16, (96, 96), {}, bias=BF16),
    "bias d128 causal": Dense(_named("fp16", 128, "bias", "bias"), FP16, (128, 128), CAUSAL, bias=FP16),
    "bias d256 sinks": Dense(_named("bf16", 256, "bias", "bias"), BF16, (256, 256), {}, FP32, BF16),
    "bias d512": Dense(_named("bf16", 512, "bias", "bias"), BF16, (512, 512), {}, bias=BF16),
    "bias d64 fp32": Dense(_named("fp32", 64, "bias", "bias"), FP32, (64, 64), WINDOW, bias=FP32),
    "bias d64 lowest": Dense(_named("bf16", 64, "bias", "bias"), BF16, (64, 64), {}, bias=BF16, hides=LOWEST_BF16),
    "bias d128 lowest": Dense(_named("fp16", 128, "bias", "bias"), FP16, (128, 128), CAUSAL, FP16, FP32, LOWEST),
    "bias d64 fp16": Dense(_named("fp16", 64, "bias", "bias"), FP16, (64, 64), CAP, FP32, FP16, -65504.0),
    "bias d96 lowest": Dense(
        (*_named("bf16", 96, "bias", "bias")[:-1], "bwd-dbias-bf16-d128"), BF16, (96, 96), CAP, BF16, FP32, LOWEST
    ),
    "bias d64 fp32 lowest": Dense(_named("fp32", 64, "bias", "bias"), FP32, (64, 64), WINDOW, FP32, FP32, LOWEST),
    "distances d64": Dense(
        _of_distances("bf16", 64, "bf16"), BF16, (64, 64), CAUSAL, bias=BF16, is_table=True
    ),
    "distances d128": Dense(
        _of_distances("bf16", 128, "fp32"), BF16, (128, 128), WINDOW, bias=FP32, is_table=True
    ),
    "distances d256 fp32": Dense(
        _of_distances("fp32", 256, "fp32"), FP32, (256, 256), {}, FP32, FP32, is_table=True
    ),
    "d320": Dense(_named("bf16", 512, "plain"), BF16, (320, 320), CAUSAL),
    "d384 window": Dense(_named("fp16", 512, "plain"), FP16, (384, 384), WINDOW),
    "d512": Dense(_named("bf16", 512, "plain"), BF16, (512, 512), CAUSAL),
    "d512 fp16": Dense(_named("fp16", 512, "plain"), FP16, (512, 512)),
    "d512 softcap": Dense(_named("bf16", 512, "any", "any"), BF16, (512, 512), CAP),
    "d512 sinks": Dense(_named("fp16", 512, "any"), FP16, (512, 512), CAUSAL, sinks=FP16),
    "d512 fp32": Dense(_named("fp32", 512, "plain"), FP32, (512, 512), CAUSAL),
    "d192 v128": Dense(_named("bf16", 192, "plain", values=True), BF16, (192, 128), CAUSAL),
    "d192 v128 fp16": Dense(_named("fp16", 192, "plain", values=True), FP16, (192, 128)),
    "d192 v128 softcap": Dense(_named("bf16", 192, "any", "any", values=True), BF16, (192, 128), CAP),
    "d192 v128 sinks": Dense(_named("bf16", 192, "any", values=True), BF16, (192, 128), CAUSAL, sinks=BF16),
    "d192 v128 fp32": Dense(_named("fp32", 192, "plain", values=True), FP32, (192, 128), CAUSAL),
    "d128 v64": Dense(_named("fp16", 128, "plain", values=True), FP16, (128, 64), CAUSAL),
    "d128 v64 softcap": Dense(_named("fp16", 128, "any", "any", values=True), FP16, (128, 64), CAP),
    "d96 v48": Dense(_named("bf16", 128, "plain", values=True), BF16, (96, 48), WINDOW),
}  # fmt: skip


def _dense(case: Dense, target: str) -> None:
    torch.manual_seed(0)
    queries, keys = 43, 70
    shapes = ((1, queries, 2, case.dims[0]), (1, keys, 1, case.dims[0]), (1, keys, 1, case.dims[1]))
    leaves = {name: torch.randn(shape).to(case.dtype) for name, shape in zip("qkv", shapes, strict=True)}
    if case.sinks is not None:
        leaves["s_aux"] = torch.randn(2).to(case.sinks)
    if case.is_table:
        leaves["attn_bias"] = torch.randn(1, 2, queries + keys - 1).to(case.bias)
    elif case.bias is not None:
        bias = torch.randn(1, 2, queries, keys)
        bias[:, :, 5:9] = -2.0
        leaves["attn_bias"] = bias.masked_fill(bias < -1.2, case.hides).to(case.bias)
    dout = torch.randn(1, queries, 2, case.dims[1]).to(case.dtype)
    for leaf in leaves.values():
        leaf.requires_grad_()
    with gpu.pretend(target) as launched:
        out, lse, _ = flash_attn_func(**leaves, return_attn_probs=True, **reference.public(case.options))
        result = [out, lse, *torch.autograd.grad(out, list(leaves.values()), dout)]
    results = []
    for dtype in (torch.float64, case.dtype):
        wide = {name: x.detach().to(dtype) for name, x in leaves.items()}
        if case.hides > -torch.inf:  # in fp16 and bf16 the lowest number of fp32 is -inf
            wide["attn_bias"] = wide["attn_bias"].nan_to_num(neginf=torch.finfo(dtype).min)
        for leaf in wide.values():
            leaf.requires_grad_()
        tensors = dict(wide)
        if case.is_table:
            places = torch.arange(keys) - torch.arange(queries)[:, None] + queries - 1
            tensors["attn_bias"] = wide["attn_bias"][..., places]
        best, best_lse = reference.attention(**tensors, dtype=dtype, **case.options)
        results.append([best, best_lse, *torch.autograd.grad(best, list(wide.values()), dout.to(dtype))])
    for name, mine, exact, rough in zip(("out", "lse", *leaves), result, *results, strict=True):
        # The gradients of sinks and of a bias are sums that are rounded at the end.
        tiny = 2.0 * torch.finfo(mine.dtype).eps if name in ("s_aux", "attn_bias") else 0.0
        assert_close(name, mine, exact, rough=None if name == "lse" else rough, tiny=max(tiny, 3e-5))
    assert launched == list(case.kernels)


class Cache(NamedTuple):
    """A call of a cache.

    dims: of q and k, and of v; page: tokens of a page, 0 for none; second: whether it has qv; absorbed: whether the
    values are columns of the keys; new: whether it appends keys and values.
    """

    kernels: tuple[str, ...]
    dtype: torch.dtype
    dims: tuple[int, int]
    queries: int = 1
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    page: int = 0
    sinks: torch.dtype | None = None
    second: bool = False
    absorbed: bool = False
    new: bool = False


SPLIT = {"num_splits": 2}
CACHES = {
    "cache sinks": Cache(("decode-fp16-d64-sink", "combine-fp16-d128"), FP16, (64, 64), options=SPLIT, sinks=FP32),
    "cache sinks pages": Cache(("decode-bf16-d128-sink",), BF16, (128, 128), page=64, sinks=BF16),
    "cache sinks odd pages": Cache(("decode-paged-fp16-d256-sink",), FP16, (256, 256), page=7, sinks=FP16),
    "cache sinks queries": Cache(("extend-bf16-d64-sink", "combine-bf16-d128"), BF16, (64, 64), 19, SPLIT, sinks=FP32),
    "cache sinks whole odd pages": Cache(("fwd-paged-bf16-d64-sink",), BF16, (64, 64), 130, page=7, sinks=BF16),
    "cache d512": Cache(("decode-fp16-d512", "combine-fp16-d128"), FP16, (512, 512), options=SPLIT),
    "cache d512 pages append": Cache(("append-bf16-d64", "decode-bf16-d512"), BF16, (512, 512), page=64, new=True),
    "cache d512 odd pages": Cache(("decode-paged-bf16-d512",), BF16, (512, 512), page=7),
    "cache d192 v128": Cache(("decode-bf16-d256", "combine-bf16-d128"), BF16, (192, 128), options=SPLIT),
    "cache d64 v512": Cache(("decode-fp16-d512",), FP16, (64, 512)),
    "cache latent": Cache(("latent-fp16-d512", "combine-fp16-d128"), FP16, (576, 512), options=SPLIT, absorbed=True),
    "cache latent pages": Cache(("latent-bf16-d512",), BF16, (576, 512), page=64, absorbed=True),
    "cache latent odd pages": Cache(("latent-paged-bf16-d512",), BF16, (576, 512), page=7, absorbed=True),
    "cache latent queries": Cache(("latent-extend-bf16-d512",), BF16, (576, 512), 19, page=64, absorbed=True),
    "cache latent queries odd": Cache(("latent-extend-paged-fp16-d512",), FP16, (576, 512), 19, page=7, absorbed=True),
    "cache latent sinks": Cache(("latent-fp16-d512-any",), FP16, (576, 512), sinks=FP32, absorbed=True),
    "cache latent fp32": Cache(("latent-fp32-d512",), FP32, (576, 512), absorbed=True),
    "cache qv d64 v512": Cache(("latent-bf16-d512", "combine-bf16-d128"), BF16, (64, 512), options=SPLIT, second=True),
    "cache qv d64 v256": Cache(("latent-fp16-d512",), FP16, (64, 256), 3, page=64, second=True),
}  # fmt: skip


def _cache(case: Cache, target: str) -> None:
    torch.manual_seed(0)
    dim, dim_v = case.dims
    lengths, room = torch.tensor([83, 0, 40], dtype=torch.int32), 140
    q = torch.randn(3, case.queries, 4, dim).to(case.dtype)
    k = torch.randn(3, room, 2, dim).to(case.dtype)
    v = torch.randn(3, room, 2, dim_v).to(case.dtype)
    given: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "num_splits": 1, **case.options}
    if case.page:
        count = room // case.page
        k, v = (x[:, : count * case.page].reshape(3 * count, case.page, 2, -1) for x in (k, v))
        table = torch.arange(3 * count - 1, -1, -1, dtype=torch.int32).view(3, count)
        given["page_table" if case.second else "block_table"] = table
    if case.absorbed:
        v = k[..., :dim_v]
    if case.sinks is not None:
        given["s_aux"] = torch.randn(4).to(case.sinks)
    if case.second:
        given["qv"] = torch.randn(3, case.queries, 4, dim_v).to(case.dtype)
    new = [torch.randn(3, case.queries, 2, width).to(case.dtype) for width in case.dims] if case.new else []

    def results(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        wide = [x.to(dtype, copy=True) for x in (q, k, v, *new)]
        if case.absorbed:
            wide[2] = wide[1][..., :dim_v]
        if not case.second:
            return flash_attn_with_kvcache(*wide, return_softmax_lse=True, **given)
        options = given | {"qv": given["qv"].to(dtype)}
        return fa3.flash_attn_with_kvcache(*wide, return_softmax_lse=True, **options)[:2]

    with gpu.pretend(target) as launched:
        out, lse = results(case.dtype)
    exact, exact_lse = results(torch.float32)
    rough, _ = results(case.dtype)
    assert_close("lse", lse, exact_lse, tiny=3e-5)
    assert_close("out", out, exact, rough=rough, tiny=3e-5)
    assert launched == list(case.kernels)


CASES: dict[str, Dense | Cache] = DENSE | CACHES
# What is run always, and what the job of the long tests adds: each operation on one family or two.
OFTEN = {
    ("sinks d64", "gfx90a"), ("bias d64 lowest", "gfx90a"), ("cache sinks", "gfx908"), ("cache d512", "gfx1030"),
}  # fmt: skip
LONG = {
    ("bias d64", "gfx1100"), ("bias d96", "gfx950"), ("distances d64", "gfx1201"), ("distances d128", "gfx942"),
    ("d512", "gfx942"), ("d192 v128", "gfx950"), ("d128 v64", "gfx1201"), ("cache latent pages", "gfx90a"),
    ("cache latent queries", "gfx1201"), ("cache qv d64 v512", "gfx950"),
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-kernels")
        grid = [
            pytest.param(*case, id=f"{case[1]}-{case[0]}", marks=pytest.mark.long if case in LONG else ())
            for case in ((name, target) for target in TARGETS for name in CASES)
            if everything or case in OFTEN | LONG
        ]
        metafunc.parametrize(("name", "target"), grid)


def test_a_call(name: str, target: str) -> None:
    case = CASES[name]
    if isinstance(case, Dense):
        _dense(case, target)
    else:
        _cache(case, target)


def test_launched_kernels_exist_in_the_store() -> None:
    assert {(name, target) for name in CASES for target in TARGETS} >= OFTEN | LONG
