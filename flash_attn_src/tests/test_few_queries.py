"""Few queries of many keys, which the kernels of a cache serve: against the pure PyTorch backend."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from assert_close import assert_close
from flash_attn.backends import few_queries, triton_attention, triton_kernels
from flash_attn.backends import torch as oracle
from flash_attn.backends import triton as backend
from flash_attn.kernels import decode_tuning
from flash_attn.runtime import launch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KEYS = 80

# numpy warns where the interpreter computes what a GPU computes silently: log2(0), exp2 of something large.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _from_few_keys_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_queries, "_KEYS", KEYS)
    if not GPU:
        monkeypatch.setattr(decode_tuning, "config", lambda *_: decode_tuning.Config(16, 16, 4, 1))
        monkeypatch.setattr(launch, "_kernels", {})
        monkeypatch.setattr(triton_kernels, "_kernels", {})


def _offsets(*lengths: int, before: int = 0) -> torch.Tensor:
    return torch.tensor([*itertools.accumulate(lengths, initial=before)], dtype=torch.int32, device=DEVICE)


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def _both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[Any, ...], **options: Any) -> None:
    """Both backends' out and lse agree, and the Triton backend's come in parts of the keys. lengths: cu_seqlens_q,
    cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table."""
    chosen = {"causal": True, "left": -1, "right": -1, "softcap": 0.0, "slopes": None} | options
    arguments = (None, q.shape[-1] ** -0.5, *chosen.values(), 0.0, False, None, *lengths)
    with mock.patch.object(triton_attention, "attend_in_parts", wraps=triton_attention.attend_in_parts) as parts:
        found = backend.forward(q, k, v, *arguments)
    assert parts.call_count == 1
    wanted = oracle.forward(q, k, v, *arguments)
    for name, one, other in zip(("out", "lse"), found, wanted, strict=False):
        assert_close(name, one, other, tiny=2e-5)


DENSE = (None, None, 0, 0, None, None, None)
OPTIONS = [
    {},
    {"causal": False},
    {"left": 30},
    {"causal": False, "left": 40, "right": 5},
    {"softcap": 3.0},
    {"slopes": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    if "slopes" in options:
        options = {"slopes": torch.rand(2, options["slopes"], device=DEVICE)}
    _both(_draw(2, 3, 4, 24), _draw(2, 117, 2, 24), _draw(2, 117, 2, 24), DENSE, **options)


def test_a_key_head_for_every_query_head() -> None:
    torch.manual_seed(1)
    k, v = _draw(2, 1, 96, 40).transpose(1, 2), _draw(2, 96, 3, 1, 40)[:, :, 1]
    with mock.patch.object(few_queries, "compute_units", return_value=4):
        _both(_draw(2, 2, 1, 40), k, v, DENSE)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_packed(options: dict[str, Any]) -> None:
    """Sequences of unequal lengths, empty ones among them, and rows before and after all of them."""
    torch.manual_seed(2)
    cu_seqlens_q, cu_seqlens_k = _offsets(1, 0, 3, 2, 1, before=2), _offsets(117, 20, 5, 90, 0, before=3)
    q, k, v = _draw(11, 4, 24), _draw(240, 2, 24), _draw(240, 2, 24)
    _both(q, k, v, (cu_seqlens_q, cu_seqlens_k, 3, 117, None, None, None), **options)


def test_packed_with_padding() -> None:
    torch.manual_seed(3)
    used, pad = _offsets(100, -28, 11)[1:], _offsets(7, -7, 3)[1:]  # 100, 72, 83; 7, 0, 3
    lengths = (_offsets(1, 1, 2), _offsets(117, 80, 90), 2, 117, used, pad, None)
    _both(_draw(4, 4, 24), _draw(287, 2, 24), _draw(287, 2, 24), lengths)


@pytest.mark.parametrize("page_size", [16, 7])
def test_pages(page_size: int) -> None:
    torch.manual_seed(4)
    table = torch.randperm(40, device=DEVICE)[:36].int().view(2, 18)
    k, v = _draw(40, page_size, 2, 24), _draw(40, page_size, 2, 24)
    lengths = (_offsets(2, 1), _offsets(117, 85), 2, 117)
    _both(_draw(3, 4, 24), k, v, (*lengths, None, None, table))
    _both(_draw(3, 4, 24), k, v, (*lengths, _offsets(90, -57)[1:], None, table))


def test_what_is_few() -> None:
    def few(batch: int, seqlen_q: int, heads: int, heads_k: int, seqlen_k: int) -> bool:
        q, k = torch.empty(batch, seqlen_q, heads, 8), torch.empty(batch, 0, heads_k, 8)
        with mock.patch.object(few_queries, "compute_units", return_value=100):
            return few_queries.are_few(q, k, batch, seqlen_q, seqlen_k)

    assert few(1, 1, 32, 8, KEYS)
    assert not few(1, 1, 32, 8, KEYS - 1)
    assert few(64, 4, 32, 8, KEYS)
    assert not few(64, 5, 32, 8, KEYS)
    assert few(3, 16, 32, 32, KEYS)
    assert not few(4, 1, 32, 32, KEYS)


def test_dropout_has_the_forward_kernel() -> None:
    q, k = _draw(1, 1, 2, 24), _draw(1, KEYS, 1, 24)
    rng_state = torch.tensor([1, 2], device=DEVICE)
    with mock.patch.object(triton_attention, "attend_in_parts") as parts:
        backend.forward(q, k, k, None, 1.0, False, -1, -1, 0.0, None, 0.5, False, rng_state, *DENSE)
    assert not parts.called
