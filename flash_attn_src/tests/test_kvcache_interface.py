"""flash_attn_with_kvcache: its options against a plain reference, its errors, under torch.compile."""

from __future__ import annotations

from typing import Any
from unittest import mock

import flash_attn
import flash_attn_interface as fa3
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn.attention import backends
from small_calls import in_one_graph, offsets, qkv

torch.set_num_threads(2)

# Dynamo itself makes an instance of torch.autograd.Function, at which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


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
    "rotary, a window that ends at the query": {"new": 3, "rotary": False, "window": (-1, 0)},
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
        order = offsets(3, 0, 2)
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
        cache_seqlens=offsets(*lengths),
        cache_batch_idx=order,
        cache_leftpad=offsets(*leftpads) if any(leftpads) else None,
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
    q, k, v = qkv()
    whole = flash_attn.flash_attn_with_kvcache(q, k, v)
    assert_close("whole", whole, flash_attn.flash_attn_func(q, k, v), tiny=1e-6)
    part = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4)
    assert_close("part", part, flash_attn.flash_attn_func(q, k[:, :4], v[:, :4]), tiny=1e-6)
    assert flash_attn.flash_attn_with_kvcache(q.requires_grad_(), k, v).grad_fn is None


def test_packed_new_keys_count_by_sequence() -> None:
    """There are four, more than a sequence has room for, and each gets two."""
    q, k, v = qkv()
    caches = [torch.cat((x[:, :4], torch.zeros_like(x[:, :2])), 1) for x in (k, v)]
    new = [x[:, 4:6].flatten(0, 1) for x in (k, v)]
    options = {"cache_seqlens": 4, "cu_seqlens_k_new": offsets(0, 2, 4)}
    out = fa3.flash_attn_with_kvcache(q, *caches, *new, **options)
    assert_close("out", out, flash_attn.flash_attn_func(q, k[:, :6], v[:, :6]), tiny=1e-6)
    with pytest.raises(ValueError, match="k: got 4 heads, wanted 2 as k_cache has"):
        fa3.flash_attn_with_kvcache(q, *caches, q[0], q[0], **options)


@pytest.mark.parametrize("cache_seqlens", [4, offsets(3, 5)], ids=["int", "tensor"])
def test_kvcache_compiles_into_one_graph(cache_seqlens: int | torch.Tensor) -> None:
    q, k, v = qkv()
    new = q[:, :2, :2].contiguous()

    def call(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Any:
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, new, new, cache_seqlens=cache_seqlens, causal=True, return_softmax_lse=True
        )

    eager, compiled = [k.clone(), v.clone()], [k.clone(), v.clone()]
    expected = call(*eager)
    torch._dynamo.reset()
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(*compiled)
    assert all(map(torch.equal, [*got, *compiled], [*expected, *eager]))


_INDEX = torch.zeros(2, dtype=torch.int32)
KVCACHE_ERRORS = {
    "q type": ({"q": 3, "cache_seqlens": 4}, TypeError, "q: got int"),
    "q rank": ({"q": torch.zeros(()), "cache_seqlens": 4}, ValueError, r"q: got shape \(\)"),
    "only k": ({"k": torch.zeros(2, 1, 2, 16), "cache_seqlens": 4}, ValueError, "k, v: got only one"),
    "only v": ({"v": torch.zeros(2, 1, 2, 16), "cache_seqlens": 4}, ValueError, "k, v: got only one"),
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
    "length stride": ({"cache_seqlens": _INDEX.repeat(2)[::2]}, ValueError, "cache_seqlens: got stride 2"),
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
    q, k, v = qkv()
    arguments = {"q": q[:, :1], "k_cache": k, "v_cache": v, **change}
    with pytest.raises(error, match=match):
        flash_attn.flash_attn_with_kvcache(**arguments)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", ["length", "negative length", "too long", "rotary too short"])
def test_lengths_that_the_host_knows_are_checked_before_any_backend(case: str, compiled: bool) -> None:
    asked = mock.Mock()
    change, error, match = KVCACHE_ERRORS[case]
    q, k, v = qkv()
    arguments = {"q": q[:, :1], "k_cache": k, "v_cache": v, **change}
    call = in_one_graph(flash_attn.flash_attn_with_kvcache) if compiled else flash_attn.flash_attn_with_kvcache
    with backends.using(asked), pytest.raises(error, match=match):
        call(**arguments)
    assert not asked.mock_calls


_NEW = {"k": torch.ones(3, 1, 2, 16), "v": torch.ones(3, 1, 2, 16)}
_TURNED = {**_NEW, "rotary_cos": torch.ones(7, 8), "rotary_sin": torch.ones(7, 8)}
LATE_ERRORS = {
    # what is wrong with the last of three sequences
    "length": ({**_NEW, "cache_seqlens": [5, 5, 41]}, "cache_seqlens: got 41 at index 2, wanted 0 to 7"),
    "leftpad": ({"cache_seqlens": [5, 5, 5], "cache_leftpad": [0, 0, 6]}, "cache_leftpad: got 6 at index 2"),
    "line": ({"cache_seqlens": [5, 5, 5], "cache_batch_idx": [0, 1, 6]}, "cache_batch_idx: got 6 at index 2"),
    "angle": ({**_TURNED, "cache_seqlens": [5, 5, 7]}, "rotary_cos: got 7 places, wanted 8 or more"),
    "page": (
        {**_NEW, "cache_seqlens": [5, 5, 5], "block_table": [[0, 1], [2, 3], [4, 6]]},
        r"block_table: got 6 at index \(2, 1\), wanted 0 to 5",
    ),
}


@pytest.mark.parametrize("case", LATE_ERRORS)
def test_nothing_is_written_when_the_last_sequence_is_wrong(case: str) -> None:
    """The error names the index of what is wrong."""
    change, match = LATE_ERRORS[case]
    change = {name: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x for name, x in change.items()}
    caches = [torch.zeros(6, 4 if "block_table" in change else 8, 2, 16) for _ in range(2)]
    if "block_table" not in change and "cache_batch_idx" not in change:
        caches = [cache[:3] for cache in caches]
    with pytest.raises(ValueError, match=match):
        flash_attn.flash_attn_with_kvcache(torch.ones(3, 1, 4, 16), *caches, **change)
    assert not any(cache.any() for cache in caches)


def test_a_negative_place_of_rotary_embedding_is_no_place() -> None:
    cos, sin = _tables(9, 16)
    q, k, v = qkv()
    with pytest.raises(ValueError, match="rotary_seqlens: got -1 at index 1, wanted 0 to 9"):
        fa3.flash_attn_with_kvcache(
            q[:, :1], k, v, k[:, :1], v[:, :1], rotary_cos=cos, rotary_sin=sin, cache_seqlens=4,
            rotary_seqlens=torch.tensor([0, -1], dtype=torch.int32),
        )  # fmt: skip


@pytest.mark.parametrize("wide", [1 << 29, (1 << 31) - 1, 1 << 40])
def test_kvcache_takes_windows_of_any_width(wide: int) -> None:
    q, k, v = qkv()
    for more in ({}, {"alibi_slopes": torch.rand(4)}):

        def call(*window: int, more: dict[str, Any] = more) -> torch.Tensor:
            return flash_attn.flash_attn_with_kvcache(q, k, v, window_size=window, **more)

        assert torch.equal(call(wide, wide), call(-1, -1))
        assert torch.equal(call(wide, 2), call(-1, 2))
        assert torch.equal(in_one_graph(call)(2, wide), call(2, -1))
