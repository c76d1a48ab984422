"""ComfyUI's attention call, in the terms of scaled_dot_product_attention (SDPA).

ComfyUI calls `override(func, q, k, v, heads, mask=None, ..., **options)`, where func is the attention function that it
chose at its start. Tensors are (batch, tokens, heads * head_dim); with skip_reshape, (batch, heads, tokens, head_dim).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from flash_attn import use_for_sdpa
from flash_attn.sdpa import attention_or_reason
from torch.compiler import is_compiling

from .counts import Counts

Attention = Callable[..., torch.Tensor]

# Options that do not change what attention means. attn_precision asks for scores in fp32, in which these kernels always
# have them. low_precision_attention=False forbids quantized attention, which this is not.
_NEUTRAL = {"attn_precision", "low_precision_attention", "transformer_options", "_inside_attn_wrapper"}
_SDPA = {"scale", "enable_gqa"}

# ComfyUI's function that reads a boolean mask as (batch, keys). The others read masks as SDPA does.
_OWN_MASKS = "attention_basic"


def _in_terms_of_sdpa(
    func: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,  # noqa: ARG001 - see _NEUTRAL
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,  # noqa: ARG001 - of the result
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | str:
    """(query, key, value, attn_mask) for SDPA, or the reason why the call is none of SDPA's."""
    if unknown := sorted(set(options) - _NEUTRAL - _SDPA):
        return f"an argument that this node does not know: {', '.join(unknown)}"
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
        return "query, key or value that are not tensors"
    ndim = 4 if skip_reshape else 3
    if not q.dim() == k.dim() == v.dim() == ndim:
        return f"tensors of other than {ndim} dimensions"
    if skip_reshape and q.shape[1] != heads:
        return "heads that are not those of the query"
    if not skip_reshape:
        head_dim = q.shape[2] // heads
        if any(x.shape[2] % head_dim for x in (q, k, v)) or q.shape[2] % heads:
            return "a width that the heads do not divide"
        q, k, v = (x.reshape(*x.shape[:2], -1, head_dim).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.dtype is torch.bool and getattr(func, "__name__", "") == _OWN_MASKS:
        return f"a boolean mask for {_OWN_MASKS}, which reads masks in a way of its own"
    # Without heads, a mask is (queries, keys) or (batch, queries, keys).
    return q, k, v, mask if mask is None or mask.dim() == 4 else mask.unsqueeze(-3)


def _attend(func: Attention, counts: Counts, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The call by these kernels, or by func with the same arguments.

    torch.compile takes SDPA into its graph, served as the graph runs on. Such a call counts in `sdpa_report()` alone.
    Where func is of a later node of this kind, with another node between, that later node serves and counts.
    """
    if hasattr(func, "flash_attn_kernels"):
        return func(*args, **kwargs)
    terms = _in_terms_of_sdpa(func, *args, **kwargs)
    options = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    result: torch.Tensor | str
    if isinstance(terms, str):
        result = terms
    elif is_compiling():
        with use_for_sdpa():
            result = torch.nn.functional.scaled_dot_product_attention(*terms, **options)
    else:
        result = attention_or_reason(*terms, **options)
    if isinstance(result, str):
        if not is_compiling():
            counts.passed_on(result)
        return func(*args, **kwargs)
    if not is_compiling():
        counts.served()
    return result if kwargs.get("skip_output_reshape") else result.transpose(1, 2).flatten(2)


def override(counts: Counts, previous: Attention | None) -> Attention:
    """The function for ComfyUI's `optimized_attention_override`.

    previous: the override that another node has put there. It keeps the last word: it is called as before, with these
    kernels in the place of ComfyUI's function. What it answers without them is counted.
    """

    def overridden(func: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        if previous is None:
            return _attend(func, counts, *args, **kwargs)
        asked = False

        @functools.wraps(func)
        def kernels(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal asked
            asked = True
            return _attend(func, counts, *args, **kwargs)

        kernels.flash_attn_kernels = True  # type: ignore[attr-defined]
        out = previous(kernels, *args, **kwargs)
        if not asked and not is_compiling():
            counts.passed_on("another node's attention answered")
        return out

    overridden.flash_attn_previous = previous  # type: ignore[attr-defined]
    return overridden
