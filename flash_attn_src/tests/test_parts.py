"""A forward in parts of the keys, by the kernels of a cache, against the pure PyTorch backend; and when it is one."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from assert_close import assert_close
from flash_attn.backends import split_kv as parts
from flash_attn.backends import torch as oracle
from flash_attn.backends import triton as backend
from flash_attn.backends.triton import attention as triton_attention
from flash_attn.backends.triton import kernels as triton_kernels
from flash_attn.kernels import tuning
from flash_attn.runtime import launch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(tuning, "config", lambda *_: tuning.Config(16, 16, 4, 1))
        monkeypatch.setattr(launch, "_kernels", {})
        monkeypatch.setattr(triton_kernels, "_kernels", {})


def _offsets(*lengths: int, before: int = 0) -> torch.Tensor:
    return torch.tensor([*itertools.accumulate(lengths, initial=before)], dtype=torch.int32, device=DEVICE)


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def _both(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[Any, ...], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both backends' out and lse agree, and the Triton backend's, which are returned, come in parts of the keys.
    lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table."""
    chosen = {"causal": True, "left": -1, "right": -1, "softcap": 0.0, "slopes": None} | options
    arguments = (None, q.shape[-1] ** -0.5, *chosen.values(), 0.0, False, None, *lengths)
    with (
        mock.patch.object(parts, "_LEAST_KEYS", 1),
        mock.patch.object(parts, "are_faster", return_value=True),
        mock.patch.object(triton_attention, "attend_in_parts", wraps=triton_attention.attend_in_parts) as attend,
    ):
        found = backend.forward(q, k, v, *arguments)
    assert attend.call_count == 1
    wanted = oracle.forward(q, k, v, *arguments)
    for name, one, other in zip(("out", "lse"), found, wanted, strict=False):
        assert_close(name, one, other, tiny=2e-5)
    return found[:2]


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
    _both(_draw(2, 2, 1, 40), k, v, DENSE)


@pytest.mark.parametrize("packed", [False, True])
def test_the_backward_goes_on_from_it(packed: bool) -> None:
    torch.manual_seed(6)
    tensors = _draw(2, 3, 4, 24), _draw(2, 50, 2, 24), _draw(2, 50, 2, 24)
    lengths: tuple[Any, ...] = (None, None, 0, 0)
    if packed:
        tensors = _draw(6, 4, 24), _draw(100, 2, 24), _draw(100, 2, 24)
        lengths = (_offsets(3, 3), _offsets(42, 58), 3, 58)
    out, lse = _both(*tensors, (*lengths, None, None, None))
    dout = torch.randn_like(out)
    results = []
    for one in (backend, oracle):
        gradients = [torch.empty_like(x) for x in tensors]
        one.backward(
            dout, *tensors, out, lse, *gradients, 24**-0.5, True, -1, -1, 0.0, None, 0.0, False, None, *lengths
        )
        results.append(gradients)
    for name, found, wanted in zip(("dq", "dk", "dv"), *results, strict=True):
        assert_close(name, found, wanted, tiny=2e-5)


def test_more_rows_than_a_tile_of_the_decoding() -> None:
    torch.manual_seed(5)
    _both(_draw(2, 11, 4, 24), _draw(2, 117, 2, 24), _draw(2, 117, 2, 24), DENSE)
    lengths = (_offsets(11, 0, 7), _offsets(117, 20, 5), 11, 117, None, None, None)
    _both(_draw(18, 4, 24), _draw(142, 2, 24), _draw(142, 2, 24), lengths)


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
def test_when_parts_are_faster(
    batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_k: int, head_dim: int, faster: bool
) -> None:
    """As measured on an H200, of 132 multiprocessors."""
    block_m = 64 if head_dim <= 128 else 128
    assert parts.are_faster(batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, block_m, 132) is faster


def test_a_window_has_few_keys() -> None:
    q, k = torch.empty(1, 1, 32, 64, device=DEVICE), torch.empty(1, 8192, 8, 64, device=DEVICE)

    def cached(causal: bool, left: int, right: int) -> bool:
        arguments = (64, q, k, k, None, 1.0, causal, left, right, 0.0, None, *DENSE)
        with mock.patch.object(parts, "compute_units", return_value=132):
            return parts.as_cache_call(*arguments) is not None

    assert cached(True, -1, -1)
    assert cached(False, 100, -1)
    assert cached(True, 4096, -1)
    assert not cached(True, 100, -1)
    assert not cached(False, 100, 100)


def test_dropout_has_the_forward_kernel() -> None:
    q, k = _draw(1, 1, 2, 24), _draw(1, 600, 1, 24)
    rng_state = torch.tensor([1, 2], device=DEVICE)
    with mock.patch.object(parts, "are_faster") as asked:
        backend.forward(q, k, k, None, 1.0, False, -1, -1, 0.0, None, 0.5, False, rng_state, *DENSE)
    assert not asked.called
