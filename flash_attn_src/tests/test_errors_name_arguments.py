"""Every public function with a wrong value for each argument: the error names the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flash_attn
import flash_attn.cute
import flash_attn.fp8
import flash_attn.int8
import flash_attn_interface as fa3
import numpy as np
import pytest
import sageattention
import spas_sage_attn
import torch

LAYOUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "dense": {
        "q": (2, 6, 4, 16), "k": (2, 6, 4, 16), "v": (2, 6, 4, 16), "qkv": (2, 6, 3, 4, 16), "kv": (2, 6, 2, 4, 16),
    },
    "packed": {"q": (6, 4, 16), "k": (6, 4, 16), "v": (6, 4, 16), "qkv": (6, 3, 4, 16), "kv": (6, 2, 4, 16)},
    "cache": {"q": (2, 1, 4, 16), "k_cache": (2, 6, 4, 16), "v_cache": (2, 6, 4, 16)},
}  # fmt: skip
WRONG: list[Any] = [
    "x", [1.0], np.ones(2), torch.ones(2), object(), {}, 1.5, None, True, -7, float("nan"),
    torch.ones(3, 3, 3, 3, 3, 3).half(), torch.ones(2, 4, requires_grad=True),
]  # fmt: skip
# What an error may call an argument: the function that the call was handed on to has these names.
OTHER_NAMES = {"sm_scale": "softmax_scale", "is_causal": "causal"}
# (function, argument): values that change nothing, because the argument concerns the speed on NVIDIA GPUs, or packed or
# dense tensors alone, or has another meaning there.
ANY = {
    ("flash_attn_varlen_func", name)
    for name in ("max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "scheduler_metadata", "seqlen_k_per_split")
} | {("flash_attn_qkvpacked_func", "num_heads_q")}
NUMBERS = ("scale", "softcap", "threshd")


def _functions() -> list[Callable[..., Any]]:
    result = {}
    for module in (flash_attn, flash_attn.fp8, flash_attn.int8, sageattention, spas_sage_attn, fa3, flash_attn.cute):
        for name, f in vars(module).items():
            if (
                inspect.isfunction(f)
                and name.startswith(("flash_attn_", "sageattn", "spas_"))
                and "combine" not in name
            ):
                result[f] = None
    return list(result)


def _good(f: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(f).parameters
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    layout = "cache" if "k_cache" in needed else "packed" if any("seqlen" in name for name in needed) else "dense"
    starts = torch.tensor([0, 3, 6], dtype=torch.int32)
    return {
        name: starts if "cu_seqlens" in name else 3 if "seqlen" in name else torch.randn(LAYOUTS[layout][name]).half()
        for name in needed
    }


def _is_right(name: str, value: Any, f: Callable[..., Any]) -> bool:
    """Whether a value of the list is right for an argument."""
    if (f.__name__, name) in ANY and f.__module__.startswith(("flash_attn.cute", "flash_attn_interface")):
        return True
    if value is None:
        return name == "k" and "cute" in f.__module__  # multi-head latent attention
    if value is True:  # a switch, or 1
        return "scale" not in name
    if "descale" in name:
        return isinstance(value, torch.Tensor) and not value.requires_grad
    return any(word in name for word in NUMBERS) and isinstance(value, (int, float)) and value == value


def _error(f: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    try:
        f(**arguments)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("f", _functions(), ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_the_error_names_the_argument(f: Callable[..., Any]) -> None:
    good = _good(f)
    f(**good)
    for name, parameter in inspect.signature(f).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for value in WRONG:
            if value is parameter.default:
                continue
            said = _error(f, {**good, name: value})
            if said is None:
                assert _is_right(name, value, f), f"{name}={value!r} is accepted"
            else:
                assert name in said or OTHER_NAMES.get(name, name) in said, f"{name}={value!r}: {said}"


@pytest.mark.parametrize("name", ["causal", "deterministic", "return_attn_probs"])
@pytest.mark.parametrize("value", [1.0, 0.0, np.float32(1), torch.tensor(1.0), "x", torch.ones(2)], ids=repr)
def test_a_switch_takes_no_fraction(name: str, value: Any) -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(TypeError, match=f"{name}: got .*, wanted a bool"):
        flash_attn.flash_attn_func(q, q, q, **{name: value})


@pytest.mark.parametrize("value", [1, 0, True, np.bool_(True), np.int32(1)], ids=repr)
def test_a_switch_takes_whole_numbers(value: Any) -> None:
    q = torch.randn(1, 4, 2, 8)
    out = flash_attn.flash_attn_func(q, q, q, causal=value)
    assert torch.equal(out, flash_attn.flash_attn_func(q, q, q, causal=bool(value)))


def test_factors_of_a_cache_are_asked_for_and_have_no_gradient() -> None:
    q, cache = torch.randn(2, 1, 4, 16).half(), torch.randn(2, 6, 4, 16).to(torch.float8_e4m3fn)
    ones = torch.ones(2, 4)
    attend = flash_attn.flash_attn_with_kvcache
    with pytest.raises(TypeError, match=r"k_cache: got torch.float8_e4m3fn without k_descale and v_descale"):
        attend(q, cache, cache)
    with pytest.raises(TypeError, match=r"q: got torch.float32, wanted float16 or bfloat16 over a cache"):
        attend(q.float(), cache, cache, k_descale=ones, v_descale=ones)
    for name in ("k_descale", "v_descale"):
        with pytest.raises(ValueError, match=f"{name}: got a tensor that requires a gradient"):
            attend(q, cache, cache, **{name: ones.clone().requires_grad_()})
    with torch.no_grad():
        attend(q, cache, cache, k_descale=ones.clone().requires_grad_())
