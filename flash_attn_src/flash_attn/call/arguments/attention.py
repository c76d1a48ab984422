"""The arguments of attention over whole sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from flash_attn.call.arguments.diagnosis import (
    INT32_MAX,
    check_block_table,
    check_index,
    check_strided,
    check_whole,
    diagnose_switches,
    diagnose_tensors,
    refuse_gradients,
)
from flash_attn.call.arguments.options import are_fine, diagnose_options
from flash_attn.call.calls import AttentionCall


def check_dense(call: AttentionCall) -> None:
    """Checks a call of dense tensors, and completes it:

    window_size becomes -1 on a side that is open or reaches every key.
    """
    q, k, v = call.q, call.k, call.v
    softmax_scale = call.options.softmax_scale
    try:
        batch, seqlen_q, _, dim = q.shape
        batch_k, seqlen_k, _, _ = k.shape
        left, right = call.options.window_size
        fine = (
            batch == batch_k
            and are_fine(call.options, q, k, v, batch, seqlen_k)
            and type(call.deterministic) is bool
            and type(call.return_softmax) is bool
        )
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        fine = False
    if not fine:
        diagnose_tensors(q, k, v, ("batch", "seqlen", "heads", "head_dim"))
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"k: got batch {k.shape[0]}, wanted {q.shape[0]} as q has")
        _diagnose_switches(call)
        dim = q.shape[-1]
        left, right = diagnose_options(call.options, q, q.shape[0], k.shape[1])
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    # Comparing a traced length would bound it: the ops, which check again, do that when they run.
    if left < 0 or (not is_compiling() and left >= seqlen_k):
        left = -1
    if right < 0 or (not is_compiling() and right >= seqlen_q):
        right = -1
    call.options.window_size = (left, right)
    if softmax_scale is None:
        call.options.softmax_scale = dim**-0.5


def check_varlen(call: AttentionCall) -> None:
    """The same for packed sequences. max_seqlen_* are ints here: see `as_int`."""
    q, k, v = call.q, call.k, call.v
    # A caller of the public function may have passed any object.
    cu_seqlens_q: Any = call.cu_seqlens_q
    cu_seqlens_k: Any = call.cu_seqlens_k
    max_seqlen_q, max_seqlen_k, block_table = call.max_seqlen_q, call.max_seqlen_k, call.block_table
    softmax_scale = call.options.softmax_scale
    try:
        if is_compiling():  # a graph may count the rows of k and of v apart, as it runs
            torch._check(k.shape[0] == v.shape[0])
        dim, device, shape_cu = q.shape[-1], q.device, cu_seqlens_q.shape
        left, right = call.options.window_size
        fine = (
            q.dim() == k.dim() == 3
            and len(shape_cu) == 1
            and shape_cu[0] > 0
            and shape_cu == cu_seqlens_k.shape
            and cu_seqlens_q.dtype is torch.int32
            and cu_seqlens_k.dtype is torch.int32
            and device == cu_seqlens_q.device
            and device == cu_seqlens_k.device
            and cu_seqlens_q.is_contiguous()
            and cu_seqlens_k.is_contiguous()
            and (is_compiling() or (0 <= max_seqlen_q <= INT32_MAX and 0 <= max_seqlen_k <= INT32_MAX))
            and are_fine(call.options, q, k, v, shape_cu[0] - 1)
            and type(call.deterministic) is bool
            and type(call.return_softmax) is bool
            and block_table is None
        )
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        fine = False
    if not fine:
        axes = ("total_k", "heads", "head_dim")
        axes_k = axes if block_table is None else ("pages", "page_size", "heads", "head_dim")
        why_k = "cu_seqlens_k" if block_table is None else "block_table"
        if block_table is not None:
            check_strided("block_table", block_table, "an int32 tensor")
        diagnose_tensors(q, k, v, ("total_q", "heads", "head_dim"), axes_k, why_q="cu_seqlens_q", why_k=why_k)
        check_index("cu_seqlens_q", cu_seqlens_q, q, 1)
        check_index("cu_seqlens_k", cu_seqlens_k, q, 1)
        if cu_seqlens_q.numel() == 0 or cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(
                f"cu_seqlens_q, cu_seqlens_k: got {cu_seqlens_q.numel()} and {cu_seqlens_k.numel()} "
                "elements, wanted batch + 1 each"
            )
        batch = cu_seqlens_q.numel() - 1
        if not is_compiling():
            check_whole(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
        if block_table is not None:
            check_block_table(block_table, q, batch)
        _diagnose_switches(call)
        dim = q.shape[-1]
        left, right = diagnose_options(call.options, q, batch)
    # Compare with the number of rows, not with max_seqlen_*, because those may be too small, and only the GPU can tell.
    most_k = k.shape[0] if block_table is None else block_table.shape[1] * k.shape[1]
    if left < 0 or (not is_compiling() and left >= most_k):
        left = -1
    if right < 0 or (not is_compiling() and right >= q.shape[0]):
        right = -1
    call.options.window_size = (left, right)
    if softmax_scale is None:
        call.options.softmax_scale = dim**-0.5


def _diagnose_switches(call: AttentionCall) -> None:
    refuse_gradients(softmax_scale=call.options.softmax_scale)
    diagnose_switches(
        call.options.softmax_scale,
        causal=call.options.causal,
        deterministic=call.deterministic,
        return_attn_probs=call.return_softmax,
    )


def check_packed(name: str, packed: torch.Tensor, ndim: int, parts: int) -> None:
    """A packed tensor of `ndim` dimensions has `parts` in its third from last one."""
    check_strided(name, packed)
    if packed.dim() != ndim or packed.shape[-3] != parts:
        axes = ("batch, seqlen" if ndim == 5 else "total") + f", {parts}, heads, head_dim"
        raise ValueError(f"{name}: got shape {tuple(packed.shape)}, wanted ({axes})")
