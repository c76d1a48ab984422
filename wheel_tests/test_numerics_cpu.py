"""Forward and backward on CPU tensors against a plain fp32 reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from helpers import TOLERANCE, check, error, inputs, reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Record = Callable[[str, object], None]


def _record(record_property: Record, dtype: torch.dtype, errors: tuple[float, float]) -> None:
    for direction, value in zip(("forward", "backward"), errors, strict=True):
        record_property(f"error {str(dtype).removeprefix('torch.')} {direction}", value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "heads", "heads_k", "dim"),
    [(64, 64, 2, 2, 64), (113, 203, 4, 2, 40), (203, 113, 6, 1, 80), (1, 65, 2, 2, 128), (33, 33, 1, 1, 256)],
)
def test_dense(
    seqlen_q: int, seqlen_k: int, heads: int, heads_k: int, dim: int, causal: bool, dtype: torch.dtype,
    record_property: Record,
) -> None:  # fmt: skip
    q, k, v, dout = inputs(2, seqlen_q, seqlen_k, heads, heads_k, dim, dtype)
    errors = check(flash_attn_func(q, k, v, causal=causal), q, k, v, dout, causal=causal)
    _record(record_property, dtype, errors)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_equals_one_call_per_sequence(causal: bool, record_property: Record) -> None:
    lengths_q, lengths_k = [5, 64, 1, 37], [9, 64, 130, 20]
    q, k, v, dout = (tensor[0] for tensor in inputs(1, sum(lengths_q), sum(lengths_k), 4, 2, 32, torch.float32))
    out = flash_attn_varlen_func(
        q, k, v, _offsets(lengths_q), _offsets(lengths_k), max(lengths_q), max(lengths_k), causal=causal
    )
    grads = torch.autograd.grad(out, (q, k, v), dout)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    wanted = torch.cat([reference(*(part[None] for part in three), causal=causal)[0][0] for three in parts])
    wanted_grads = torch.autograd.grad(wanted, (q, k, v), dout)
    errors = error(out, wanted), max(error(*pair) for pair in zip(grads, wanted_grads, strict=True))
    limits = TOLERANCE[torch.float32]
    assert errors[0] <= limits[0]
    assert errors[1] <= limits[1]
    _record(record_property, torch.float32, errors)


def test_packed_forms_are_the_same_function() -> None:
    q, k, v, dout = inputs(2, 48, 48, 4, 4, 64, torch.float32)
    out = flash_attn_func(q, k, v, causal=True)
    qkv = torch.stack([q, k, v], 2).detach().requires_grad_()
    packed = flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(packed, out)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True), out)
    (grad,) = torch.autograd.grad(packed, qkv, dout)
    wanted = torch.stack(torch.autograd.grad(out, (q, k, v), dout), 2)
    assert error(grad, wanted) <= TOLERANCE[torch.float32][1]


def test_lse_is_the_logarithm_of_the_sum() -> None:
    q, k, v, _ = inputs(2, 40, 72, 4, 2, 64, torch.float32)
    _, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    _, wanted = reference(q, k, v)
    assert lse.shape == (2, 4, 40)
    assert error(lse, wanted) <= TOLERANCE[torch.float32][0]


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
