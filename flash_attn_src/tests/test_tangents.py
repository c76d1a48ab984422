"""Forward-mode tangents: no kernel has them, so a tensor with a tangent raises if a kernel would serve the call."""

from __future__ import annotations

import flash_attn
import pytest
import torch
from flash_attn.attention.operators import dispatch, kvcache
from flash_attn.call import tracing
from flash_attn.call.calls import attention_call, cache_call, replace
from torch.autograd import forward_ad

SHAPE = (1, 4, 2, 8)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def _as_on_a_gpu(tensors: tuple[torch.Tensor | None, ...]) -> None:
    """What `tracing._refuse_tangents` does with tensors of a GPU."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("flash_attn has no forward-mode derivative on a GPU")


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_refuse_tangents", _as_on_a_gpu)


@pytest.mark.parametrize("name", ["q", "k", "v", "s_aux", "attn_bias", "alibi_slopes"])
def test_attention(name: str) -> None:
    q, k, v = torch.randn(3, *SHAPE)
    call = attention_call(q, k, v, softmax_scale=0.3)
    value = {"s_aux": torch.randn(2), "alibi_slopes": torch.rand(2), "attn_bias": torch.randn(1, 1, 4, 4)}.get(name, q)
    with forward_ad.dual_level():
        call = replace(call, **{name: forward_ad.make_dual(value, torch.ones_like(value))})
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            dispatch.forward(call)


@pytest.mark.parametrize(
    "name", ["q", "k_cache", "v_cache", "k", "v", "s_aux", "qv", "alibi_slopes", "rotary_cos", "rotary_sin"]
)
def test_caches(name: str) -> None:
    q, k_cache, v_cache = torch.randn(3, *SHAPE)
    call = cache_call(q, k_cache, v_cache, softmax_scale=0.3, cache_seqlens=2)
    shapes = {"s_aux": (2,), "alibi_slopes": (2,), "rotary_cos": (8, 4), "rotary_sin": (8, 4)}
    value = torch.rand(shapes.get(name, SHAPE))
    with forward_ad.dual_level():
        call = replace(call, **{name: forward_ad.make_dual(value, torch.ones_like(value))})
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            kvcache.attend(call)


def test_calls_without_a_tangent_run() -> None:
    x = torch.randn(SHAPE)
    with forward_ad.dual_level():
        forward_ad.make_dual(x.clone(), x)
        assert flash_attn.flash_attn_func(x, x, x, s_aux=torch.randn(2)).shape == SHAPE
