"""Attention functions of the stand-in, and the wrapper that looks for an override."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Attention = Callable[..., torch.Tensor]


class AttentionTensorContainer:
    """A tensor that its one user takes out, so that its memory can be freed before the call returns."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def take(self) -> torch.Tensor:
        assert self.tensor is not None
        taken, self.tensor = self.tensor, None
        return taken


def wrap_attn(func: Attention) -> Attention:
    """A call asks `transformer_options` for an override once: inside of it, functions are called without.

    An override gets tensors where it has no `container_function`. It comes before `preferred_attention`, which has the
    function that a checkpoint asks for.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        chosen = getattr(kwargs.pop("preferred_attention", None), "function", None) or func
        is_outer = "_inside_attn_wrapper" not in kwargs
        kwargs["_inside_attn_wrapper"] = True
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override") if is_outer else None
        if isinstance(args[0], AttentionTensorContainer):
            if override is not None and hasattr(override, "container_function"):
                out: torch.Tensor = override.container_function(*args, **kwargs)
                return out
            args = (*(container.take() for container in args[:3]), *args[3:])
        return chosen(*args, **kwargs) if override is None else override(func, *args, **kwargs)

    return wrapper


def _in_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


@wrap_attn
def attention_pytorch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,  # noqa: ARG001
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """ComfyUI's function over PyTorch's SDPA: it ignores what it does not know."""
    if not skip_reshape:
        head_dim = q.shape[2] // heads
        q, k, v = (_in_heads(x, x.shape[2] // head_dim if kwargs.get("enable_gqa") else heads) for x in (q, k, v))
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(-3)
    options = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@wrap_attn
def attention_basic(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """ComfyUI's function of matrices, in which a boolean mask is (batch, keys)."""
    q, k, v = (_in_heads(x, heads) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask.flatten(1)[:, None, None, :], -torch.inf)
    elif mask is not None:
        scores = scores + (mask if mask.dim() == 4 else mask.unsqueeze(-3))
    out: torch.Tensor = scores.softmax(-1) @ v
    return out.transpose(1, 2).flatten(2)


optimized_attention = attention_pytorch


class CrossAttention(torch.nn.Module):
    """Projections around one attention call."""

    def __init__(self, query_dim: int, context_dim: int | None = None, heads: int = 8, dim_head: int = 64) -> None:
        super().__init__()
        width = heads * dim_head
        self.heads = heads
        self.to_q = torch.nn.Linear(query_dim, width, bias=False)
        self.to_k = torch.nn.Linear(context_dim or query_dim, width, bias=False)
        self.to_v = torch.nn.Linear(context_dim or query_dim, width, bias=False)
        self.to_out = torch.nn.Linear(width, query_dim)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        out: torch.Tensor = self.to_out(
            optimized_attention(q, k, v, self.heads, mask, attn_precision=None, transformer_options=transformer_options)
        )
        return out
