"""torch.func and torch.vmap: dense attention is right, other calls raise. And arguments that would lose a gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flash_attn
import flash_attn_interface as fa3
import pytest
import torch
from assert_close import assert_close
from flash_attn import cute as fa4
from public_calls import calls
from torch.autograd import forward_ad

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="where a kernel would serve, nothing differs"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

Attention = Callable[..., torch.Tensor]
INPUTS = torch.randn(3, 2, 5, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SINKS = torch.tensor([0.3, -1.0], dtype=torch.float64)
RIGHT: dict[str, Attention] = {
    "dense": lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True, softcap=3.0, s_aux=SINKS),
    "lse": lambda q, k, v: flash_attn.flash_attn_func(q, k, v, window_size=(2, 1), return_attn_probs=True)[0],
    "qkv": lambda q, k, v: flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2)),
    "kv": lambda q, k, v: flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2)),
    "FA3": lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True),
    "FA4": lambda q, k, v: fa4.flash_attn_func(q, k, v)[0],
    "FA4, lse": lambda q, k, v: fa4.flash_attn_func(q, k, v, return_lse=True)[1],
}
TRANSFORMS: dict[str, Callable[[Attention, torch.Tensor], torch.Tensor]] = {
    "grad": lambda f, q: torch.func.grad(lambda x: f(x).square().sum())(q),
    "vmap": lambda f, q: torch.vmap(f)(torch.stack((q, q + 1.0))),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (torch.cos(q),))[1],
    "jacrev": lambda f, q: torch.func.jacrev(lambda x: f(x).sum((0, 1)))(q),
    "vmap of grad": lambda f, q: torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(torch.stack((q, q + 1.0))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", RIGHT)
def test_dense_attention_is_right(name: str, transform: str) -> None:
    """As without a transform: vmap is a loop, jvp is two calls, the others are autograd's."""
    q, k, v = INPUTS

    def attention(x: torch.Tensor) -> torch.Tensor:
        return RIGHT[name](x, k, v)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(attention(leaf).square().sum(), leaf)[0]

    expected = {
        "grad": lambda: gradient(q),
        "vmap": lambda: torch.stack([attention(x) for x in (q, q + 1.0)]),
        "jvp": lambda: (attention(q + 1e-6 * torch.cos(q)) - attention(q - 1e-6 * torch.cos(q))) / 2e-6,
        "jacrev": lambda: torch.autograd.functional.jacobian(lambda x: attention(x).sum((0, 1)), q),
        "vmap of grad": lambda: torch.stack([gradient(x) for x in (q, q + 1.0)]),
    }[transform]()
    assert_close(name, TRANSFORMS[transform](attention, q), expected, tiny=1e-8)


def _first(x: Any) -> torch.Tensor:
    return x[0] if isinstance(x, (tuple, list)) else x


# The last three are torch's own words for a tensor that is written in place.
TOLD = (
    "torch.func and torch.vmap do not transform it", "vmap: inplace",
    "vmap: aten", "mutate over a captured",
)  # fmt: skip


def _outcome(function: Callable[[], torch.Tensor]) -> torch.Tensor | Exception:
    try:
        return function()
    except (NotImplementedError, RuntimeError) as error:
        return error


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_every_function_is_right_or_raises(transform: str) -> None:
    """The first floating-point tensor of each call is transformed. Errors come from flash_attn, not from torch."""
    for name, call in calls().items():
        argument = next(n for n, x in call.tensors.items() if x.is_floating_point())

        def function(x: torch.Tensor, call: Any = call, argument: str = argument) -> torch.Tensor:
            given = {n: y.clone() for n, y in call.tensors.items()}
            return _first(call.function(**{**given, argument: x}, **call.options)).float().sum(-1, keepdim=True)

        x = call.tensors[argument]
        got = _outcome(partial(TRANSFORMS[transform], function, x))
        if isinstance(got, Exception):
            assert any(part in str(got) for part in TOLD), (name, got)
            continue
        if transform == "grad":
            leaf = x.clone().requires_grad_()
            expected = torch.autograd.grad(function(leaf).square().sum(), leaf)[0]
            assert_close(name, got, expected)
        if transform == "vmap":
            both = [function(y) for y in (x, x + 1.0)]
            assert_close(name, got, torch.stack(both))


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_a_custom_op_refuses_transforms(transform: str) -> None:
    q, k, v = INPUTS

    def op(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.flash_attn._flash_attn_forward(x, k, v, 0.0, 0.3, False, -1, -1, 0.0, None, False)[0]

    with pytest.raises(NotImplementedError, match=r"_flash_attn_forward: torch\.func and torch.vmap do not"):
        TRANSFORMS[transform](op, q)


def test_a_custom_op_refuses_tangents() -> None:
    q, k, v = INPUTS
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="custom ops have no forward-mode"):
            torch.ops.flash_attn._flash_attn_forward(dual, k, v, 0.0, 0.3, False, -1, -1, 0.0, None, False)


CACHES = {name: call for name, call in calls().items() if "kvcache" in name or name == "FA4 pages"}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("argument", ["s_aux", "softmax_scale", "alibi_slopes"])
def test_cache_functions_refuse_tensors_that_need_a_gradient(name: str, argument: str) -> None:
    call = CACHES[name]
    own = "learnable_sink" if name.startswith("FA4") and argument == "s_aux" else argument
    if "extension" in name or (argument == "alibi_slopes" and not name.startswith("kvcache")):
        pytest.skip("it has no such argument")
    value = torch.tensor(0.3) if argument == "softmax_scale" else torch.rand(2)
    given = {**call.fresh().tensors, own: value.requires_grad_()}
    with pytest.raises(ValueError, match=f"^{own}: got a tensor that requires a gradient"):
        call.function(**given, **call.options)
    with torch.no_grad():
        call.function(**given, **call.options)


def test_slopes_that_require_a_gradient_are_refused() -> None:
    q, k, v = INPUTS.float()
    slopes = torch.rand(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"^alibi_slopes: got a tensor that requires a gradient"):
        flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match="qv: attention with a second query has no backward"):
        fa3.flash_attn_func(q, k, v, qv=q, s_aux=torch.rand(2, requires_grad=True)).sum().backward()
