"""FlashAttention-4's additional arguments:

refuses the unsupported ones, and converts the window, whose open sides are None.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from flash_attn.call.arguments import check_whole, check_window, diagnose_switches
from flash_attn.call.calls import Window

OpenWindow = tuple[int | None, int | None]

_FLEX = "torch.nn.attention.flex_attention"
_ONLY_FOR_MODS = "nothing but score_mod and mask_mod reads it: pass None"
# Argument that no kernel supports -> the alternative.
_INSTEAD = {
    "score_mod": f"use softcap, alibi_slopes or attn_bias of flash_attn.flash_attn_func, or {_FLEX}",
    "score_mod_bwd": _ONLY_FOR_MODS,
    "mask_mod": f"use causal, window_size, or attn_bias of flash_attn.flash_attn_func with -inf, or {_FLEX}",
    "aux_tensors": _ONLY_FOR_MODS,
    "aux_scalars": _ONLY_FOR_MODS,
    "block_sparse_tensors": "except for dense tensors: call flash_attn_func",
    "gather_kv_indices": "gather the keys and values first, or pass them as pages of one key by page_table",
}


def refuse(**given: Any) -> None:
    """NotImplementedError for the first argument that is not None."""
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}: flash_attn for ROCm has none, {_INSTEAD[name]}")


def check_speed(num_splits: int, pack_gqa: bool | None, **switches: bool) -> None:
    """The arguments that change no result."""
    check_whole(num_splits=num_splits)
    diagnose_switches(None, pack_gqa=False if pack_gqa is None else pack_gqa, **switches)


class Mask(NamedTuple):
    """The keys that a query sees: a window with sides of 0 or more, or -1 for open, over fewer queries and keys.

    fewer_queries, fewer_keys: that many rows at the end of each sequence do not count.
    """

    window: Window
    fewer_queries: int = 0
    fewer_keys: int = 0


def mask_of(window_size: OpenWindow, causal: bool) -> Mask:
    """The mask of a window whose open sides are None and whose other sides may be negative.

    A right side of -w hides the last w keys, and over the others it is 0, because masks are aligned to the last query
    and the last key. A left side of -w leaves the last w queries without keys, and for the others it is 0. As upstream,
    a window that would be empty is open.
    """
    try:
        left, right = (None if edge is None else operator.index(edge) for edge in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size: got {window_size!r}, wanted (left, right), ints or None") from None
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        left, right = None, 0 if causal else None
    fewer_queries, fewer_keys = max(-(left or 0), 0), max(-(right or 0), 0)
    sides = (
        -1 if left is None else max(left, 0) - fewer_keys,
        -1 if right is None else max(right, 0) - fewer_queries,
    )
    return Mask(check_window(sides), fewer_queries, fewer_keys)


def keeps_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
