"""Attention with INT8 queries and keys, forward only. Weights, values and the result keep 16 bits.

The method is SageAttention's (Zhang et al., arXiv 2410.02367): a block of 128 queries and a block of 64 keys of a head
has one scale, and the mean key of a head is subtracted from its keys first. That changes no weight, because softmax
does not see a constant, and it makes keys with a large common part fit in 8 bits.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flash_attn import backends
from flash_attn.arguments import check_dense
from flash_attn.calls import AttentionCall

_MAX_HEAD_DIM = 128
# A row in INT8 is a multiple of 16 bytes.
_HEAD_DIM_STEP = 16
_DTYPES = (torch.float16, torch.bfloat16)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flash_attn_int8_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    smooth_k: bool = True,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (batch, seqlen_q, heads, head_dim) and k, v (batch, seqlen_k, heads_k, head_dim).

    fp16 or bf16, head dims up to 128, heads a multiple of heads_k. causal aligns the last query and the last key.
    smooth_k: subtract the mean key. Returns out like q; with return_lse also the logsumexp of the scaled scores,
    fp32 (batch, heads, seqlen_q), without the mean subtracted.

    On RDNA 3 and RDNA 4 GPUs (gfx11, gfx12); on a CPU with the same rounding in PyTorch. Other GPUs raise
    NotImplementedError. There is no gradient: RuntimeError under autograd. torch.compile breaks its graph here.
    ValueError for a head dim above 128 and for a scale that is not positive, TypeError for another dtype.
    """
    call = AttentionCall(q, k, v, softmax_scale, causal)
    check_dense(call)
    if q.dtype not in _DTYPES:
        raise TypeError(f"q: got {q.dtype}, wanted float16 or bfloat16")
    head_dim = q.shape[-1]
    if head_dim > _MAX_HEAD_DIM or v.shape[-1] != head_dim:
        raise ValueError(
            f"head_dim: got {head_dim} and {v.shape[-1]} for v, wanted the same and at most {_MAX_HEAD_DIM} with INT8 "
            "queries and keys: call flash_attn_func"
        )
    if call.scale <= 0.0:
        raise ValueError(f"softmax_scale: got {call.scale}, wanted a positive number with INT8 queries and keys")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise RuntimeError("attention with INT8 queries and keys has no gradient: call it under torch.no_grad()")
    mean = k.mean(1, dtype=torch.float32) if smooth_k and k.shape[1] else None
    if head_dim % _HEAD_DIM_STEP:
        call.q, call.k, call.v = (pad(x, (0, -head_dim % _HEAD_DIM_STEP)) for x in (q, k, v))
        padded_mean = None if mean is None else pad(mean, (0, -head_dim % _HEAD_DIM_STEP))
        out, lse = backends.select(q).int8_forward(call, padded_mean)
        out = out[..., :head_dim]
    else:
        out, lse = backends.select(q).int8_forward(call, mean)
    if not return_lse:
        return out
    if mean is not None:
        grouped = q.unflatten(2, (k.shape[2], -1)).float()  # [batch, seqlen_q, heads_k, group, head_dim]
        lse += call.scale * torch.einsum("bmhgd,bhd->bhgm", grouped, mean).flatten(1, 2)
    return out, lse
