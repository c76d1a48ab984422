"""A forward with split keys, compared with the pure PyTorch backend, and the rule for when keys are split."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch
from assert_close import assert_close
from flash_attn.attention.backends import split_kv
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton as backend
from flash_attn.attention.backends.triton import attention as triton_attention
from flash_attn.call.calls import AttentionCall, GradientCall, attention_call
from flash_attn.kernels import planning, tuning

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def _small_tiles(fresh_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    if not GPU:
        monkeypatch.setattr(tuning, "config", lambda *_: tuning.Config(16, 16, 4, 1))


def _offsets(*lengths: int, before: int = 0) -> torch.Tensor:
    return torch.tensor([*itertools.accumulate(lengths, initial=before)], dtype=torch.int32, device=DEVICE)


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def _both(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: dict[str, Any], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both backends' out and lse agree, and the Triton backend's, which are returned, come in splits of the keys."""
    call = attention_call(q, k, v, softmax_scale=q.shape[-1] ** -0.5, **{"causal": True, **options, **lengths})
    with (
        mock.patch.object(planning, "SPLIT_KV", planning.SPLIT_KV._replace(least_keys=1)),
        mock.patch.object(split_kv, "are_faster", return_value=True),
        mock.patch.object(triton_attention, "attend_split", wraps=triton_attention.attend_split) as attend,
    ):
        result = backend.forward(call)
    assert attend.call_count == 1
    expected = oracle.forward(call)
    for name, one, other in zip(("out", "lse"), result, expected, strict=False):
        assert_close(name, one, other, tiny=2e-5)
    return result.out, result.softmax_lse


def _lengths(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, longest_q: int, longest_k: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k
    }  # fmt: skip


DENSE: dict[str, Any] = {}
OPTIONS = [
    {},
    {"causal": False},
    {"window_size": (30, -1)},
    {"causal": False, "window_size": (40, 5)},
    {"softcap": 3.0},
    {"alibi_slopes": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    if "alibi_slopes" in options:
        options = {"alibi_slopes": torch.rand(2, options["alibi_slopes"], device=DEVICE)}
    _both(_draw(2, 3, 4, 24), _draw(2, 117, 2, 24), _draw(2, 117, 2, 24), DENSE, **options)


def test_a_key_head_for_every_query_head() -> None:
    torch.manual_seed(1)
    k, v = _draw(2, 1, 96, 40).transpose(1, 2), _draw(2, 96, 3, 1, 40)[:, :, 1]
    _both(_draw(2, 2, 1, 40), k, v, DENSE)


@pytest.mark.parametrize("packed", [False, True])
def test_the_backward_follows_a_split_forward(packed: bool) -> None:
    torch.manual_seed(6)
    tensors = _draw(2, 3, 4, 24), _draw(2, 50, 2, 24), _draw(2, 50, 2, 24)
    lengths = DENSE
    if packed:
        tensors = _draw(6, 4, 24), _draw(100, 2, 24), _draw(100, 2, 24)
        lengths = _lengths(_offsets(3, 3), _offsets(42, 58), 3, 58)
    out, lse = _both(*tensors, lengths)
    dout = torch.randn_like(out)
    results = []
    for one in (backend, oracle):
        gradients = [torch.empty_like(x) for x in tensors]
        call = attention_call(*tensors, softmax_scale=24**-0.5, causal=True, **lengths)
        one.backward(GradientCall(call, dout, out, lse, *gradients))
        results.append(gradients)
    for name, result, expected in zip(("dq", "dk", "dv"), *results, strict=True):
        assert_close(name, result, expected, tiny=2e-5)


def test_more_rows_than_a_tile_of_the_decoding() -> None:
    torch.manual_seed(5)
    _both(_draw(2, 11, 4, 24), _draw(2, 117, 2, 24), _draw(2, 117, 2, 24), DENSE)
    lengths = _lengths(_offsets(11, 0, 7), _offsets(117, 20, 5), 11, 117)
    _both(_draw(18, 4, 24), _draw(142, 2, 24), _draw(142, 2, 24), lengths)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_packed(options: dict[str, Any]) -> None:
    """Sequences of unequal lengths, empty ones among them, and rows before and after all of them."""
    torch.manual_seed(2)
    cu_seqlens_q, cu_seqlens_k = _offsets(1, 0, 3, 2, 1, before=2), _offsets(117, 20, 5, 90, 0, before=3)
    q, k, v = _draw(11, 4, 24), _draw(240, 2, 24), _draw(240, 2, 24)
    _both(q, k, v, _lengths(cu_seqlens_q, cu_seqlens_k, 3, 117), **options)


def test_packed_with_padding() -> None:
    torch.manual_seed(3)
    used, pad = _offsets(100, -28, 11)[1:], _offsets(7, -7, 3)[1:]  # 100, 72, 83; 7, 0, 3
    lengths = _lengths(_offsets(1, 1, 2), _offsets(117, 80, 90), 2, 117) | {"seqused_k": used, "leftpad_k": pad}
    _both(_draw(4, 4, 24), _draw(287, 2, 24), _draw(287, 2, 24), lengths)


@pytest.mark.parametrize("page_size", [16, 7])
def test_pages(page_size: int) -> None:
    torch.manual_seed(4)
    table = torch.randperm(40, device=DEVICE)[:36].int().view(2, 18)
    k, v = _draw(40, page_size, 2, 24), _draw(40, page_size, 2, 24)
    lengths = _lengths(_offsets(2, 1), _offsets(117, 85), 2, 117) | {"block_table": table}
    _both(_draw(3, 4, 24), k, v, lengths)
    _both(_draw(3, 4, 24), k, v, lengths | {"seqused_k": _offsets(90, -57)[1:]})


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "heads", "heads_k", "head_dim", "faster"),
    [
        (1, 1, 4096, 32, 8, 128, True),
        (16, 1, 1024, 32, 8, 128, True),
        (64, 1, 4096, 64, 8, 64, True),
        (16, 1, 4096, 32, 32, 128, False),
        (64, 1, 1024, 32, 32, 128, False),
        (16, 16, 4096, 32, 8, 128, True),
        (1, 32, 4096, 32, 8, 128, True),
        (4, 32, 16384, 32, 8, 256, True),
        (4, 64, 4096, 32, 8, 128, False),
        (1, 64, 16384, 32, 32, 256, True),
        (1, 128, 16384, 32, 8, 128, True),
        (1, 256, 16384, 32, 8, 128, False),
        (1, 256, 4096, 64, 8, 256, False),
        (1, 1024, 1024, 8, 8, 64, False),
        (4, 4096, 4096, 16, 16, 128, False),
    ],
)
def test_when_splits_are_faster(
    batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_k: int, head_dim: int, faster: bool
) -> None:
    """As measured on an H200, of 132 multiprocessors."""
    block_m = 64 if head_dim <= 128 else 128
    assert split_kv.are_faster(batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, block_m, 132) is faster


def test_a_window_has_few_keys() -> None:
    q, k = torch.empty(1, 1, 32, 64, device=DEVICE), torch.empty(1, 8192, 8, 64, device=DEVICE)

    def cached(causal: bool, left: int, right: int) -> bool:
        gpu = mock.Mock(compute_units=132)
        with mock.patch.object(split_kv.device, "of", return_value=gpu):
            return (
                split_kv.as_cache_call(
                    64, attention_call(q, k, k, softmax_scale=1.0, causal=causal, window_size=(left, right))
                )
                is not None
            )

    assert cached(True, -1, -1)
    assert cached(False, 100, -1)
    assert cached(True, 4096, -1)
    assert not cached(True, 100, -1)
    assert not cached(False, 100, 100)


# A rule in whole numbers: a forward takes 1 for each 64 keys, splits take nothing but 1.5 to start.
_RULE = planning.SPLIT_KV._replace(
    whole=(planning.WholeCost(64, 1.0, 0.0, 0.0),), split=(planning.SplitCost(64, 0.0, 100.0),), start_whole=0.0,
    start_decode=1.5, start_extend=1.5, join=0.0, margin=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "changes", "faster"),
    [
        (1, 64, {}, False),
        (1, 65, {}, True),  # a part of 64 keys takes as long as all of them
        (16, 65, {}, True),
        (17, 65, {}, False),  # 17 rows are for the slower kernel
        (1, 64, {"whole": (planning.WholeCost(64, 1.0, 0.0, 300.0),)}, True),  # reading takes longer than a tile
        (1, 64, {"whole": (planning.WholeCost(64, 1.0, 300.0, 0.0),)}, True),
        (1, 65, {"join": 1000.0}, False),  # fewer programs than the GPU has places for
        (1, 65, {"join": 1000.0, "resident": 0}, True),
        (1, 65, {"start_decode": 2.0}, False),  # equally fast
    ],
)
def test_the_edges_of_the_rule(seqlen_q: int, seqlen_k: int, changes: dict[str, Any], faster: bool) -> None:
    rule = split_kv.are_faster.__wrapped__  # without what it remembers
    with mock.patch.object(planning, "SPLIT_KV", _RULE._replace(**changes)):
        assert rule(1, seqlen_q, seqlen_k, 1, 1, 64, 64, 100) is faster
        assert split_kv.is_few(seqlen_q, 2, 2) is (seqlen_q <= 16)


@pytest.mark.parametrize(
    ("causal", "window", "seen"),
    [
        (True, (100, -1), 103),
        (False, (100, 7), 110),
        (False, (100, -1), 8192),
        (True, (-1, -1), 8192),
        (True, (0, -1), 3),
    ],
)
def test_what_the_rule_is_asked(causal: bool, window: tuple[int, int], seen: int) -> None:
    """The keys that some query sees, the larger head dim, and the least gain, which is what splits cost the host."""
    q, k, v = (torch.empty(1, *shape, device=DEVICE) for shape in ((3, 32, 64), (8192, 8, 64), (8192, 8, 128)))
    call = attention_call(q, k, v, softmax_scale=1.0, causal=causal, window_size=window)
    with (
        mock.patch.object(split_kv.device, "of", return_value=mock.Mock(compute_units=132)),
        mock.patch.object(split_kv, "are_faster") as asked,
    ):
        split_kv.is_profitable(64, call)
        asked.assert_called_once_with(1, 3, seen, 32, 8, 128, 64, 132, 6.0)
        least = planning.SPLIT_KV.least_keys
        for keys in (least - 1, least):
            split_kv.is_profitable(64, attention_call(q, k[:, :keys], v[:, :keys], softmax_scale=1.0))
        assert [call.args[2] for call in asked.call_args_list[1:]] == [least]


def test_dropout_has_the_forward_kernel() -> None:
    q, k = _draw(1, 1, 2, 24), _draw(1, 600, 1, 24)
    rng_state = torch.tensor([1, 2], device=DEVICE)
    with mock.patch.object(split_kv, "are_faster") as asked:
        backend.forward(attention_call(q, k, k, softmax_scale=1.0, dropout_p=0.5, rng_state=rng_state))
    assert not asked.called


# Fields of a forward that a call over a cache has under another name, and fields of which a split forward has none.
RENAMED = {"k", "v", "max_seqlen_k", "max_seqlen_q", "leftpad_k", "seqused_k", "cu_seqlens_k"}
WITHOUT_SPLITS = {"descales", "return_softmax", "deterministic"}


def test_a_split_forward_keeps_each_field() -> None:
    """A field that is added to a forward must be kept, or be one that no split forward has. Options are one field."""
    same = {field.name for field in fields(AttentionCall)} - RENAMED - WITHOUT_SPLITS
    values: dict[str, Any] = {name: object() for name in same}
    values["q"] = torch.zeros(1, 2, 3, 4)
    call = AttentionCall(k=torch.zeros(1, 5, 3, 4), v=torch.zeros(1, 5, 3, 4), **values)
    call.cu_seqlens_q, call.max_seqlen_k = None, 7
    cached = split_kv.cache_call_of(call)
    assert (cached.max_seqlen_q, cached.max_seqlen_k) == (2, 7)
    assert {name for name in same if getattr(cached, name) is not getattr(call, name)} == set()


def test_sinks() -> None:
    sinks = torch.tensor([2.0, -1.0, 3.0, 0.5], device=DEVICE)
    q, k, v = _draw(2, 5, 4, 16), _draw(2, 100, 2, 16), _draw(2, 100, 2, 16)
    out, _ = _both(q, k, v, DENSE, s_aux=sinks)
    assert not torch.allclose(out, backend.forward(attention_call(q, k, v, softmax_scale=0.25, causal=True)).out)
