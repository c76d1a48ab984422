"""What the custom ops of attention return, and the fakes by which a compiler knows it without running them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flash_attn.attention import dmask
from flash_attn.attention.backends.torch.tiles import accumulation_dtype
from flash_attn.call.arguments import check_strided
from flash_attn.call.calls import AttentionCall, ForwardResult, attention_call, new_out
from flash_attn.core.api import by_name

_Named = dict[str, Any]
_Fake = TypeVar("_Fake", bound=Callable[..., Any])


def complete(q: torch.Tensor, results: ForwardResult) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replaces None by tensors, because an op returns only tensors:

    an empty S_dmask, and a zero rng_state without dropout.
    """
    out, softmax_lse, probabilities, rng_state = results
    if probabilities is None:
        s_dmask = torch.empty((0,), dtype=q.dtype, device=q.device)
    else:
        s_dmask = dmask.scaled(probabilities, q.shape[-1])
    if rng_state is None:
        rng_state = torch.zeros((2,), dtype=torch.int64, device=q.device)
    return out, softmax_lse, s_dmask, rng_state


def fake_results(
    q: torch.Tensor, v: torch.Tensor, lse_shape: tuple[int, ...], dmask_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        new_out(q, v),
        torch.empty(lse_shape, dtype=accumulation_dtype(q.dtype), device=q.device),
        torch.empty(dmask_shape, dtype=q.dtype, device=q.device),
        torch.empty((2,), dtype=torch.int64, device=q.device),
    )


def call_of(named: _Named) -> AttentionCall:
    """The call of an op's arguments by upstream's names, which are the call's but for the window."""
    window = named.pop("window_size_left"), named.pop("window_size_right")
    named.pop("zero_tensors", None)
    return attention_call(**named, window_size=window)


def custom_op(schema: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[[_Named], Any]], Any]:
    """Make a function of one dict, arguments by name, the custom op flash_attn::<its name> with this schema."""
    arguments = torch._C.parse_schema(f"op{schema}").arguments
    optional = {argument.name: "?" * isinstance(argument.type, torch._C.OptionalType) for argument in arguments}
    names = " ".join(f"{name}{mark}" for name, mark in optional.items())
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

    def decorate(function: Callable[[_Named], Any]) -> Any:
        name = f"flash_attn::{function.__name__}"
        return torch.library.custom_op(
            name, by_name(names, defaults)(function), mutates_args=mutates_args, schema=schema
        )

    return decorate


def register_fake(op: Any) -> Callable[[_Fake], _Fake]:
    """Registers a fake of an op, a function of the op's arguments by name, defaults included.

    PyTorch also runs it if any tensor is on the meta device, so it first refuses tensors of several devices.
    """
    signature = inspect.signature(op._init_fn)

    def register(fake: _Fake) -> _Fake:
        def checked(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            check_strided("q", bound.arguments["q"])
            device = bound.arguments["q"].device
            for name, x in bound.arguments.items():
                if isinstance(x, torch.Tensor) and x.device != device:
                    raise ValueError(f"{name}: got a tensor on {x.device}, wanted {device} where q is")
            return fake(bound.arguments)

        op.register_fake(checked)
        return fake

    return register
