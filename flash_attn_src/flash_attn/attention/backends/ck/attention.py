"""Attention by Composable Kernel."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.ck import dropout
from flash_attn.attention.backends.ck.cache import attend, num_splits_of
from flash_attn.attention.backends.ck.cache import unsupported_reason as unsupported_by_cache
from flash_attn.attention.backends.ck.fallback import Fallback
from flash_attn.attention.backends.ck.parameters import (
    NO_TENSOR,
    Parameters,
    aligned,
    has_window_over_pages,
    unsupported_reason,
    window_of,
)
from flash_attn.attention.backends.split_kv import as_cache_call, is_few, is_profitable
from flash_attn.call.calls import AttentionCall, ForwardResult, replace
from flash_attn.call.options import CK_FORWARD, PROBABILITIES, SPLIT_KV, draw_rng_state
from flash_attn.core import ck_planner
from flash_attn.core.ck_planner import UnsupportedError
from flash_attn.kernels import planning


def forward(call: AttentionCall, fallback: Fallback) -> ForwardResult:
    """See `protocol.Backend.forward`."""
    if call.return_softmax and call.options.dropout_p > 0.0:
        PROBABILITIES.refuse(call, "leave one of them out")
    if (reason := _unsupported_reason(call)) is not None:
        return fallback.because("forward", reason).forward(call)

    packed = call.cu_seqlens_q is not None
    few = SPLIT_KV.unserved(call) is None and is_few(call.longest_q, call.q.shape[-2], call.k.shape[-2])
    # Packed keys may begin at any row. Only Triton's kernels can split keys that begin at any row.
    may_split = few and packed and call.block_table is None and not fallback.alone
    if may_split and is_profitable(planning.COMPOSABLE.rows, call):
        return fallback.backend.forward(call)
    q, k, v = aligned(call.q), aligned(call.k), aligned(call.v)
    if q is not call.q or k is not call.k or v is not call.v:
        call = replace(call, q=q, k=k, v=v)
    if few and not packed:
        cached = as_cache_call(planning.COMPOSABLE.rows, call)
        if cached is not None and unsupported_by_cache(cached) is None:
            return ForwardResult(*attend(cached, fallback))
    if call.options.dropout_p > 0.0 and call.options.rng_state is None:
        call = replace(call, rng_state=draw_rng_state(q.device))

    batch, seqlen_q, seqlen_k, out = call.batch, call.longest_q, call.longest_k, call.out
    result = torch.empty_like(q) if out is None else aligned(out)
    lse_shape = (q.shape[1], q.shape[0]) if packed else (batch, q.shape[2], seqlen_q)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if packed or seqlen_k == 0:  # rows outside of every sequence, or without a key
        result.zero_()
        lse.fill_(torch.inf)
    random = None
    if call.return_softmax and call.options.dropout_p > 0.0:
        random = torch.empty((*lse_shape, seqlen_k), dtype=torch.uint8, device=q.device)
    if 0 not in (batch, seqlen_q, seqlen_k, q.shape[0], k.shape[0]):
        try:
            _launch(call, result, lse, random)
        except UnsupportedError as error:
            return fallback.because("forward", str(error)).forward(call)
    if out is not None and result is not out:
        result = out.copy_(result)
    probabilities = None if random is None else dropout.signed_probabilities(call, lse, random)
    return ForwardResult(result, lse, probabilities, call.options.rng_state)


def _unsupported_reason(call: AttentionCall) -> str | None:
    """Why no kernel takes a call, or None."""
    name = CK_FORWARD.unserved(call)
    if name is not None:
        return f"{name}: the kernels have none"
    if has_window_over_pages(call):
        return "window_size: not over pages, because NaN before the window would count"
    reason = unsupported_reason(call.q, call.v)
    if call.options.dropout_p > 0.0 and reason is None:
        reason = dropout.unsupported_reason(call)
    if (
        reason is None
        and call.block_table is not None
        and (call.options.dropout_p > 0.0 or call.q.shape[-1] not in planning.COMPOSABLE.head_dims)
    ):
        return f"block_table: not with dropout or head_dim {call.q.shape[-1]}"
    return reason


def _launch(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor, random: torch.Tensor | None) -> None:
    q, k, v, block_table = call.q, call.k, call.v, call.block_table
    packed = call.cu_seqlens_q is not None
    parameters = Parameters()
    address, rows = parameters.address, parameters.rows
    tensors = (*rows(q), *rows(k), *rows(v), *rows(out))
    shape = parameters.attention(
        call, window_of(call, one_query=not packed and call.longest_q == 1),
        (0 if packed else lse.stride(0), lse.stride(-2)), call.options.rng_state,
    )  # fmt: skip
    if block_table is None:
        rest = (address(lse), address(call.seqused_k), *parameters.random(random))
        parameters.run("forward", ck_planner.FORWARD.pack(*shape, *tensors, *rest))
        return
    # Sequences of several lengths over pages: the kernels of the decoding.
    splits = num_splits_of(q, call.batch * q.shape[-2] * -(-call.longest_q // 64), call.longest_k)
    split_out = torch.empty((splits, *lse.shape, q.shape[2]), dtype=torch.float32, device=q.device)
    split_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    parameters.run("decode", ck_planner.DECODE.pack(
        *shape, *tensors, *NO_TENSOR, *NO_TENSOR,
        address(lse), 0, address(call.seqused_k), 0, address(block_table), block_table.stride(0), q.shape[0],
        0, 0, 0, 0, 0, k.shape[1], splits, 0, address(split_out), address(split_lse),
    ))  # fmt: skip
