"""torch.autocast: attention takes its inputs in the types that scaled_dot_product_attention takes them in."""

from __future__ import annotations

from collections.abc import Callable

import flash_attn
import flash_attn_interface as fa3
import pytest
import torch
from small_calls import in_one_graph

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16
_CU = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)

CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dense": lambda q, k, v: flash_attn.flash_attn_func(q, k, v),
    "qkv": lambda q, k, v: flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2)),
    "kv": lambda q, k, v: flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2)),
    "varlen": lambda q, k, v: flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], _CU, _CU, 7, 7),
    "varlen qkv": lambda q, k, v: flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 2)[0], _CU, 7),
    "varlen kv": lambda q, k, v: flash_attn.flash_attn_varlen_kvpacked_func(
        q[0], torch.stack((k, v), 2)[0], _CU, _CU, 7, 7
    ),
    "fa3 dense": lambda q, k, v: fa3.flash_attn_func(q, k, v),
    "fa3 varlen": lambda q, k, v: fa3.flash_attn_varlen_func(q[0], k[0], v[0], _CU, _CU, 7, 7),
}


def _draw(*dtypes: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 12, 2, 16, device=DEVICE).to(dtype).requires_grad_() for dtype in dtypes]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CALLS)
def test_fp32_is_cast(name: str, compiled: bool) -> None:
    tensors = _draw(*[torch.float32] * 3)
    expected = CALLS[name](*(x.to(LOW) for x in tensors))
    call = in_one_graph(CALLS[name]) if compiled else CALLS[name]
    with torch.autocast(DEVICE, LOW):
        got = call(*tensors)
    assert got.dtype is LOW
    assert torch.equal(got, expected)
    gradients, best = (torch.autograd.grad(out.float().square().sum(), tensors) for out in (got, expected))
    assert all(torch.equal(a, b) and a.dtype is torch.float32 for a, b in zip(gradients, best, strict=True))


def test_autocast_dtypes_match_scaled_dot_product_attention() -> None:
    """Mixed dtypes too.

    The exception: if all tensors have another low-precision dtype than autocast's, they keep it, as upstream.
    """
    wide, half = torch.float32, torch.float16
    for dtypes in ((wide, LOW, half), (wide, half, half), (LOW, LOW, LOW), (half, half, half), (torch.float64,) * 3):
        if dtypes[0] is torch.float64 and DEVICE == "cuda":
            continue
        tensors = _draw(*dtypes)
        with torch.autocast(DEVICE, LOW):
            got = flash_attn.flash_attn_func(*tensors)
            expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors))
        assert got.dtype is (half if dtypes == (half,) * 3 else expected.dtype)


def test_elsewhere_nothing_is_cast() -> None:
    tensors = _draw(*[torch.float32] * 3)
    with torch.autocast("cpu", LOW, enabled=DEVICE != "cpu"):
        assert flash_attn.flash_attn_func(*tensors).dtype is torch.float32
    with torch.autocast(DEVICE, LOW):
        caches = [x.detach() for x in tensors[1:]]
        assert flash_attn.flash_attn_with_kvcache(tensors[0].detach(), *caches).dtype is torch.float32
        with pytest.raises(TypeError, match="q: got list"):
            flash_attn.flash_attn_func([1.0], *tensors[1:])
