"""Guards gradients that have no formula for a second derivative: differentiating them raises RuntimeError.

`torch.autograd.function.once_differentiable` is not enough. It adds no error where the incoming gradient is constant,
and `autograd.grad(penalty, weight)` prunes the error away: the second derivative then comes out too small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

Gradients = tuple[torch.Tensor | None, ...]


class _Refusal(torch.autograd.Function):
    """Passes gradients through. Its own backward raises."""

    @staticmethod
    def forward(ctx: Any, what: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The first `count` tensors are the gradients. They depend on the others, and on a leaf."""
        ctx.what = what
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"{ctx.what} has no second derivative")


def _copy(gradient: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:  # noqa: ARG001
    """The gradient, which then depends on the sources."""
    return gradient.clone(memory_format=torch.contiguous_format)


# An operator without a formula: autograd raises where a derivative of its result is asked for. Compilers keep it, where
# they drop the history of a tensor that an operator writes in place.
_first_derivative_only = torch.library.custom_op(
    "flash_attn::_first_derivative_only",
    _copy,
    mutates_args=(),
    schema="(Tensor gradient, Tensor[] sources) -> Tensor",
)
_first_derivative_only.register_fake(lambda x, _: torch.empty(x.shape, dtype=x.dtype, device=x.device))


def first_only(
    what: str,
    compute: Callable[..., Gradients],
    ctx: Any,
    *incoming: torch.Tensor | None,
    saved: tuple[torch.Tensor, ...] | None = None,
) -> Gradients:
    """compute(ctx, saved tensors, *incoming), the gradients of a backward; a derivative of them raises RuntimeError,
    which says that `what` has none. saved: ctx.saved_tensors, where the caller looked at them already."""
    if saved is None:
        saved = ctx.saved_tensors  # Only once: a checkpoint recomputes them for a single look.
    if is_compiling():
        gradients = compute(ctx, saved, *incoming)
        sources = [x for x in (*incoming, *saved) if x is not None and x.is_floating_point()]
        guard = torch.ops.flash_attn._first_derivative_only
        with torch.enable_grad():  # Dynamo traces a backward without gradients.
            return tuple(None if x is None else guard(x, sources) for x in gradients)
    if not torch.is_grad_enabled():
        return compute(ctx, saved, *incoming)
    with torch.no_grad():
        gradients = compute(ctx, saved, *incoming)
    real = [x for x in gradients if x is not None]
    sources = [x for x in (*incoming, *saved) if x is not None]
    guarded = iter(_Refusal.apply(what, len(real), *real, *sources, torch.zeros((), requires_grad=True)))
    return tuple(None if x is None else next(guarded) for x in gradients)
