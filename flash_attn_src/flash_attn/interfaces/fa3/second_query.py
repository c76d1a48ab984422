"""Attention of whole sequences with a second query, for which the values are keys: as over a cache of them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from flash_attn.attention.backends.torch.sequences import bounds
from flash_attn.attention.operators.kvcache import attend as attend_to_cache
from flash_attn.call.arguments import check_second_query
from flash_attn.call.calls import AttentionCall, CacheCall, maybe_contiguous, replace
from flash_attn.call.tracing import is_traced


class _WithoutBackward(torch.autograd.Function):
    """The result of a call whose gradients no kernel computes."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> NoReturn:
        raise NotImplementedError("qv: attention with a second query has no backward, call it under torch.no_grad()")


def attend(
    call: AttentionCall,
    qv: torch.Tensor,
    softmax_scale: float | None,
    attention_chunk: int,
    num_splits: int,
    sm_margin: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) of a checked call. softmax_scale: the caller's, None for its default with qv.

    As upstream, it takes tensors that require gradients. Their backward raises NotImplementedError.
    """
    q, k, v = call.q, call.k, call.v
    inputs = tuple(x for x in (q, k, v, qv, call.options.s_aux) if x is not None)
    table = lengths = None
    if call.cu_seqlens_k is not None:  # Pages have one key each, because a sequence may begin at any row.
        if k.is_cpu and not is_traced(k, call.cu_seqlens_k):  # the lengths are known
            bounds("cu_seqlens_k", call.cu_seqlens_k, k.shape[0], call.max_seqlen_k)
        places = torch.arange(call.max_seqlen_k, dtype=torch.int32, device=k.device)
        table = (call.cu_seqlens_k[:-1, None] + places).clamp(max=max(k.shape[0] - 1, 0))
        lengths = call.cu_seqlens_k.diff()
        k, v = k[:, None], v[:, None]
    scale = (q.shape[-1] + v.shape[-1]) ** -0.5 if softmax_scale is None else softmax_scale
    cached = CacheCall(
        q=maybe_contiguous(q), k_cache=maybe_contiguous(k), v_cache=maybe_contiguous(v), qv=qv,
        options=replace(call.options, softmax_scale=scale, attention_chunk=attention_chunk), cache_seqlens=lengths,
        block_table=table, cu_seqlens_q=call.cu_seqlens_q, max_seqlen_q=call.max_seqlen_q, num_splits=num_splits,
        sm_margin=sm_margin,
    )  # fmt: skip
    check_second_query(cached)
    cached.qv = maybe_contiguous(qv)
    out, softmax_lse = attend_to_cache(cached)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        out = _WithoutBackward.apply(out.detach(), *inputs)
    return out, softmax_lse
