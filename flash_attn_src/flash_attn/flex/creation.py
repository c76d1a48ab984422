"""create_block_mask as it is written, without a compiler, in memory that is bounded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

# Scores that are looked at together. PyTorch's compiled function keeps none, and its plain one keeps all.
_SCORES = 1 << 28
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def create(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of `function`, PyTorch's create_block_mask, called without `_compile`."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    options = bound.arguments
    options.pop("_compile", None)
    block_size = options.get("BLOCK_SIZE", 128)
    block_q = block_size if isinstance(block_size, int) else block_size[0]
    seqlen_q, seqlen_k = options["Q_LEN"], options["KV_LEN"]
    scores = (options["B"] or 1) * (options["H"] or 1) * seqlen_k * block_q
    step = max(_SCORES // max(scores, 1), 1) * block_q
    if step >= seqlen_q or options.get("compute_dq_write_order"):
        return function(*bound.args, **bound.kwargs)
    mask_mod = options["mask_mod"]
    parts = []
    for start in range(0, seqlen_q, step):
        part = {"mask_mod": _from(mask_mod, start), "Q_LEN": min(step, seqlen_q - start)}
        parts.append(function(**{**options, **part}))
    lists = [[getattr(part, name) for part in parts] for name in _LISTS]
    options = {"BLOCK_SIZE": parts[0].BLOCK_SIZE, "mask_mod": mask_mod}
    if "seq_lengths" in inspect.signature(BlockMask.from_kv_blocks).parameters:  # not in torch 2.5
        options["seq_lengths"] = (seqlen_q, seqlen_k)
    tensors: list[Any] = [None if x[0] is None else torch.cat(x, 2) for x in lists]
    return BlockMask.from_kv_blocks(*tensors, **options)


def _from(mask_mod: Callable[..., Any], start: int) -> Callable[..., Any]:
    """The mask_mod of the queries from `start` on."""
    return lambda b, h, q_idx, kv_idx: mask_mod(b, h, q_idx + start, kv_idx)
