"""The kernels for a cache of keys and values against the pure PyTorch backend: every option, every pair of them."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import flash_attn
import pytest
import torch
from assert_close import assert_close
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton as backend
from flash_attn.attention.backends.triton import cache as triton_cache
from flash_attn.attention.backends.triton import decode as triton_decode
from flash_attn.attention.backends.triton import kernels as triton_kernels
from flash_attn.call.calls import cache_call, replace
from flash_attn.kernels import flags, planning, splits, tuning, variants

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DEVICE_INDEX = 0 if GPU else -1
BATCH, CAPACITY = 2, 112
LENGTHS = [61, 24]


@pytest.fixture(autouse=True)
def _small_tiles(
    fresh_kernels: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Tiles so small that short sequences span several; block_k: the head dim in pieces."""
    if GPU:
        return
    block_k = getattr(request, "param", 0)
    real = tuning.config

    def config(target: str, variant: variants.Variant) -> tuning.Config:
        if variant.operation.tuning == "layers":
            return real(target, variant)
        if variant.operation.in_pieces:
            return real(target, variant)._replace(block_n=4)
        return tuning.Config(32 if "extend" in variant.op else 16, 32, 4, 1, block_k=block_k)

    monkeypatch.setattr(tuning, "config", config)


# The names of all options. _call converts a name to arguments.
OPTIONS = (
    "append", "rotary", "rotary halves", "rotary_seqlens", "causal", "window", "softcap", "alibi", "leftpad",
    "lines", "pages of 32", "pages of 16", "pages of 48", "pages of 7", "splits", "chunk", "varlen q", "varlen k",
    "many queries", "whole keys", "int length", "whole cache",
)  # fmt: skip
CONFLICTS = [
    {"rotary", "rotary halves"},
    {"lines", "pages of 32", "pages of 16", "pages of 48", "pages of 7"},
    {"int length", "whole cache"},
    {"append", "whole cache"},
    {"rotary", "whole cache"},
    {"rotary halves", "whole cache"},
    {"rotary_seqlens", "whole cache"},
    {"varlen k", "whole cache"},
]
PAIRS = [
    pair
    for pair in itertools.combinations(OPTIONS, 2)
    if "pages of 48" not in pair and not any(len(conflict.intersection(pair)) > 1 for conflict in CONFLICTS)
]


def _call(
    chosen: tuple[str, ...], dtype: torch.dtype, dim: int, heads: int, heads_k: int, dim_v: int | None = None
) -> None:
    """Both backends under the chosen options; out, lse and both caches have to agree."""
    generator = torch.Generator().manual_seed(len("".join(chosen)) + dim)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    def index(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    widths = {"k": dim, "v": dim_v or dim}
    rotary = {"rotary", "rotary halves", "rotary_seqlens"}.intersection(chosen)
    seqlen_q = 13 if "many queries" in chosen else 37 if "whole keys" in chosen else 3
    seqlen_new = 3 if rotary or {"append", "varlen k"}.intersection(chosen) else 0
    pages = next((int(option.split()[-1]) for option in chosen if option.startswith("pages")), 0)
    options: dict[str, Any] = {
        "softmax_scale": dim**-0.5, "cache_seqlens": index(*LENGTHS), "causal": "causal" in chosen,
        "rotary_interleaved": "rotary halves" not in chosen, "num_splits": 1,
    }  # fmt: skip
    q = draw(BATCH, seqlen_q, heads, dim)
    if "varlen q" in chosen:
        q = draw(seqlen_q + 4, heads, dim)
        options |= {"cu_seqlens_q": index(0, 2, 2 + seqlen_q), "max_seqlen_q": seqlen_q}
    new: dict[str, torch.Tensor] = {}
    if "second query" in chosen:
        new = {"qv": draw(*q.shape[:-1], widths["v"])}
    if seqlen_new:
        new |= {name: draw(BATCH, seqlen_new, heads_k, wide) for name, wide in widths.items()}
    if "varlen k" in chosen:
        new |= {name: draw(5, heads_k, wide) for name, wide in widths.items()}
        options["cu_seqlens_k_new"] = index(0, 4, 5)
    tables: dict[str, torch.Tensor] = {}
    if rotary:
        angles = torch.rand(CAPACITY + 40, dim // 4, generator=generator) * 6
        tables = {"rotary_cos": angles.cos().to(DEVICE, dtype), "rotary_sin": angles.sin().to(DEVICE, dtype)}
    if "rotary_seqlens" in chosen:
        options["rotary_seqlens"] = index(5, 31)
    if "window" in chosen:
        options["window_size"] = (20, 1)
    if "softcap" in chosen:
        options["softcap"] = 2.0
    if "alibi" in chosen:
        options["alibi_slopes"] = torch.rand(BATCH, heads, generator=generator).to(DEVICE)
    if "leftpad" in chosen:
        options["cache_leftpad"] = index(19, 3)
    if "splits" in chosen:
        options["num_splits"] = 3
    if "chunk" in chosen:
        options["attention_chunk"] = 23
    if "int length" in chosen:
        options["cache_seqlens"] = 50
    if "whole cache" in chosen:
        options["cache_seqlens"] = None
    shape = (BATCH, CAPACITY, heads_k)
    if "lines" in chosen:
        shape = (4, CAPACITY, heads_k)
        options["cache_batch_idx"] = index(3, 1)
    if pages:
        count = -(-CAPACITY // pages)
        shape = (BATCH * count + 1, pages, heads_k)
        order = torch.randperm(BATCH * count + 1, generator=generator)[:-1]
        options["block_table"] = order.view(BATCH, count).int().to(DEVICE)
    caches = [draw(*shape, wide) for wide in widths.values()]

    def run(function: Any, compute: torch.dtype) -> list[torch.Tensor]:
        copies = [cache.to(compute, copy=True) for cache in caches]
        tensors = {name: x.to(compute) for name, x in (new | tables).items()}
        out, lse = function(cache_call(q.to(compute), *copies, **tensors, **options))
        return [out, lse, *copies]

    # If many queries keep the GPU busy, the kernel of attention without a cache serves them.
    with mock.patch.object(triton_cache, "are_faster", return_value="whole keys" not in chosen):
        got = run(backend.kvcache, dtype)
    exact = run(oracle.kvcache, torch.float32)
    rough = exact if dtype is torch.float32 else run(oracle.kvcache, dtype)
    for name, value, best, worse in zip(("out", "lse", "k_cache", "v_cache"), got, exact, rough, strict=True):
        assert_close(name, value, best, rough=worse, tiny=2e-5)


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_pairs_of_options(pair: tuple[str, ...]) -> None:
    _call(pair, torch.float32, 24, 4, 2)


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "whole cache"])
def test_half_precision(option: str) -> None:
    _call((option, "append"), torch.float16, 64, 6, 2)


@pytest.mark.parametrize(("heads", "heads_k"), [(4, 4), (5, 1), (40, 2)])
@pytest.mark.parametrize("option", ["splits", "rotary", "many queries"])
def test_grouped_heads(heads: int, heads_k: int, option: str) -> None:
    """Up to more rows a key head than a tile holds."""
    _call((option, "causal", "append"), torch.float32, 16, heads, heads_k)


@pytest.mark.parametrize("dim", [8, 20, 136])
@pytest.mark.parametrize("option", ["rotary", "pages of 32", "pages of 16"])
def test_head_dims(dim: int, option: str) -> None:
    """Also one that is no multiple of 8: the caches still change in place."""
    _call((option, "append", "splits"), torch.float32, dim, 2, 1)


@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (24, 40), (20, 12), (64, 512)])
@pytest.mark.parametrize("option", ["rotary", "pages of 32", "pages of 7", "many queries"])
def test_values_with_a_head_dim_of_their_own(dim: int, dim_v: int, option: str) -> None:
    _call((option, "append", "splits", "causal"), torch.float32, dim, 4, 2, dim_v)


@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (40, 24)])
def test_many_queries_of_values_with_a_head_dim_of_their_own(dim: int, dim_v: int) -> None:
    """The forward kernel serves the pair that it has. The split kernels serve every other pair without a copy."""
    _call(("pages of 32", "append", "whole keys", "causal"), torch.float32, dim, 4, 2, dim_v)


@pytest.mark.parametrize(
    ("options", "heads", "dim", "dim_v"),
    [
        (("append", "splits", "causal"), 16, 64, 512), (("pages of 32", "rotary", "many queries"), 4, 24, 40),
        (("pages of 7", "append", "splits"), 4, 20, 12), (("varlen q", "softcap", "window"), 4, 16, 24),
    ],
    ids=str,
)  # fmt: skip
def test_a_second_query(options: tuple[str, ...], heads: int, dim: int, dim_v: int) -> None:
    """Multi-head latent attention: the values are keys, too."""
    _call((*options, "second query"), torch.float32, dim, heads, 1, dim_v)


@pytest.mark.parametrize("_small_tiles", [16], indirect=True)
def test_a_second_query_in_pieces() -> None:
    _call(("pages of 32", "causal", "second query"), torch.float32, 64, 4, 2, 48)


@pytest.mark.parametrize("paged", [False, True])
def test_the_absorbed_form(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache of 576 columns, whose first 512 are the values: the kernel of a second query reads it once."""
    asked: list[str] = []
    monkeypatch.setattr(triton_decode, "find_one", lambda *key: asked.append(key[0]) or triton_kernels.find_one(*key))
    generator = torch.Generator().manual_seed(3)
    cache, table = torch.randn(6, 32, 1, 576, generator=generator), None
    if paged:
        table = torch.tensor([[3, 1, 0], [5, 4, 2]], dtype=torch.int32)
    else:
        cache = cache.view(2, 96, 1, 576)
    q, k = torch.randn(2, 1, 16, 576, generator=generator), torch.randn(2, 5, 1, 576, generator=generator)
    lengths = torch.tensor([60, 50], dtype=torch.int32, device=DEVICE)
    results = []
    for place in (backend, oracle):
        copy, new = cache.to(DEVICE, copy=True), k.to(DEVICE)
        with backends.using(place):
            out = flash_attn.flash_attn_with_kvcache(
                q.to(DEVICE), copy, copy[..., :512], new, new[..., :512], cache_seqlens=lengths,
                block_table=None if table is None else table.to(DEVICE), num_splits=2,
            )  # fmt: skip
        results.append((out, copy))
    assert asked == ["latent", "combine"]
    for got, expected in zip(*results, strict=True):
        assert_close("absorbed", got, expected, tiny=2e-5)


@pytest.mark.parametrize("_small_tiles", [16], indirect=True)
@pytest.mark.parametrize("option", ["append", "pages of 32", "pages of 16", "many queries"])
def test_head_dim_in_pieces(option: str) -> None:
    _call((option, "causal"), torch.float32, 40, 4, 2)


@pytest.mark.parametrize(
    "options",
    [
        ("varlen k", "int length"), ("varlen k", "leftpad", "alibi"), ("lines", "append", "window"),
        ("pages of 7", "append", "leftpad"), ("varlen q", "pages of 48", "rotary", "softcap"),
    ],
    ids=" + ".join,
)  # fmt: skip
def test_many_queries_leave_the_keys_whole(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_cache, "attend_split", lambda *_: pytest.fail("the keys were split"))
    _call((*options, "whole keys", "causal"), torch.float32, 24, 4, 2)


@pytest.mark.parametrize("queries", [4, 70])
def test_nothing_is_written_outside_of_the_cache(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a length that only the device knows exceeds the cache, the kernels drop the excess keys.

    out is attention to the other keys.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(triton_cache, "are_faster", lambda *_: False)
    caches = [torch.randn(3, 32, 1, 16, device=DEVICE) for _ in range(2)]
    q = torch.randn(3, queries, 1, 16, device=DEVICE)
    k, v = (torch.randn(3, 4, 1, 16, device=DEVICE) for _ in range(2))
    before = [cache.clone() for cache in caches]
    lengths = torch.tensor([30, -2, 40], dtype=torch.int32, device=DEVICE)
    splits = 2 if queries == 4 else 0
    out, _ = backend.kvcache(
        cache_call(q, *caches, softmax_scale=0.25, k=k, v=v, cache_seqlens=lengths, num_splits=splits)
    )
    for cache, old, new in zip(caches, before, (k, v), strict=True):
        assert torch.equal(cache[0], torch.cat([old[0, :30], new[0, :2]]))
        assert torch.equal(cache[1], torch.cat([new[1, 2:], old[1, 2:]]))
        assert torch.equal(cache[2], old[2])
    whole, _ = oracle.kvcache(
        cache_call(q[::2], *(cache[::2] for cache in caches), softmax_scale=0.25, cache_seqlens=32)
    )
    assert_close("out", out[::2], whole, tiny=1e-5)


def test_caches_with_gaps_are_written_in_place() -> None:
    """Rows that do not start on 16 bytes, and heads before keys."""
    torch.manual_seed(1)
    odd = [torch.randn(2, 32, 2, 17, device=DEVICE)[..., 1:] for _ in range(2)]
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in odd]
    q, k, v = (torch.randn(2, 3, 2, 16, device=DEVICE) for _ in range(3))
    given = {"k": k, "v": v, "cache_seqlens": 20, "causal": True}
    wanted_caches = [x.contiguous() for x in odd]
    expected, _ = oracle.kvcache(cache_call(q, *wanted_caches, softmax_scale=0.25, **given))
    for caches in (odd, swapped):
        out, _ = backend.kvcache(cache_call(q, *caches, softmax_scale=0.25, **given))
        assert_close("out", out, expected, tiny=1e-5)
        assert all(map(torch.equal, caches, wanted_caches))


def test_tensors_that_do_not_fit_are_refused() -> None:
    q = torch.zeros(1, 1, 1, 16, device=DEVICE)
    cache = torch.zeros(1, 32, 1, 16, device=DEVICE)
    table = torch.zeros(8, 8, device=DEVICE)
    call = cache_call(
        q, cache, cache, softmax_scale=1.0, k=q, v=q, rotary_cos=table, rotary_sin=table, cache_seqlens=9, causal=True
    )
    with pytest.raises(ValueError, match="rotary_cos: got 8 places, wanted at least 10"):
        backend.kvcache(call)
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="rotary_cos: got 8 places, wanted at least 32"):
        backend.kvcache(replace(call, cache_seqlens=lengths))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return backend.kvcache(cache_call(q, k, v, softmax_scale=0.25, **{"causal": True, "num_splits": 1, **options}))


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("tensor", ["q", "k"])
def test_nan_comes_out_however_the_keys_are_split(tensor: str, splits: int) -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, length, 1, 16, device=DEVICE) for length in (1, 200, 200))
    {"q": q, "k": k}[tensor][0, -1, 0, 3] = torch.nan
    out, lse = _attend(q, k, v, num_splits=splits)
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("window", [(-1, 2**31 - 1), (2**31 - 1, 0), (5, 2**40)], ids=str)
def test_a_window_wider_than_any_cache(window: tuple[int, int], queries: int) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, length, 1, 16, device=DEVICE) for length in (queries, 33, 33))
    result = _attend(q, k, v, causal=False, window_size=window)
    expected = _attend(q, k, v, causal=False, window_size=tuple(-1 if size > 33 else size for size in window))
    assert all(map(torch.equal, result, expected))


@pytest.mark.parametrize("queries", [1, 40])
def test_a_cache_without_room(queries: int) -> None:
    q = torch.ones(2, queries, 2, 16, device=DEVICE)
    out, lse = _attend(q, *[torch.empty(2, 0, 2, 16, device=DEVICE)] * 2)
    assert (out == 0).all()
    assert (lse == torch.inf).all()


@pytest.mark.skipif(GPU, reason="takes gigabytes of addresses, which a GPU would have to back with memory")
@pytest.mark.parametrize(("rows", "queries"), [(264, 8), (2, 264)], ids=["keys", "queries"])
def test_offsets_beyond_32_bits(rows: int, queries: int) -> None:
    """Rows as far apart as the kernels take them without a copy: the last one lies beyond 2^31 elements."""
    stride = (flags.MAX_ROW_STRIDE - 1) * 8
    torch.manual_seed(4)

    def spread(length: int, heads: int) -> torch.Tensor:
        storage = torch.empty((length - 1) * stride + 64, dtype=torch.float16)
        return storage.as_strided((1, length, heads, 16), (0, stride, 16, 1)).copy_(torch.randn(1, length, heads, 16))

    tensors = spread(queries, 4), spread(rows, 1), spread(rows, 1)
    result = _attend(*tensors)
    expected = _attend(*(tensor.contiguous() for tensor in tensors))
    assert all(map(torch.equal, result, expected))


@pytest.mark.parametrize(
    ("parts", "seqlen", "dim", "kind"), [(3, 5, 136, "plain"), (20, 5, 136, "wide"), (20, 130, 40, "plain")]
)
def test_parts_are_joined(parts: int, seqlen: int, dim: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts of few rows by a kernel of their own; parts without keys hold anything."""
    torch.manual_seed(5)
    asked = []
    monkeypatch.setattr(triton_decode, "find_one", lambda *key: asked.append(key[-1]) or triton_kernels.find_one(*key))
    partial = torch.randn(parts, 2, seqlen, 1, dim, device=DEVICE)
    lse = torch.randn(parts, 2, 1, seqlen, device=DEVICE).transpose(2, 3) * 4
    lse[1, 0] = lse[:, 1, 2] = -torch.inf
    partial[1, 0] = torch.nan
    outs = [torch.empty(2, seqlen, 1, dim, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    result, expected = (one.combine(partial, lse, out) for one, out in zip((backend, oracle), outs, strict=True))
    assert asked == [kind]
    assert_close("out", *outs, tiny=1e-3)
    assert_close("lse", result, expected, tiny=1e-5)


@pytest.mark.parametrize("units", [80, 132, 304])
def test_splits_fill_the_machine_and_no_more(units: int) -> None:
    for programs, blocks in itertools.product([1, 4, 8, 32, 512, 4096], [0, 1, 2, 7, 64, 2048]):
        count = splits.profitable_splits(programs, blocks, units, 16)
        assert 1 <= count <= max(blocks, 1)
        if programs >= 8 * units:
            assert count <= 4
        if programs < units:
            assert programs * count >= min(units, programs * blocks / 2) / 2


def test_num_splits_accounts_for_the_cost_of_combining() -> None:
    calls = {
        (1, 0, 304, 16): 1,
        (1, 4, 304, 16): 1,  # as long as the launch of the combining kernel
        (1, 8, 304, 16): 8,
        (8, 64, 132, 16): 32,
        (4, 64, 132, 4096): 3,  # the parts of many rows
        (300, 32, 132, 16): 4,
        (512, 64, 304, 16): 1,
        (1, 2048, 304, 16): 256,
        (1, 8192, 2048, 1): planning.SPLIT_KV.max_splits,
    }
    assert {call: splits.profitable_splits(*call) for call in calls} == calls
